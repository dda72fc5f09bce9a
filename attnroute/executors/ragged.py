"""Sequences of different lengths behind each other: which tokens belong together, and how a band reads there.

Packed documents, layout thd and padded rows without their padding all become such a ragged batch: the tokens
of all sequences and the prefix sums of their lengths. A band is then counted from the diagonal that ends with
a sequence's last query and key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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
    """Return the sequences of a mask of key padding, or of documents.

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


def per_token(lse: Tensor, sums_q: Tensor, total: int) -> Tensor:
    """Return (num_heads_q, total); older kernels pad to (sequences, num_heads_q, longest_q)."""
    if lse.dim() == 2:
        return lse
    ids, at = places(sums_q, total)
    return lse[ids, :, at].T


def per_sequence(lse: Tensor, sums_q: Tensor, longest_q: int) -> Tensor:
    """Undo `per_token`: +inf where a sequence has no such query."""
    ids, at = places(sums_q, lse.shape[1])
    padded = lse.new_full((sums_q.shape[0] - 1, lse.shape[0], longest_q), math.inf)
    padded[ids, :, at] = lse.T
    return padded


def places(sums_q: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and its place in it."""
    tokens = torch.arange(total, dtype=torch.int32, device=sums_q.device)
    ids = torch.searchsorted(sums_q[1:], tokens, right=True, out_int32=True)
    return ids, tokens - sums_q[ids]
