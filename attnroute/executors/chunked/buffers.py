"""Memory that the tiles of chunked attention share: buffers of scores, and of the rows of one block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnroute.executors.chunked.call import Call

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

    def rows(self, name: str, dtype: torch.dtype, block: Tensor) -> Tensor:
        """Return a (units, rows, dim) buffer for a block (batch rows, key heads, group, queries, dim)."""
        batch, heads, group, queries, dim = block.shape
        return self._view(name, dtype, dim, (batch * heads, group * queries, dim), dim)

    def _view(self, name: str, dtype: torch.dtype, widest: int, size: tuple[int, ...], stride: int) -> Tensor:
        place = (name, dtype, size)
        view = self._views.get(place)
        if view is None:
            flat = self._flat.get((name, dtype))
            if flat is None:
                flat = self._flat[name, dtype] = self._call.query.new_empty(self._rows * widest, dtype=dtype)
            view = self._views[place] = flat.as_strided(size, (size[1] * stride, stride, 1))
        return view


def _aligned(keys: int) -> int:
    return -(-keys // LD_ALIGN) * LD_ALIGN
