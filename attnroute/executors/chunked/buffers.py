"""Memory that the tiles of chunked attention share: buffers of scores, and row statistics in block order.

Between directions the statistics are kept as (count, batch, num_heads_q, seqlen_q). A chunk's are brought
into block order at once, so that each block's are one contiguous (units, rows) view: two copies instead of
several small ones per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from attnroute.executors.chunked.call import Call
    from attnroute.executors.chunked.plan import Block, Chunk, Geometry

LD_ALIGN = 16
"""Rows of a score buffer start at multiples of this many elements, whatever the number of keys."""


class Buffers:
    """Memory that all tiles of a call share, so that it neither grows nor fragments."""

    def __init__(self, call: Call) -> None:
        """Note sizes; memory is allocated when a tile first needs it."""
        self._call = call
        self._rows = max((chunk.units for chunk in call.plan.chunks), default=0) * call.block_rows
        self._widest = _aligned(call.plan.tile_keys)
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[object, ...], Tensor] = {}

    def scores(self, name: str, size: tuple[int, int, int]) -> Tensor:
        """Return a (units, rows, keys) buffer in the dtype of the scores, its rows aligned."""
        return self._view(name, self._call.score_dtype, self._widest, size, _aligned(size[2]))

    def operand(self, name: str, scores: Tensor) -> Tensor:
        """Return a buffer for a matmul operand of the shape of `scores`, or `scores` if the dtypes agree."""
        dtype = self._call.operand_dtype
        if dtype == scores.dtype:
            return scores
        return self._view(name, dtype, self._widest, tuple(scores.shape), scores.stride(1))

    def rows(self, name: str, dtype: torch.dtype, units: int, rows: int, dim: int) -> Tensor:
        """Return a (units, rows, dim) buffer."""
        return self._view(name, dtype, dim, (units, rows, dim), dim)

    def _view(self, name: str, dtype: torch.dtype, widest: int, size: tuple[int, ...], stride: int) -> Tensor:
        place = (name, dtype, size)
        view = self._views.get(place)
        if view is None:
            flat = self._flat.get((name, dtype))
            if flat is None:
                flat = self._flat[name, dtype] = self._call.query.new_empty(self._rows * widest, dtype=dtype)
            view = self._views[place] = flat.as_strided(size, (size[1] * stride, stride, 1))
        return view


class ChunkRows:
    """The rows of one chunk: `count` statistics of each, in block order."""

    def __init__(self, shape: Geometry, block_q: int, chunk: Chunk, natural: Tensor) -> None:
        """Copy the statistics of a chunk.

        Args:
            shape: Sizes of the call.
            block_q: Queries per block; the last block may be shorter.
            chunk: The chunk.
            natural: (count, batch, num_heads_q, seqlen_q); the chunk's part is read now and by `store`.
        """
        part = natural.unflatten(2, (shape.heads_kv, shape.group))
        self._natural = part[:, chunk.b0 : chunk.b1, chunk.h0 : chunk.h1]
        self._block_q, self._units, self._group = block_q, chunk.units, shape.group
        self._flat = natural.new_empty(natural.shape[0], self._natural[0].numel())
        for blocks, natural_part in self._pairs():
            blocks.copy_(natural_part)

    def blocks(self, blocks: tuple[Block, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Yield each block's statistics, (units, rows) each; `store` stores what is written to them."""
        rows = [self._group * (block.i1 - block.i0) for block in blocks]
        parts = self._flat.split([self._units * count for count in rows], 1)
        for part, count in zip(parts, rows, strict=True):
            yield part.view(part.shape[0], self._units, count).unbind(0)

    def store(self) -> None:
        """Write the statistics back to where they were read."""
        for blocks, natural_part in self._pairs():
            natural_part.copy_(blocks)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield matching views of block order and natural order: of all whole blocks, then of a short one."""
        count, batch, heads, group, queries = self._natural.shape
        size = self._block_q
        whole = queries // size * size
        split = self._units * self._group * whole
        if whole:
            blocks = self._flat[:, :split].view(count, whole // size, batch, heads, group, size)
            yield blocks, self._natural[..., :whole].unflatten(-1, (whole // size, size)).movedim(-2, 1)
        if whole < queries:
            last = self._flat[:, split:].view(count, batch, heads, group, queries - whole)
            yield last, self._natural[..., whole:]


def _aligned(keys: int) -> int:
    return -(-keys // LD_ALIGN) * LD_ALIGN
