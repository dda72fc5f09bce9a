"""When a mask that is built for a kernel makes the memory of a call quadratic in the length.

A kernel without windows or documents can be handed a dense mask in their place. Its time is then that of full
attention and its memory grows with seqlen_q * seqlen_kv. Where that time is not predicted, such a route comes
after every route that builds nothing of that size; where it is, only with a mask that takes more memory than
query, key, value and output (`engine.rank`).
"""

from __future__ import annotations

from typing import Final

from attnroute.question.call import Call
from attnroute.question.facts import Facts
from attnroute.tables.conditions import compiled
from attnroute.vocabulary import DTYPE_BYTES

SMALL_MASK: Final = ("mask_elements", "<4194304")
"""The condition under which a mask of padded rows is too small to count. Below 2048 queries and keys it takes
less than 4 MiB, and the kernels that need none (flex, chunked) take the host longer: the preference
"predicate" begins there too, with its evidence."""
_IS_SMALL: Final = compiled([dict([SMALL_MASK])])
_SCORE_BYTES: Final = 4
"""The composed backend keeps its scores in float32."""


def score_bytes(call: Call) -> int:
    """Return the bytes of one float32 score matrix: batch * num_heads_q * seqlen_q * seqlen_kv * 4."""
    return call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv * _SCORE_BYTES


def tensor_bytes(call: Call) -> int:
    """Return the bytes of query, key, value and output."""
    tokens = call.seqlen_q * call.num_heads_q + call.seqlen_kv * call.num_heads_kv
    return call.batch * tokens * (call.head_dim_qk + call.head_dim_v) * DTYPE_BYTES[call.dtype]


def holds_quadratic(facts: Facts) -> bool:
    """Return whether the call has a tensor with an entry for every query and key."""
    return facts["mask_has_query_dim"] is True


def may_grow(facts: Facts) -> bool:
    """Return whether a dense mask built for this call counts as quadratic.

    It does not where the caller brought a tensor of that size, nor where it is small. In a ragged batch it
    always does: the mask would hold every pair of tokens, most of which belong to different sequences.
    """
    if facts["mask_has_query_dim"] is True:
        return False
    return facts["layout"] == "thd" or _IS_SMALL.answer(facts) != "true"
