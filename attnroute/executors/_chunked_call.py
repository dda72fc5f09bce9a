"""What both directions of chunked attention share: the call in tiles, its buffers, its matmul.

Matmuls take operands in the input's dtype and accumulate in float32 where the device can; everywhere else
half precision is widened to float32 first, one chunk at a time. float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnroute.executors import _chunked_eager
from attnroute.executors._chunked_plan import Block, Chunk, Geometry, Plan, make_plan
from attnroute.executors._chunked_tile import Extras, Spec, TileSource

LD_ALIGN = 16
"""Rows of a score buffer start at multiples of this many elements, whatever the number of keys."""


class Steps(NamedTuple):
    """The elementwise steps; see `_chunked_eager` for what each must do."""

    softmax_tile: Callable[..., None]
    grad_tile: Callable[..., None]


EAGER_STEPS = Steps(_chunked_eager.softmax_tile, _chunked_eager.grad_tile)


@lru_cache(maxsize=1)
def fused_steps() -> Steps | None:
    """Return the steps as Triton kernels, or None where triton cannot be imported."""
    try:
        from attnroute.executors import _chunked_triton
    except ImportError:
        return None
    return Steps(_chunked_triton.softmax_tile, _chunked_triton.grad_tile)


def steps_for(query: Tensor) -> Steps:
    """Return the steps for the device and dtype of `query`."""
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return EAGER_STEPS
    return fused_steps() or EAGER_STEPS


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass, and the log-sum-exp for the caller.

    Attributes:
        out: (batch, num_heads_q, seqlen_q, head_dim_v) in the query's dtype.
        shift: (batch, num_heads_q, seqlen_q), the row maximum, 0 in rows without a key.
        log_sum: Same shape, the logarithm of the sum of exp(score - shift), +inf in rows without a key.
            Apart from `shift` it keeps its precision when scores are as large as the dtype allows.
    """

    out: Tensor
    shift: Tensor
    log_sum: Tensor

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row in float32, -inf in rows without a key."""
        total = self.shift + self.log_sum
        return total.masked_fill_(self.log_sum == float("inf"), float("-inf")).float()


@dataclass(frozen=True, slots=True)
class Call:
    """One call: tensors, sizes, tiles and dtypes. Built alike for both directions."""

    query: Tensor
    key: Tensor
    value: Tensor
    extras: Extras
    spec: Spec
    shape: Geometry
    plan: Plan
    steps: Steps
    score_dtype: torch.dtype
    operand_dtype: torch.dtype

    @classmethod
    def build(cls, query: Tensor, key: Tensor, value: Tensor, extras: Extras, spec: Spec) -> Call:
        """Lay a call out in tiles."""
        heads_kv = key.shape[1]
        group = query.shape[1] // heads_kv
        shape = Geometry(query.shape[0], heads_kv, group, query.shape[2], key.shape[2])
        return cls(
            query=query,
            key=key,
            value=value,
            extras=extras,
            spec=spec,
            shape=shape,
            plan=make_plan(shape, spec.limits, spec.block_q),
            steps=steps_for(query),
            score_dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
            operand_dtype=_operand_dtype(query),
        )

    def by_group(self, tensor: Tensor) -> Tensor:
        """View (batch, num_heads_q, ...) as (batch, num_heads_kv, group, ...)."""
        return tensor.unflatten(1, (self.shape.heads_kv, self.shape.group))

    def tiles(self) -> TileSource:
        """Return a fresh source of tiles."""
        return TileSource(
            self.shape, self.spec, self.extras, self.query.new_empty((), dtype=self.score_dtype)
        )

    def rows(self, tensor: Tensor, chunk: Chunk, block: Block) -> Tensor:
        """Return a block of a (batch, num_heads_q, seqlen_q, dim) tensor as (units, group * queries, dim)."""
        part = self.by_group(tensor)[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1, :, block.i0 : block.i1]
        rows = self.shape.group * (block.i1 - block.i0)
        return _unit_stride(part.to(self.operand_dtype).reshape(chunk.units, rows, tensor.shape[3]))

    def keys(self, tensor: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk of a (batch, num_heads_kv, seqlen_kv, dim) tensor as (units, seqlen_kv, dim)."""
        part = tensor[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1]
        return _unit_stride(part.to(self.operand_dtype).reshape(chunk.units, *tensor.shape[2:]))


class Buffers:
    """Score buffers that all tiles of a call share, so that memory neither grows nor fragments."""

    def __init__(self, call: Call) -> None:
        """Note dtypes and device; memory is taken when a tile first asks for it."""
        self._call = call
        self._flat: dict[str, Tensor] = {}

    def scores(self, name: str, units: int, rows: int, keys: int) -> Tensor:
        """Return a (units, rows, keys) buffer in the dtype of the scores."""
        return self._view(name, self._call.score_dtype, units, rows, keys)

    def operand(self, name: str, scores: Tensor) -> Tensor:
        """Return a buffer for a matmul operand of the shape of `scores`, or `scores` if the dtypes agree."""
        dtype = self._call.operand_dtype
        return scores if dtype == scores.dtype else self._view(name, dtype, *scores.shape)

    def _view(self, name: str, dtype: torch.dtype, units: int, rows: int, keys: int) -> Tensor:
        flat = self._flat.get(name)
        if flat is None:
            flat = self._flat[name] = self._call.query.new_empty(self._largest(), dtype=dtype)
        row = _aligned(keys)
        return flat[: units * rows * row].view(units, rows, row)[..., :keys]

    def _largest(self) -> int:
        plan, group = self._call.plan, self._call.shape.group
        units = max(chunk.units for chunk in plan.chunks)
        queries = max(block.i1 - block.i0 for block in plan.blocks)
        return units * queries * group * _aligned(plan.tile_keys)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, accumulate: bool = False) -> None:
    """Set `out` to ``alpha * a @ b``, or add that to it, accumulating in the dtype of `out`."""
    beta = 1 if accumulate else 0
    if out.dtype == a.dtype:
        torch.baddbmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.baddbmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def _operand_dtype(query: Tensor) -> torch.dtype:
    if query.dtype in (torch.float32, torch.float64):
        return query.dtype
    wide_output = hasattr(torch.ops.aten.baddbmm, "dtype_out") and torch.version.hip is None
    return query.dtype if query.device.type == "cuda" and wide_output else torch.float32


def cut_rows(call: Call, tensor: Tensor, chunk: Chunk, block: Block) -> Tensor:
    """Return a block of a (batch, num_heads_q, seqlen_q) tensor as (units, rows), contiguous."""
    part = call.by_group(tensor)[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1, :, block.i0 : block.i1]
    return part.to(call.score_dtype).reshape(chunk.units, -1).contiguous()


def store_rows(call: Call, full: Tensor, chunk: Chunk, block: Block, part: Tensor) -> None:
    """Copy (units, rows, ...) into its place in a (batch, num_heads_q, seqlen_q, ...) tensor."""
    target = call.by_group(full)[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1, :, block.i0 : block.i1]
    target.copy_(part.view(target.shape))


def _aligned(keys: int) -> int:
    return -(-keys // LD_ALIGN) * LD_ALIGN


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
