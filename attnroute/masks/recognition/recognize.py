"""Find the mask objects that allow the same as a dense mask, where the keys of every query are one run.

Causal, window, padding, prefix and documents each allow one run of keys per query, and a conjunction allows
where the runs meet. So a mask is read as the first and the last key of each query, candidates are built from
those, and a candidate counts only if it has the same first and last key for every query: what is recognised
is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnroute.masks.objects.bands import Causal, PrefixLM, Window
from attnroute.masks.objects.tokens import Documents, KeyPadding

if TYPE_CHECKING:
    from attnroute.masks.objects.base import Mask
    from attnroute.vocabulary import Alignment


class Rows(NamedTuple):
    """The keys of each query: those from `first` to `last`.

    Attributes:
        first: Integers (batch or 1, seqlen_q or 1) on the CPU; `seqlen_kv` where a query has no key.
        last: The same; -1 where a query has no key.
        batch: Batch size of the call.
        seqlen_q: Query length of the call.
        seqlen_kv: Key length.
    """

    first: Tensor
    last: Tensor
    batch: int
    seqlen_q: int
    seqlen_kv: int

    @property
    def filled(self) -> Tensor:
        """True where a query has a key."""
        return self.last >= 0

    @property
    def queries(self) -> Tensor:
        """The query indices, (seqlen_q,)."""
        return torch.arange(self.seqlen_q, dtype=self.first.dtype, device=self.first.device)

    @property
    def diagonals(self) -> tuple[tuple[Alignment, int], ...]:
        """Alignments that differ, and the key on the diagonal of query 0: negative if that has none."""
        if self.seqlen_q == self.seqlen_kv:
            return (("top_left", 0),)
        return (("top_left", 0), ("bottom_right", self.seqlen_kv - self.seqlen_q))

    @property
    def have_diagonal(self) -> bool:
        """There are several queries, each with a row of its own: only then two diagonals differ."""
        return self.first.shape[1] > 1


class _Candidate(NamedTuple):
    """Masks, and the first and last keys that they allow together, which broadcast to (batch, seqlen_q)."""

    masks: tuple[Mask, ...]
    first: Tensor
    last: Tensor

    def __and__(self, other: _Candidate) -> _Candidate:
        first, last = torch.maximum(self.first, other.first), torch.minimum(self.last, other.last)
        return _Candidate((*self.masks, *other.masks), first, last)

    def matches(self, rows: Rows) -> bool:
        same = (self.first == rows.first) & (self.last == rows.last)
        return bool(torch.where(rows.filled, same, self.first > self.last).all())


def recognize(rows: Rows) -> tuple[Mask, ...] | None:
    """Return masks that together allow exactly these keys; () for no mask at all, None where none are found.

    What has fewer and more common parts is found first: nothing, causal, window, key padding, bands beside
    padding, documents, prefix.
    """
    usual = _usual(rows)
    if usual is not None:
        return usual
    return next((candidate.masks for candidate in _candidates(rows) if candidate.matches(rows)), None)


def _usual(rows: Rows) -> tuple[Mask, ...] | None:
    """Find nothing and causal, which most masks are, by a few comparisons."""
    if rows.first.any():
        return None
    if (rows.last == rows.seqlen_kv - 1).all():
        return ()
    for alignment, diagonal in rows.diagonals if rows.have_diagonal else ():
        last = (rows.queries + diagonal).clamp_(max=rows.seqlen_kv - 1)
        if torch.equal(rows.last, last.expand_as(rows.last)):
            return (Causal(alignment),)
    return None


def _candidates(rows: Rows) -> Iterator[_Candidate]:
    paddings = []
    for padding in _paddings(rows):
        paddings.append(padding)
        yield from _banded(rows, padding)
    if not rows.have_diagonal:
        return
    documents = _documents(rows)
    if documents is not None:
        for padding in paddings:
            yield from _banded(rows, documents & padding)
    for padding in paddings:
        yield from _prefixes(rows, padding)


def _paddings(rows: Rows) -> Iterator[_Candidate]:
    """Yield no padding, then padding right, left and on both sides of the keys that some query has."""
    start = rows.first.new_zeros((1, 1))
    end = start + (rows.seqlen_kv - 1)
    yield _Candidate((), start, end)
    begins, ends = rows.first.amin(1, keepdim=True), rows.last.amax(1, keepdim=True)
    right = _Candidate((KeyPadding(lengths=_per_row(ends + 1, rows)),), start, ends)
    left = _Candidate((KeyPadding(left=_per_row(begins, rows)),), begins, end)
    pads_right, pads_left = bool((ends < end).any()), bool((begins > start).any())
    if pads_right:
        yield right
    if pads_left:
        yield left
    if pads_right and pads_left:
        yield left & right


def _per_row(counts: Tensor, rows: Rows) -> list[int]:
    """One count per batch row of the call, also where one row of the tensor serves all."""
    found: list[int] = counts.flatten().tolist()
    return found if len(found) == rows.batch else found * rows.batch


def _banded(rows: Rows, context: _Candidate) -> Iterator[_Candidate]:
    """Yield the context, alone or in the bands that the keys inside its limits leave possible."""
    lows = _offsets(rows, rows.first, context.first)
    highs = _offsets(rows, rows.last, context.last) if rows.have_diagonal else (None,)
    if highs == (None,) and rows.have_diagonal and not rows.filled.all():
        # The queries that would show the right side of the band have no key.
        highs = (None, *dict(rows.diagonals).values())
    for low, high in product(lows, highs):
        if low is None and high is None:
            yield context
        elif (band := _band(rows, low, high)) is not None:
            yield band & context


def _offsets(rows: Rows, edge: Tensor, limit: Tensor) -> tuple[int | None, ...]:
    """Return the only distance from the query to its edge key that a band can have, () where they differ.

    Edges at the limits of the context do not count: with no other one, that side is open.
    """
    if edge.shape[1] < rows.seqlen_q:
        return (None,)
    offsets = (edge - rows.queries)[rows.filled & (edge != limit)]
    if not offsets.numel():
        return (None,)
    low, high = (int(n) for n in torch.aminmax(offsets))
    return (low,) if low == high else ()


def _band(rows: Rows, low: int | None, high: int | None) -> _Candidate | None:
    mask = _named(rows, low, high)
    if mask is None:
        return None
    first = rows.queries + low if low is not None else rows.first.new_zeros(1)
    last = rows.queries + high if high is not None else rows.first.new_full((1,), rows.seqlen_kv - 1)
    return _Candidate((mask,), first, last)


def _named(rows: Rows, low: int | None, high: int | None) -> Mask | None:
    """Return the band as a mask that ends at the diagonal, else around it evenly, else anyhow, or None."""
    windows = []
    for alignment, diagonal in rows.diagonals:
        left = None if low is None else diagonal - low
        right = None if high is None else high - diagonal
        if (left or 0) >= 0 and (right or 0) >= 0:
            windows.append((right != 0, left != right, Window(left, right, alignment)))
    if not windows:
        return None
    window = min(windows, key=lambda found: found[:2])[-1]
    return Causal(window.alignment) if (window.left, window.right) == (None, 0) else window


def _prefixes(rows: Rows, context: _Candidate) -> Iterator[_Candidate]:
    """Yield prefixes as long as the row of the first query."""
    counts = rows.last[:, :1] + 1
    for alignment, diagonal in rows.diagonals:
        last = torch.maximum(rows.queries + diagonal, counts - 1)
        mask = PrefixLM(_per_row(counts, rows), alignment)
        yield _Candidate((mask,), rows.first.new_zeros(1), last) & context


def _documents(rows: Rows) -> _Candidate | None:
    """Return the smallest documents outside of which no query has a key, None where that is one.

    If documents with a band and padding make the mask, then so do these with the same band and padding: they
    lie within those, and no query has a key outside of them.
    """
    if rows.seqlen_q != rows.seqlen_kv:
        return None
    tokens = rows.queries
    reached = rows.last.cummax(1).values[:, :-1]
    needed = rows.first.flip(1).cummin(1).values.flip(1)[:, 1:]
    starts = torch.ones_like(rows.first, dtype=torch.bool)
    starts[:, 1:] = (reached < tokens[1:]) & (needed >= tokens[1:])
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    # Successive tokens that neither attend nor are attended are one document of padding.
    unused = starts & ends & ~rows.filled
    starts[:, 1:] &= ~(unused[:, 1:] & unused[:, :-1])
    ends[:, :-1] = starts[:, 1:]
    if not starts[:, 1:].any():
        return None
    first = torch.where(starts, tokens, 0).cummax(1).values
    last = torch.where(ends, tokens, rows.seqlen_kv).flip(1).cummin(1).values.flip(1)
    return _Candidate((_from_starts(starts),), first, last)


def _from_starts(starts: Tensor) -> Documents:
    """Return lengths where every batch row has the same documents, else ids."""
    if (starts != starts[:1]).any():
        return Documents(ids=starts.cumsum(1, dtype=torch.int32))
    at = [*starts[0].nonzero().flatten().tolist(), starts.shape[1]]
    return Documents(lengths=tuple(stop - start for start, stop in pairwise(at)))
