"""Ragged batches as kernels take them: prefix sums, ids and diagonals, made without waiting for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnroute.masks import checks
from attnroute.masks.kept import remember, remember_pair

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import PaddingSide
    from attnroute.vocabulary import Alignment


class Tokens(NamedTuple):
    """The sequences that the tokens of one tensor form.

    Attributes:
        sums: Int32 prefix sums (sequences + 1,), from 0 to the number of tokens.
        ids: Int32 (1, tokens), the sequence of each token.
    """

    sums: Tensor
    ids: Tensor


class Rows(NamedTuple):
    """Padded batch rows as sequences.

    Attributes:
        sums_q: Int32 prefix sums of the queries, (sequences + 1,).
        sums_kv: Int32 prefix sums of the keys, (sequences + 1,).
        used_kv: Int32 (sequences,), the keys of each sequence where they end before the next one starts.
    """

    sums_q: Tensor
    sums_kv: Tensor
    used_kv: Tensor | None = None


def tokens(name: str, sums: Tensor, total: int, device: Any) -> Tokens:
    """Return the sequences that prefix sums describe, made once per tensor.

    Args:
        name: What an error calls the tensor.
        sums: Integer tensor (sequences + 1,).
        total: How many tokens there are.
        device: Where the results lie.

    Raises:
        ArgumentError: Sums on the CPU do not rise from 0 to `total`.
    """

    def make() -> Tokens:
        checks.sequence_sums(name, sums, total)
        found = covering(sums.to(device), total)
        places = torch.arange(total, dtype=torch.int32, device=found.device)
        # The first sum is 0. Without it inductor (of torch 2.11) has a slice here, which it cannot search.
        ids = torch.searchsorted(found, places, right=True, out_int32=True) - 1
        return Tokens(found, ids[None])

    return remember(sums, ("ragged", total, device), make)


def covering(sums: Tensor, total: int) -> Tensor:
    """Return int32 prefix sums that cover all tokens and nothing else, whatever the values are.

    A device is not waited for: there the first sequence starts with the first token and the last one ends
    with the last, so that a kernel reads nothing behind them and writes every row.
    """
    rising = sums.to(torch.int64).clamp(0, total).cummax(0).values
    # Written with fill_, because an assignment of numbers waits for a CUDA device.
    rising[:1].fill_(0)
    rising[-1:].fill_(total)
    return rising.to(torch.int32)


def diagonal(queries: Tokens, keys: Tokens, alignment: Alignment) -> Tensor:
    """Return the key on each query's diagonal, int32 (total_q,), made once per pair of sums.

    The diagonal of a sequence starts with its first query and key, or ends with its last ones.
    """

    def make() -> Tensor:
        at = slice(1, None) if alignment == "bottom_right" else slice(None, -1)
        shift = keys.sums[at] - queries.sums[at]
        places = torch.arange(queries.ids.shape[1], dtype=torch.int32, device=shift.device)
        return places + shift.index_select(0, queries.ids[0])

    return remember_pair(queries.sums, keys.sums, ("diagonal", alignment), make)


def padded(counts: Tensor, side: PaddingSide, seqlen_q: int, seqlen_kv: int) -> Rows:
    """Return padded rows as two sequences each, one of which has the padding and no query.

    Every key lies in a sequence, so that a kernel writes its gradient. The diagonal of the sequence with the
    queries ends with the row's last key if the padding is on the left.

    Args:
        counts: Int32 (batch,), the keys that exist.
        side: Where the others are.
        seqlen_q: Queries of a row.
        seqlen_kv: Keys of a row, padding included.
    """

    def make() -> Rows:
        first_q, first_kv = _firsts(counts, seqlen_q), _firsts(counts, seqlen_kv)
        if side == "right":
            between_q, between_kv = first_q + seqlen_q, first_kv + counts
        else:
            between_q, between_kv = first_q, first_kv + (seqlen_kv - counts)
        ends_q = torch.stack([between_q, first_q + seqlen_q], 1)
        ends_kv = torch.stack([between_kv, first_kv + seqlen_kv], 1)
        return Rows(_from_zero(ends_q), _from_zero(ends_kv))

    return remember(counts, ("padded", side, seqlen_q, seqlen_kv), make)


def in_use(counts: Tensor, side: PaddingSide, seqlen_q: int, seqlen_kv: int, step: int) -> Rows:
    """Return padded rows as one sequence each, for kernels that may leave keys out.

    The kernel may then treat the query heads that share a key head as queries, which takes exactly one query
    per sequence. Gradients of the keys that are left out are not written.

    Args:
        counts: Int32 (batch,), the keys that exist.
        side: Where the others are.
        seqlen_q: Queries of a row.
        seqlen_kv: Keys of a row, padding included.
        step: How many tokens after a row's first key the next row's lies.
    """

    def make() -> tuple[Tensor, Tensor]:
        first = _firsts(counts, step)
        starts = first if side == "right" else first + (seqlen_kv - counts)
        queries = torch.arange(counts.shape[0] + 1, dtype=torch.int32, device=counts.device) * seqlen_q
        return queries, torch.cat([starts, first[-1:] + seqlen_kv])

    # The counts themselves would be kept by what is kept with them.
    sums_q, sums_kv = remember(counts, ("in_use", side, seqlen_q, seqlen_kv, step), make)
    return Rows(sums_q, sums_kv, counts)


def repeated(sums: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return prefix sums of rows that all have the same sequences, which then follow each other."""
    if batch == 1:
        return sums

    def make() -> Tensor:
        rows = torch.arange(batch, dtype=sums.dtype, device=sums.device)[:, None] * seqlen
        return _from_zero(sums[1:] + rows)

    return remember(sums, ("repeated", batch, seqlen), make)


def whole_rows(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Return prefix sums of rows that are one sequence each, int32 (batch + 1,)."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def _firsts(counts: Tensor, seqlen: int) -> Tensor:
    return torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device) * seqlen


def _from_zero(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends.flatten()])
