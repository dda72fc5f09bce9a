"""The forward direction of chunked attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnroute.executors.chunked.buffers import Buffers
from attnroute.executors.chunked.call import Call, Saved, copy_block, matmul_into
from attnroute.executors.chunked.steps_eager import start_rows

if TYPE_CHECKING:
    from attnroute.executors.chunked.plan import Block, Chunk


def run_forward(call: Call) -> Saved:
    """Compute the output and the row statistics that the backward pass needs."""
    rows = call.query.shape[:3]
    saved = Saved(
        call.query.new_empty(*rows, call.value.shape[3]),
        call.query.new_empty(*rows, 2, dtype=call.score_dtype),
    )
    forward = _Forward(call, saved)
    for chunk in call.plan.chunks:
        forward.run_chunk(chunk)
    return saved


class _Forward:
    """One forward pass: its buffers and the loop over tiles."""

    def __init__(self, call: Call, saved: Saved) -> None:
        self._call, self._saved = call, saved
        self._tiles, self._buffers = call.tiles(), Buffers(call)
        self._function = call.score_function()
        # Half precision has too few exponents for small probabilities of long rows.
        self._divides = call.steps.divides and call.operand_dtype != torch.float16

    def run_chunk(self, chunk: Chunk) -> None:
        """Fill in output and statistics of one chunk."""
        call, blocks = self._call, self._call.plan.blocks
        key, value = call.keys(call.key, chunk).transpose(1, 2), call.keys(call.value, chunk)
        places = call.places(self._saved.out, chunk) or (None,) * len(blocks)
        outs, stats = (call.by_block(t, chunk) for t in self._saved)
        parts = zip(blocks, call.operands(call.query, chunk), outs, places, stats, strict=True)
        for block, query, out, place, rows in parts:
            if not block.keys:
                out.zero_()
                start_rows(rows, self._tiles.sink_of(chunk))
                continue
            divide = self._divides and len(block.keys) == 1
            total = place if divide else None
            if total is None:
                total = self._buffers.rows("total", call.operand_dtype if divide else call.score_dtype, out)
            self._attend(chunk, block, (query, key, value), rows, total, divide=divide)
            if not divide:
                torch.div(total.view(out.shape), rows[..., 1:], out=out)
            elif place is None:
                copy_block(out, total.view(out.shape))

    def _attend(
        self,
        chunk: Chunk,
        block: Block,
        qkv: tuple[Tensor, Tensor, Tensor],
        stats: Tensor,
        total: Tensor,
        *,
        divide: bool,
    ) -> None:
        """Set the weighted sums of values of one block, which are not divided by the sums of the weights yet.

        Args:
            chunk: Of the block.
            block: A block with keys.
            qkv: (units, rows, head_dim_qk), (units, head_dim_qk, seqlen_kv), (units, seqlen_kv, head_dim_v).
            stats: The statistics of the rows.
            total: (units, rows, head_dim_v), the result.
            divide: Whether they are to be divided, which one tile with all keys allows.
        """
        call, buffers, (query, key, value) = self._call, self._buffers, qkv
        for number, (j0, j1) in enumerate(block.keys):
            tile = self._tiles.tile(chunk, block, j0, j1)
            scores = buffers.scores("scores", (query.shape[0], query.shape[1], j1 - j0))
            matmul_into(scores, query, key.narrow(2, j0, j1 - j0), alpha=call.spec.scale)
            if self._function is not None:
                self._function.apply(self._tiles.region(chunk, block, j0, j1), scores)
            probs = buffers.operand("probs", scores)
            rescale = buffers.rows("rescale", call.score_dtype, stats[..., :1]) if number else None
            call.steps.softmax_tile(tile, scores, probs, stats, rescale, divide)
            if rescale is not None:
                total.mul_(rescale)
            matmul_into(
                total, probs, value.narrow(1, j0, j1 - j0), alpha=call.spec.keep_scale, accumulate=number > 0
            )
