"""FLASH on ragged batches: packed documents, sequences of layout thd, and padded rows without their padding.

`aten::_flash_attention_forward` takes the tokens of all sequences behind each other and prefix sums. A window
is counted from the diagonal that ends with a sequence's last query and key.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered import sequences
from attnroute.masks.lowered.sequences import Rows


class Ragged(NamedTuple):
    """Sequences, and upper bounds of their lengths in tokens."""

    rows: Rows
    longest_q: int
    longest_kv: int


def rows_of(inputs: Inputs, *, training: bool) -> Ragged:
    """Return the sequences that key padding says, or documents.

    Only one of both rules anything out: documents beside key padding are one document then.
    """
    mask, seqlen_q, seqlen_kv = inputs.mask, inputs.query.shape[2], inputs.key.shape[2]
    if mask.key_counts is None or mask.padding_side is None:
        return _documents(inputs)
    if seqlen_q == 1 and not training:
        rows = sequences.padded_single(mask.key_counts, mask.padding_side, seqlen_kv)
    else:
        rows = sequences.padded(mask.key_counts, mask.padding_side, seqlen_q, seqlen_kv)
    return Ragged(rows, seqlen_q, seqlen_kv)


def _documents(inputs: Inputs) -> Ragged:
    mask, batch = inputs.mask, inputs.query.shape[0]
    if mask.cu_seqlens is None:
        msg = "to_varlen requires documents or key padding given by lengths; the decision promised them."
        raise ValueError(msg)
    sums = sequences.repeated(mask.cu_seqlens, batch, inputs.query.shape[2])
    if mask.cu_seqlens_kv is None:
        return Ragged(Rows(sums, sums), mask.max_seqlen, mask.max_seqlen)
    sums_kv = sequences.repeated(mask.cu_seqlens_kv, batch, inputs.key.shape[2])
    return Ragged(Rows(sums, sums_kv), mask.max_seqlen, mask.max_seqlen_kv)


def whole_rows(inputs: Inputs) -> Ragged:
    """Return every batch row as one sequence."""
    batch, (seqlen_q, seqlen_kv) = inputs.query.shape[0], (inputs.query.shape[2], inputs.key.shape[2])
    sums = (sequences.whole_rows(batch, n, inputs.query.device) for n in (seqlen_q, seqlen_kv))
    return Ragged(Rows(*sums), seqlen_q, seqlen_kv)


def window_sizes(inputs: Inputs) -> tuple[int | None, int | None]:
    """Return the band as counts of keys to each side of the bottom-right diagonal; None is open."""
    low, high = inputs.mask.band_lo, inputs.mask.band_hi
    offset = inputs.key.shape[2] - inputs.query.shape[2] if inputs.mask.diagonal is None else 0
    return (None if low is None else offset - low), (None if high is None else high - offset)


def misses_keys(inputs: Inputs) -> bool:
    """Return whether the operator, given whole rows, would read the right side of a window wrongly.

    It opens a right side of seqlen_kv or more keys, and reads an open one beside a closed left side as
    seqlen_kv. Both are right only where there are no more queries than keys. Source: flash_api.cpp of torch
    2.13, mha_fwd and set_params_fprop. Ragged batches go by an upper bound that `run` can choose.
    """
    seqlen_q, seqlen_kv = inputs.query.shape[2], inputs.key.shape[2]
    _, right = window_sizes(inputs)
    return seqlen_q > seqlen_kv and (right is None or right >= seqlen_kv)


def run(inputs: Inputs, ragged: Ragged, *, reads_lse: bool) -> tuple[Any, ...]:
    """Run the kernel on sequences.

    Args:
        inputs: The call.
        ragged: Its sequences.
        reads_lse: Somebody reads the log-sum-exp: the caller, a sink or a backward.

    Returns:
        Output and log-sum-exp in the shapes of the inputs, then what the backward takes: its state of
        dropout (two tensors), prefix sums and upper bounds of queries and of keys, and whether its own
        log-sum-exp is padded.
    """
    batch, _, seqlen, _ = inputs.query.shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (inputs.query, inputs.key, inputs.value))
    (sums_q, sums_kv, used_kv), longest_q, longest_kv = ragged
    left, right = window_sizes(inputs)
    if longest_q == 1:
        # The only query of a sequence is its last, and no key comes after the diagonal.
        right = None
    if left is not None or right:
        longest_kv = max(longest_kv, longest_q, 1 if right is None else right + 1)
    if longest_q == 1 and (reads_lse or query.shape[0] != sums_q.shape[0] - 1):
        # With a bound of one the kernel counts on one query in every sequence, empty ones included, and takes
        # the query heads of a key head for queries. Where it then splits the keys, or a row has none, it
        # writes the log-sum-exp into the places of others (Dao-AILab/flash-attention#2573).
        longest_q = 2
    out, lse, seed, offset, *_ = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        sums_q,
        sums_kv,
        longest_q,
        longest_kv,
        inputs.dropout_p,
        False,
        False,
        scale=inputs.scale,
        window_size_left=left,
        window_size_right=right,
        **({} if used_kv is None else {"seqused_k": used_kv}),
    )
    rest = (seed, offset, sums_q, sums_kv, longest_q, longest_kv, lse.dim() != 2)
    lse = _per_token(lse, sums_q, query.shape[0]).unflatten(1, (batch, seqlen))
    return out.unflatten(0, (batch, seqlen)).transpose(1, 2), lse.transpose(0, 1), *rest


def _per_token(lse: Tensor, sums_q: Tensor, total: int) -> Tensor:
    """Return (num_heads_q, total); older kernels pad to (sequences, num_heads_q, longest_q)."""
    if lse.dim() == 2:
        return lse
    ids, at = places(sums_q, total)
    return lse[ids, :, at].T


def per_sequence(lse: Tensor, sums_q: Tensor, longest_q: int) -> Tensor:
    """Undo what `run` does to a padded log-sum-exp; +inf where a sequence has no such query."""
    ids, at = places(sums_q, lse.shape[1])
    padded = lse.new_full((sums_q.shape[0] - 1, lse.shape[0], longest_q), math.inf)
    padded[ids, :, at] = lse.T
    return padded


def places(sums_q: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and its place in it."""
    tokens = torch.arange(total, dtype=torch.int32, device=sums_q.device)
    ids = torch.searchsorted(sums_q[1:], tokens, right=True, out_int32=True)
    return ids, tokens - sums_q[ids]
