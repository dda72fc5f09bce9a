"""Sequences of different lengths behind each other: which tokens belong together, and how a band reads there.

Packed documents, layout thd and padded rows without their padding all become such a ragged batch: the tokens
of all sequences and the prefix sums of their lengths. A band is then counted from the diagonal that ends with
a sequence's last query and key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import methodcaller
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered import sequences
from attnroute.masks.lowered.sequences import Rows
from attnroute.masks.tracing import is_traced, is_wrapped

SUMS_LIMIT: Final = 2**31 - 1
"""Tokens that int32 prefix sums count."""


class Ragged(NamedTuple):
    """Sequences, upper bounds of their lengths in tokens, and where the keys of their rows lie.

    Attributes:
        rows: The sequences.
        longest_q: No sequence has more queries.
        longest_kv: No sequence has more keys.
        step: How many tokens after a row's first key the next row's lies in memory, for sequences of keys
            where they lie; None = the rows follow each other.
    """

    rows: Rows
    longest_q: int
    longest_kv: int
    step: int | None = None


def rows_of(inputs: Inputs, *, training: bool, in_place: bool = False) -> Ragged:
    """Return the sequences of a mask of key padding, or of documents.

    Only one of both rules anything out: documents beside key padding are one document then.

    Args:
        inputs: The call.
        training: The kernel's backward writes the gradient of every key.
        in_place: The kernel takes keys of any strides, and how many of a sequence's keys are in use. Keys of
            padded rows need no copy then, whichever of heads and tokens are outermost.
    """
    mask, seqlen_q, seqlen_kv = inputs.mask, inputs.query.shape[2], inputs.key.shape[2]
    counts, side = mask.key_counts, mask.padding_side
    if counts is None or side is None:
        return _documents(inputs)
    step = step_of(inputs.key, inputs.value) if in_place and not training else None

    def make() -> Rows:
        if step is None and (training or seqlen_q > 1):
            return sequences.padded(counts, side, seqlen_q, seqlen_kv)
        return sequences.in_use(counts, side, seqlen_q, seqlen_kv, seqlen_kv if step is None else step)

    what = ("rows", training, seqlen_q, seqlen_kv, step)
    rows = make() if inputs.keeper is None else inputs.keeper.keep(what, make)
    return Ragged(rows, seqlen_q, seqlen_kv, step)


def tokens_of(tensor: Tensor, step: int | None = None) -> Tensor:
    """Return the tokens of all rows, (total, num_heads, head_dim), of a tensor in layout bhsd.

    Args:
        tensor: (batch, num_heads, seqlen, head_dim).
        step: Of `Ragged`: the result is a view then, in which tokens that no sequence has lie between rows.
    """
    if step is None:
        return tensor.transpose(1, 2).flatten(0, 1)
    batch, heads, seqlen, head_dim = tensor.shape
    _, head, token, _ = tensor.stride()
    # The last token of the last row is the last one of the view, so nothing behind the memory is in it.
    return tensor.as_strided(((batch - 1) * step + seqlen, heads, head_dim), (token, head, 1))


def tokens_like(tensor: Tensor, tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `tokens_of` for tensors that lie as one does, in one step where its tokens are a view.

    Not for tensors that autograd sees: the backward of that step is slow.
    """
    if tokens.data_ptr() != tensor.data_ptr():
        return tokens_of
    return methodcaller("as_strided", tokens.shape, tokens.stride())


def step_of(key: Tensor, value: Tensor) -> int | None:
    """Return how many tokens lie from one row of keys to the next, None where that is no whole number."""
    steps = set()
    for tensor in (key, value):
        row, _, token, last = tensor.stride()
        if is_traced(tensor) or is_wrapped(tensor) or last != 1 or token <= 0 or row % token:
            return None
        steps.add(row // token)
    batch, _, seqlen, _ = key.shape
    step = steps.pop()
    # Prefix sums rise and are int32.
    return step if not steps and seqlen <= step and (batch + 1) * step <= SUMS_LIMIT else None


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
