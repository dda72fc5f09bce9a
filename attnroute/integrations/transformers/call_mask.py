"""The mask of one attention call of a transformers model: what it passes, states beside it, or leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnroute.errors import argument_error
from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.masks import All, Causal, Dense, Documents, Mask, Window
from attnroute.masks.flat import with_documents
from attnroute.masks.kept import remember
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from attnroute.integrations.transformers.pattern import Keys, Pattern


def carried(
    given: CarriedMask, query: Tensor, key: Tensor, kwargs: Mapping[str, Any], *, compiling: bool
) -> tuple[Mask | Tensor | None, Keys]:
    """Return what a mask of `make_mask` says, and the keys that it is for; worked out once for all layers.

    Args:
        given: What the model passes as attention_mask.
        query: (batch, num_heads_q, q_length, head_dim).
        key: (batch, num_heads_kv, kv_length, head_dim).
        kwargs: Further arguments of the module: sliding_window.
        compiling: A graph does not know the pattern of the mask, but its tensors, of which the dense mask is
            made.

    Raises:
        ArgumentError: The mask is for other lengths.
    """
    if compiling:
        return given & True, None
    asked = (query.shape[2], key.shape[2], kwargs.get("sliding_window"))
    answer = given.answer
    # A block has the memory of its source, and who made the dense mask may write into it.
    if answer is not None and answer[0] == asked and given.made is None and given.source is None:
        return answer[1]
    pattern = given.pattern
    if pattern is None:
        return given.dense(), None
    if asked[:2] != (pattern.q_length, pattern.kv_length):
        raise argument_error(
            "attention_mask",
            f"{asked[0]} queries and {asked[1]} keys, as query and key have",
            f"one for {pattern.q_length} and {pattern.kv_length}",
            "make the mask for the lengths of this layer",
        )
    if asked[2] is not None:
        pattern = pattern.with_window(asked[2])
    said = pattern.said
    if said is None:
        return given.dense(), None
    given.answer = (asked, said)
    return said


def unstated(seqlen_q: int, seqlen_kv: int, is_causal: bool, kwargs: Mapping[str, Any]) -> Mask | None:
    """Return what a module means that passes no mask; never a guess about an alignment.

    Args:
        seqlen_q: Queries.
        seqlen_kv: Keys.
        is_causal: What the module says of itself.
        kwargs: Further arguments of the module: sliding_window.

    Raises:
        ArgumentError: It is left open what is masked.
    """
    window: int | None = kwargs.get("sliding_window")
    if seqlen_q == 1 or not is_causal:
        if window is not None and seqlen_kv > window:
            raise argument_error(
                "attention_mask",
                f"a mask with the sliding window of {window}, beyond which {seqlen_kv} keys reach",
                None,
                "make it with transformers' masking_utils",
            )
        return None
    if seqlen_q != seqlen_kv:
        raise argument_error(
            "attention_mask",
            "a mask for causal attention with as many queries as keys excepted",
            f"None with {seqlen_q} queries and {seqlen_kv} keys",
            "make it with transformers' masking_utils, or pass is_causal=False",
        )
    return Causal() if window is None else Window(window - 1, 0)


def with_cu_seqlens(
    mask: Mask | Tensor | None,
    given: Tensor | None,
    query: Tensor,
    key: Tensor,
    kwargs: Mapping[str, Any],
    *,
    compiling: bool,
) -> Mask | Tensor | None:
    """Return the mask with the documents that `cu_seq_lens_q` and `cu_seq_lens_k` state.

    Args:
        mask: What is masked already.
        given: What the model passes as attention_mask; the result is kept with its pattern, so that all
            layers share one.
        query: (1, num_heads_q, seqlen, head_dim).
        key: (1, num_heads_kv, seqlen, head_dim).
        kwargs: Further arguments of the module: cu_seq_lens_q and cu_seq_lens_k, integer tensors (documents +
            1,), prefix sums of the lengths, equal ones; one batch row holds all documents.
        compiling: A graph knows no pattern.

    Raises:
        ArgumentError: They are no partition of the tokens of one batch row, or contradict the mask.
    """
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise argument_error(
            "cu_seq_lens_q and cu_seq_lens_k",
            "both of them, a batch of 1 and as many queries as keys",
            f"batch {query.shape[0]}, {query.shape[2]} queries, {key.shape[2]} keys, "
            f"{'one' if (cu_q is None) != (cu_k is None) else 'both'} of them",
            "flatten the batch, or pass a mask",
        )
    if compiling and isinstance(mask, Tensor):
        return with_documents(mask, cu_q)  # type: ignore[no-any-return]
    pattern: Pattern | None = None
    if isinstance(given, CarriedMask) and not compiling:
        pattern = given.pattern
    if pattern is None:
        return _joined(mask, None, cu_q, cu_k)
    what = ("cu_seq_lens", id(cu_q), id(cu_k), id(mask))
    ids = pattern.ids
    # What is kept holds the tensors, so that their ids stay theirs for as long.
    return remember(pattern, what, lambda: (_joined(mask, ids, cu_q, cu_k), cu_q, cu_k, mask))[0]


def _joined(
    mask: Mask | Tensor | None, ids: Tensor | None, cu_q: Tensor, cu_k: Tensor
) -> Mask | Tensor | None:
    # A tracer reads no values, so there they must be right, as for `attention()`.
    unread = is_compiling() or is_traced(cu_q) or is_traced(cu_k)
    if cu_q is not cu_k and not unread and not torch.equal(cu_q, cu_k):
        raise argument_error(
            "cu_seq_lens_k", "the same documents as cu_seq_lens_q", "others", "pass equal ones"
        )
    if ids is not None:
        _check_agreement(ids[0], cu_q)
        return mask
    documents = Documents(cu_seqlens=cu_q)
    if mask is None:
        return documents
    return All((*(Dense(mask) if isinstance(mask, Tensor) else mask).nodes, documents))


def _check_agreement(ids: Tensor, cu_seqlens: Tensor) -> None:
    starts = torch.zeros(len(ids) + 1, dtype=torch.int64, device=ids.device)
    starts[cu_seqlens[:-1].long()] = 1
    stated = starts[:-1].cumsum(0)
    if not torch.equal(stated - stated[0], (ids - ids[0]).long()):
        raise argument_error(
            "cu_seq_lens_q",
            "the documents that position_ids state, which start where positions do not go up by one",
            "other ones",
            "pass only one of both",
        )
