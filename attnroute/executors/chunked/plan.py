"""How chunked attention cuts a call into tiles: plain integers, no tensors.

A chunk is a run of (batch, key head) pairs that one batched matmul handles together. Inside a chunk the
queries are walked in blocks. A block is computed only against the keys that the band and the documents leave
to it, in one tile or, when those keys are too many for the score budget, in several.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 16 * 2**10
"""Most rows in one matrix (block_q times the query heads that share a key head), unless block_q is given."""

KEY_ALIGN = 64
"""Key ranges are widened to multiples of this, so that matmul operands stay aligned under any window."""


class Tiling(NamedTuple):
    """Sizes that suit a device.

    Attributes:
        score_elements: Most scores held at once. The backward pass holds two tensors of them in float32 and
            two in the input's dtype.
        min_block_q: Fewest queries in a block, if the call has as many.
        max_block_q: Most queries in a block.
        worth_a_block: Fewest scores of a call for each block that lets masked keys be skipped: launches take
            the host longer than what fewer would save. Where nothing is masked so, a block is as large as a
            tile may be. 0 for a device that wants small blocks anyway.
    """

    score_elements: int
    min_block_q: int
    max_block_q: int
    worth_a_block: int


# Measured on an H100 (bfloat16, causal, head_dim 320 and 512, 4096 to 16384 tokens): of 256, 512 and 1024
# queries and 64, 128 and 256 MiB of float32 scores, the largest of both were fastest, by 5 to 15 %. On an
# H200 2048 queries were 10 % faster than 1024 where nothing is masked, 5 to 12 % slower under a causal mask.
ACCELERATOR = Tiling(64 * 2**20, min_block_q=256, max_block_q=1024, worth_a_block=8 * 2**20)
# Measured on one core of a server (float32, head_dim 64, 2048 tokens): scores that stay in the cache make it
# two to three times faster.
CPU = Tiling(4 * 2**20, min_block_q=64, max_block_q=256, worth_a_block=0)

FUNCTION_SHARE = 4
"""Tiles hold this fraction of the score budget where functions make tensors of their own, as large as a tile:
indices of 8 bytes, and what a score function needs for its gradient."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a call; `group` is the number of query heads that share one key head."""

    batch: int
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_kv: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Which keys a run of queries can attend, by the band and the documents."""

    band_lo: int | None = None
    band_hi: int | None = None
    bounds: tuple[int, ...] | None = None

    def key_range(self, i0: int, i1: int, seqlen_kv: int) -> tuple[int, int]:
        """Return the smallest range [j0, j1) that holds every key of queries [i0, i1)."""
        j0, j1 = 0, seqlen_kv
        if self.band_lo is not None:
            j0 = max(j0, i0 + self.band_lo)
        if self.band_hi is not None:
            j1 = min(j1, i1 + self.band_hi)
        if self.bounds is not None:
            first, last = self._documents(i0, i1)
            j0, j1 = max(j0, first), min(j1, seqlen_kv if last is None else last)
        return (j0, j1) if j0 < j1 else (0, 0)

    def one_document(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Return whether queries [i0, i1) and keys [j0, j1) are known to lie in one document."""
        if self.bounds is None:
            return False
        doc = bisect_right(self.bounds, i0) - 1
        if doc < 0 or doc + 1 >= len(self.bounds):
            return False
        start, stop = self.bounds[doc], self.bounds[doc + 1]
        return i1 <= stop and start <= j0 and j1 <= stop

    def _documents(self, i0: int, i1: int) -> tuple[int, int | None]:
        bounds = self.bounds or (0,)
        doc = bisect_right(bounds, i0) - 1
        after = bisect_left(bounds, i1)
        return (bounds[doc] if doc >= 0 else 0), (bounds[after] if after < len(bounds) else None)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Batch rows [b0, b1) and key heads [h0, h1)."""

    b0: int
    b1: int
    h0: int
    h1: int

    @property
    def units(self) -> int:
        """Number of (batch, key head) pairs, the batch size of the matmuls."""
        return (self.b1 - self.b0) * (self.h1 - self.h0)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [i0, i1) and the ranges of keys that they can attend, ascending; none when all are masked."""

    i0: int
    i1: int
    keys: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one call, in the order in which both directions visit them.

    Attributes:
        chunks: Outer loop.
        blocks: Inner loop, the same for every chunk.
        block_q: Queries in each block but the last.
        tile_keys: Most keys in one tile.
    """

    chunks: tuple[Chunk, ...]
    blocks: tuple[Block, ...]
    block_q: int
    tile_keys: int


def tiling_for(device_type: str, *, wide_functions: bool = False) -> Tiling:
    """Return the sizes that suit a device, and functions that make tensors as large as a tile."""
    usual = CPU if device_type == "cpu" else ACCELERATOR
    share = FUNCTION_SHARE if wide_functions else 1
    return usual._replace(score_elements=usual.score_elements // share)


def make_plan(
    shape: Geometry, limits: Limits, tiling: Tiling, block_q: int | None = None, *, by_batch_row: bool = False
) -> Plan:
    """Cut a call into chunks and blocks whose tiles hold about `score_elements` scores at most.

    Args:
        shape: Sizes of the call.
        limits: The band and the documents.
        tiling: What suits the device.
        block_q: Queries per block; None chooses.
        by_batch_row: Whether a chunk may hold no more than one batch row.
    """
    size = min(block_q or default_block_q(shape, limits, tiling), max(shape.seqlen_q, 1))
    rows = size * shape.group
    block_k = max(tiling.score_elements // rows // KEY_ALIGN, 1) * KEY_ALIGN
    blocks = tuple(_blocks(shape, limits, size, block_k))
    widest = max((j1 - j0 for block in blocks for j0, j1 in block.keys), default=0)
    units = max(tiling.score_elements // (rows * max(widest, 1)), 1)
    units = min(units, max(shape.heads_kv, 1)) if by_batch_row else units
    return Plan(tuple(_chunks(shape, units)), blocks, size, widest)


def default_block_q(shape: Geometry, limits: Limits, tiling: Tiling) -> int:
    """Return all queries where no limits mask any, else up to a quarter, to skip keys; both within bounds."""
    per_query = shape.group * max(shape.seqlen_kv, 1)
    scores, parts, most = shape.batch * shape.heads_kv * shape.seqlen_q * per_query, 4, tiling.max_block_q
    if tiling.worth_a_block:
        parts = min(max(scores // tiling.worth_a_block, 1), parts)
        if limits == Limits():
            parts, most = 1, max(tiling.score_elements // per_query, tiling.min_block_q)
    if parts > 1 or shape.seqlen_q > most:
        most = min(most, ROWS // shape.group)
    most = max(most // KEY_ALIGN, 1) * KEY_ALIGN
    size = min(max(-(-shape.seqlen_q // parts), tiling.min_block_q), most)
    blocks = max(-(-shape.seqlen_q // size), 1)
    return max(_round_up(-(-shape.seqlen_q // blocks), KEY_ALIGN), KEY_ALIGN)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _blocks(shape: Geometry, limits: Limits, size: int, block_k: int) -> Iterator[Block]:
    """Yield the blocks in order; without queries, one that is empty."""
    for i0 in range(0, max(shape.seqlen_q, 1), size):
        i1 = min(i0 + size, shape.seqlen_q)
        j0, j1 = limits.key_range(i0, i1, shape.seqlen_kv) if i0 < i1 else (0, 0)
        if j0 < j1:
            j0, j1 = j0 // KEY_ALIGN * KEY_ALIGN, min(_round_up(j1, KEY_ALIGN), shape.seqlen_kv)
        yield Block(i0, i1, tuple((j, min(j + block_k, j1)) for j in range(j0, j1, block_k)))


def _chunks(shape: Geometry, units: int) -> Iterator[Chunk]:
    """Yield chunks of at most `units` pairs: whole batch rows where they fit, else some heads of one row."""
    rows = max(units // max(shape.heads_kv, 1), 1)
    heads = -(-shape.heads_kv // -(-shape.heads_kv // units)) if shape.heads_kv else 0
    for b0 in range(0, shape.batch, rows):
        for h0 in range(0, shape.heads_kv, heads):
            yield Chunk(b0, min(b0 + rows, shape.batch), h0, min(h0 + heads, shape.heads_kv))
