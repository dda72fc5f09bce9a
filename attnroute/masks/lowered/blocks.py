"""Find which blocks of a mask allow something, and which everything: what a block-sparse kernel visits.

The result is two bool matrices over blocks of queries and keys: `some` is True where a block may allow a
pair and `every` where all its pairs are surely allowed. Both are safe guesses, as a kernel evaluates the mask
inside every block that is not `every`; bands, documents and key rows are guessed from their ends alone, so
that nothing of size seqlen_q * seqlen_kv is made.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, MaskFunction
from attnroute.masks.lowered.region import Region, allowed, block_matrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGION_ELEMENTS: Final = 2**26
"""Most elements of a predicate or dense mask that are evaluated together: 64 MiB of bools."""
BLOCK: Final = (128, 128)
"""Queries and keys of a block: FlexAttention's default."""


class Guess(NamedTuple):
    """Bool tensors (batch or 1, heads or 1, query blocks or 1, key blocks or 1)."""

    some: Tensor
    every: Tensor

    def __and__(self, other: Guess) -> Guess:  # type: ignore[override]
        """Both must allow."""
        return Guess(self.some & other.some, self.every & other.every)

    def __or__(self, other: Guess) -> Guess:
        """One must allow."""
        return Guess(self.some | other.some, self.every | other.every)

    def __invert__(self) -> Guess:
        """What surely is nothing becomes everything, what surely is everything becomes nothing."""
        return Guess(~self.every, ~self.some)


class Grid(NamedTuple):
    """The sizes that blocks are cut from."""

    extent: Extent
    size_q: int
    size_kv: int

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks of queries and blocks of keys."""
        return -(-self.extent.seqlen_q // self.size_q), -(-self.extent.seqlen_kv // self.size_kv)


def guess(lowered: LoweredMask, extent: Extent, block: tuple[int, int] = BLOCK) -> Guess:
    """Return what is known about every block of a mask.

    Args:
        lowered: The mask.
        extent: The sizes it is read at, none of them 0.
        block: Queries and keys of a block.

    Returns:
        Tensors that broadcast to (batch or 1, heads or 1, query blocks, key blocks).
    """
    return _guess(lowered, Grid(extent, *block))


def _guess(lowered: LoweredMask, grid: Grid) -> Guess:
    yes = torch.ones((1, 1, *grid.shape), dtype=torch.bool, device=grid.extent.device)
    result = Guess(yes, yes)
    for part in _parts(lowered, grid):
        result = result & part
    return result


def _parts(lowered: LoweredMask, grid: Grid) -> Iterator[Guess]:
    if lowered.band_lo is not None or lowered.band_hi is not None:
        yield _band(lowered, grid)
    if lowered.document_ids_q is not None and lowered.document_ids_kv is not None:
        yield _documents(lowered.document_ids_q, lowered.document_ids_kv, grid)
    if lowered.key_keep is not None:
        yield _key_rows(lowered.key_keep, grid)
    if lowered.dense is not None:
        yield _evaluated(replace(FULL, dense=lowered.dense), grid, tuple(lowered.dense.shape[:2]))
    for alternatives in lowered.either:
        yield _disjunction([_guess(part, grid) for part in alternatives])
    for part in lowered.exclude:
        yield ~_guess(part, grid)
    for function in lowered.functions:
        yield _evaluated(replace(FULL, functions=(function,)), grid, _function_shape(function, grid))
    for block_mask in lowered.sparse:
        yield _sparse(block_mask, grid)


def _disjunction(parts: list[Guess]) -> Guess:
    result = parts[0]
    for part in parts[1:]:
        result = result | part
    return result


def _band(lowered: LoweredMask, grid: Grid) -> Guess:
    """A block holds the differences from its upper right corner to its lower left one, and all between."""
    first_q, last_q = _ends(lowered.diagonal, grid.extent.seqlen_q, grid.size_q, grid.extent.device)
    first_kv, last_kv = _ends(None, grid.extent.seqlen_kv, grid.size_kv, grid.extent.device)
    smallest = first_kv[None] - last_q[:, None]
    largest = last_kv[None] - first_q[:, None]
    some = every = torch.ones((), dtype=torch.bool, device=smallest.device)
    if lowered.band_lo is not None:
        some, every = some & (largest >= lowered.band_lo), every & (smallest >= lowered.band_lo)
    if lowered.band_hi is not None:
        some, every = some & (smallest <= lowered.band_hi), every & (largest <= lowered.band_hi)
    return Guess(some[None, None], every[None, None])


def _ends(values: Tensor | None, length: int, size: int, device: object) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest position of each block; positions may be given per token."""
    if values is not None:
        return _blockwise(values[None], size, torch.amin)[0], _blockwise(values[None], size, torch.amax)[0]
    first = torch.arange(0, length, size, device=device)  # type: ignore[call-overload]
    return first, (first + size - 1).clamp(max=length - 1)


