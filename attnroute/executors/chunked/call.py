"""What both directions of chunked attention share: the call in tiles, its buffers, its matmul.

Matmuls take operands in the input's dtype and accumulate in float32 where the device can; everywhere else
half precision is widened to float32 first, one chunk at a time. float64 stays float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.chunked import steps_eager
from attnroute.executors.chunked.functions import ScoreFunction, is_wide
from attnroute.executors.chunked.plan import Chunk, Geometry, Limits, Plan, Tiling, make_plan, tiling_for
from attnroute.executors.chunked.tile import Extras, Spec, TileSource
from attnroute.executors.fused import compiles_for
from attnroute.memory import INSTALLED, cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LARGE_COPY: Final = 2**20
"""Fewest elements whose copy takes a GPU longer than the host takes to find a faster way."""

LARGE_ROW: Final = 2**26
"""Fewest bytes of keys or values of one batch row whose copy takes a GPU about as long as a tile of its own
takes the host to launch."""


class Steps(NamedTuple):
    """The elementwise steps; see `steps_eager` for what each must do.

    `divides`: whether dividing probabilities costs no pass of its own, so that it is better than dividing
    the output, which then needs no float32 form.
    """

    softmax_tile: Callable[..., None]
    grad_tile: Callable[..., None]
    row_dots: Callable[[Tensor, Tensor], Tensor]
    divides: bool


EAGER_STEPS = Steps(steps_eager.softmax_tile, steps_eager.grad_tile, steps_eager.row_dots, divides=False)


@cached(1, INSTALLED)
def fused_steps() -> Steps | None:
    """Return the steps as Triton kernels, or None where triton cannot be imported, for whatever reason."""
    try:
        from attnroute.executors.chunked import steps_triton
    except (Exception, SystemExit):  # noqa: BLE001 - a broken triton raises anything
        return None
    return Steps(steps_triton.softmax_tile, steps_triton.grad_tile, steps_triton.row_dots, divides=True)


def steps_for(query: Tensor) -> Steps:
    """Return the steps for the device and dtype of `query`."""
    if query.dtype == torch.float64 or not compiles_for(query.device):
        return EAGER_STEPS
    return fused_steps() or EAGER_STEPS


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass.

    A sum apart from its maximum keeps its precision when scores are as large as the dtype allows, where
    their log-sum-exp would not.

    Attributes:
        out: (batch, num_heads_q, seqlen_q, head_dim_v) in the query's dtype.
        stats: (batch, num_heads_q, seqlen_q, 2), contiguous: the largest score, -inf in rows without a key,
            and the sum of exp(score - that), of no meaning in rows without a key.
    """

    out: Tensor
    stats: Tensor

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row in float32, -inf in rows without a key."""
        row_max, row_sum = self.stats.unbind(-1)
        return row_sum.log().add_(row_max).float()


@dataclass(frozen=True, slots=True)
class Call:
    """One call: tensors, sizes, tiles and dtypes. Built alike for both directions.

    `trained` are the tensors that the score function reads and that want a gradient.
    """

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
    trained: tuple[Tensor, ...]

    @classmethod
    def build(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extras: Extras,
        spec: Spec,
        trained: tuple[Tensor, ...] = (),
    ) -> Call:
        """Lay a call out in tiles."""
        heads_kv = key.shape[1]
        group = query.shape[1] // heads_kv
        shape = Geometry(query.shape[0], heads_kv, group, query.shape[2], key.shape[2])
        wide = spec.score_mod is not None or (spec.program is not None and is_wide(spec.program))
        tiling = tiling_for(query.device.type, wide_functions=wide)
        by_row = any(_costs_a_copy(t) for t in (key, value))
        return cls(
            query=query,
            key=key,
            value=value,
            extras=extras,
            spec=spec,
            shape=shape,
            plan=planned(shape, spec.limits, tiling, spec.block_q, by_row),
            steps=steps_for(query),
            score_dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
            operand_dtype=_operand_dtype(query),
            trained=trained,
        )

    @property
    def block_rows(self) -> int:
        """Rows of a whole block: its queries times the query heads that share a key head."""
        return self.plan.block_q * self.shape.group

    def tiles(self) -> TileSource:
        """Return a fresh source of tiles."""
        return TileSource(self.shape, self.spec, self.extras, self.score_dtype, self.query.device)

    def score_function(self) -> ScoreFunction | None:
        """Return the score function for the tiles of one pass, or None where there is none."""
        if self.spec.score_mod is None:
            return None
        return ScoreFunction(self.spec.score_mod, self.spec.softcap, self.trained, self.score_dtype)

    @property
    def joined(self) -> bool:
        """Whether a block's rows follow each other where each head's queries do, and the heads."""
        return self.shape.group == 1 or len(self.plan.blocks) == 1

    def part(self, tensor: Tensor, chunk: Chunk) -> Tensor:
        """View a chunk of (batch, heads, ...), of query or key heads."""
        if len(self.plan.chunks) == 1:
            return tensor
        heads = tensor.shape[1] // self.shape.heads_kv
        return tensor[chunk.b0 : chunk.b1, chunk.h0 * heads : chunk.h1 * heads]

    def by_block(self, tensor: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """View a chunk of (batch, num_heads_q, seqlen_q, ...) as blocks (batch, key heads, group, ...)."""
        part = self.part(tensor, chunk)
        group = self.shape.group
        grouped = part.view(part.shape[0], part.shape[1] // group, group, *part.shape[2:])
        blocks: tuple[Tensor, ...] = grouped.split(self.plan.block_q, 3)
        return blocks

    def operands(self, tensor: Tensor, chunk: Chunk) -> Iterable[Tensor]:
        """Return the blocks of a chunk as matmul operands, (units, group * queries, dim)."""
        group, units, (seqlen_q, dim) = self.shape.group, chunk.units, tensor.shape[2:]
        if self.joined:
            rows = self._operand(self.part(tensor, chunk), (units, group * seqlen_q, dim))
            blocks: tuple[Tensor, ...] = rows.split(self.block_rows, 1)
            return blocks
        parts = self.by_block(tensor, chunk)
        return (self._operand(part, (units, group * part.shape[3], dim)) for part in parts)

    def places(self, tensor: Tensor, chunk: Chunk) -> tuple[Tensor, ...] | None:
        """View the blocks of a chunk as what a matmul may write to, where the memory allows it."""
        rows = self.in_place(self.part(tensor, chunk), self.shape.group) if self.joined else None
        if rows is None:
            return None
        blocks: tuple[Tensor, ...] = rows.split(self.block_rows, 1)
        return blocks

    def in_place(self, part: Tensor, group: int) -> Tensor | None:
        """View (batch, heads, length, dim) as (units, group * length, dim) if a matmul may write there."""
        batch, heads, length, dim = part.shape
        units_apart = batch > 1 and part.stride(0) != heads * part.stride(1)
        rows_apart = group > 1 and part.stride(1) != length * part.stride(2)
        if units_apart or rows_apart or part.stride(3) != 1 or part.dtype != self.operand_dtype:
            return None
        return part.view(batch * (heads // group), group * length, dim)

    def keys(self, tensor: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk of a (batch, num_heads_kv, seqlen_kv, dim) tensor as (units, seqlen_kv, dim)."""
        return self._operand(self.part(tensor, chunk), (chunk.units, *tensor.shape[2:]))

    def _operand(self, part: Tensor, size: tuple[int, ...]) -> Tensor:
        wide = part.to(self.operand_dtype)
        words = None if wide.is_contiguous() else _in_words(wide)
        if words is not None:
            return words.reshape(*size[:-1], words.shape[-1]).view(wide.dtype)
        rows = wide.reshape(size)
        return rows if rows.stride(-1) == 1 else rows.contiguous()


@cached(64)
def planned(shape: Geometry, limits: Limits, tiling: Tiling, block_q: int | None, by_batch_row: bool) -> Plan:
    """Return the tiles of a call, which those of one size share."""
    return make_plan(shape, limits, tiling, block_q, by_batch_row=by_batch_row)


def copy_block(target: Tensor, source: Tensor) -> None:
    """Copy what may lie otherwise in memory, or have another dtype."""
    if target.dtype == source.dtype:
        to, of = _in_words(target), _in_words(source)
        if to is not None and of is not None:
            target, source = to, of
    target.copy_(source)


def _in_words(tensor: Tensor) -> Tensor | None:
    """View a large tensor as int64, which is copied faster: torch copies strided memory by elements."""
    if tensor.numel() < LARGE_COPY:
        return None
    each, strides = 8 // tensor.element_size(), tensor.stride()
    whole = tensor.shape[-1] % each == 0 and all(step % each == 0 for step in strides[:-1])
    return tensor.view(torch.int64) if whole and strides[-1] == 1 and tensor.data_ptr() % 8 == 0 else None


def _costs_a_copy(tensor: Tensor) -> bool:
    """Return whether one matmul for all batch rows would need a copy of keys or values, and a long one.

    No single stride leads from a head to the next where tokens lie outermost in memory.
    """
    batch, heads, length, dim = tensor.shape
    apart = min(batch, heads) > 1 and tensor.stride(0) != heads * tensor.stride(1)
    return apart and heads * length * dim * tensor.element_size() >= LARGE_ROW


def matmuls_of(query: Tensor) -> AbstractContextManager[None]:
    """Surround the matmuls of a call: autocast narrows none, and kernels launch on the device of `query`."""
    device = query.device
    narrows = torch.is_autocast_enabled(device.type)
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return _surrounded(device, narrows, elsewhere) if narrows or elsewhere else nullcontext()


@contextmanager
def _surrounded(device: torch.device, narrows: bool, elsewhere: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if narrows:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if elsewhere:
            stack.enter_context(torch.cuda.device(device))
        yield


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