def _blockwise(rows: Tensor, size: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce runs of `size` along the last dimension; the last run is filled with its last value."""
    missing = -rows.shape[-1] % size
    if missing:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
    return reduce(rows.unflatten(-1, (-1, size)), -1)


def _documents(ids_q: Tensor, ids_kv: Tensor, grid: Grid) -> Guess:
    low_q, high_q = (_blockwise(ids_q, grid.size_q, f)[:, None, :, None] for f in (torch.amin, torch.amax))
    low_kv, high_kv = (
        _blockwise(ids_kv, grid.size_kv, f)[:, None, None, :] for f in (torch.amin, torch.amax)
    )
    some = (low_q <= high_kv) & (low_kv <= high_q)
    return Guess(some, (low_q == high_kv) & (low_kv == high_q))


def _key_rows(keep: Tensor, grid: Grid) -> Guess:
    some, every = (_blockwise(keep, grid.size_kv, f)[:, None, None, :] for f in (torch.any, torch.all))
    return Guess(some, every)


def _function_shape(function: MaskFunction, grid: Grid) -> tuple[int, int]:
    batch, heads = grid.extent.batch, grid.extent.num_heads_q
    return batch if function.per_batch else 1, heads if function.per_head else 1


def _evaluated(part: LoweredMask, grid: Grid, leading: tuple[int, ...]) -> Guess:
    """Evaluate every pair, a bounded region at a time."""
    blocks_q, blocks_kv = grid.shape
    some = torch.empty((*leading, blocks_q, blocks_kv), dtype=torch.bool, device=grid.extent.device)
    every = torch.empty_like(some)
    for at, region in _regions(grid, leading):
        pairs = allowed(part, region)
        if pairs is not None:
            some[at], every[at] = _reduced(pairs, region, grid)
    return Guess(some, every)


def _regions(grid: Grid, leading: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], Region]]:
    """Cut (batch, heads, queries, keys) into regions of whole blocks that stay below `REGION_ELEMENTS`."""
    (batch, heads), (blocks_q, blocks_kv) = leading, grid.shape
    unit = grid.size_q * grid.size_kv
    step_kv = max(1, min(blocks_kv, REGION_ELEMENTS // unit))
    step_q = max(1, min(blocks_q, REGION_ELEMENTS // (unit * step_kv)))
    step_h = max(1, min(heads, REGION_ELEMENTS // (unit * step_kv * step_q)))
    step_b = max(1, min(batch, REGION_ELEMENTS // (unit * step_kv * step_q * step_h)))
    steps = (step_b, step_h, step_q, step_kv)
    lengths, extent = (batch, heads, blocks_q, blocks_kv), grid.extent
    for starts in product(*(range(0, n, step) for n, step in zip(lengths, steps, strict=True))):
        stops = tuple(min(a + step, n) for a, step, n in zip(starts, steps, lengths, strict=True))
        queries = (starts[2] * grid.size_q, min(stops[2] * grid.size_q, extent.seqlen_q))
        keys = (starts[3] * grid.size_kv, min(stops[3] * grid.size_kv, extent.seqlen_kv))
        rows = (starts[0], stops[0], starts[1], stops[1])
        yield tuple(map(slice, starts, stops)), Region(*rows, *queries, *keys, extent.device)


def _reduced(pairs: Tensor, region: Region, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return whether some and whether all pairs of each block are allowed."""
    queries, keys = region.i1 - region.i0, region.j1 - region.j0
    pairs = pairs.expand(*pairs.shape[:2], queries, keys)
    edges = (0, -keys % grid.size_kv, 0, -queries % grid.size_q)

    def blocks(filled: bool) -> Tensor:
        full = pad(pairs, edges, value=filled) if any(edges) else pairs
        cut: Tensor = full.unflatten(-1, (-1, grid.size_kv)).unflatten(-3, (-1, grid.size_q))
        return cut

    return blocks(filled=False).any(-1).any(-2), blocks(filled=True).all(-1).all(-2)


def _sparse(block_mask: object, grid: Grid) -> Guess:
    """A BlockMask of the same blocks has the answer; one of other blocks is evaluated."""
    partial, full = block_matrices(block_mask)
    if tuple(block_mask.BLOCK_SIZE) != (grid.size_q, grid.size_kv):  # type: ignore[attr-defined]
        return _evaluated(replace(FULL, sparse=(block_mask,)), grid, tuple(partial.shape[:2]))
    blocks_q, blocks_kv = grid.shape
    partial, full = partial[..., :blocks_q, :blocks_kv], full[..., :blocks_q, :blocks_kv]
    return Guess(partial | full, full)
