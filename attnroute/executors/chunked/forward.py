"""The forward direction of chunked attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnroute.executors.chunked.buffers import Buffers, ChunkRows
from attnroute.executors.chunked.call import Call, Saved, matmul_into

if TYPE_CHECKING:
    from attnroute.executors.chunked.plan import Block, Chunk

NEG_INF = float("-inf")


def run_forward(call: Call) -> Saved:
    """Compute the output and the row statistics that the backward pass needs."""
    out = call.query.new_empty(*call.query.shape[:3], call.value.shape[3])
    stats = _start(call)
    forward = _Forward(call, out, stats)
    for chunk in call.plan.chunks:
        forward.run_chunk(chunk)
    return Saved(out, *stats.unbind(0))


def _start(call: Call) -> Tensor:
    """Return row maxima and sums before any key: (2, batch, num_heads_q, seqlen_q), those of a sink."""
    stats = call.query.new_zeros(2, *call.query.shape[:3], dtype=call.score_dtype)
    if call.extras.sink is None:
        stats[0].fill_(NEG_INF)
    else:
        stats[0].copy_(call.extras.sink[:, None].expand_as(stats[0]))
        stats[1].copy_(stats[0] > NEG_INF)
    return stats


class _Forward:
    """One forward pass: its buffers and the loop over tiles."""

    def __init__(self, call: Call, out: Tensor, stats: Tensor) -> None:
        self._call, self._out, self._stats = call, out, stats
        self._tiles, self._buffers = call.tiles(), Buffers(call)
        self._function = call.score_function()

    def run_chunk(self, chunk: Chunk) -> None:
        """Fill in output and statistics of one chunk."""
        call = self._call
        rows = ChunkRows(call.shape, call.plan.block_q, chunk, self._stats)
        queries, outs = (call.by_block(call.heads(t, chunk)) for t in (call.query, self._out))
        key, value = call.keys(call.key, chunk).transpose(1, 2), call.keys(call.value, chunk)
        parts = zip(call.plan.blocks, queries, outs, rows.blocks(call.plan.blocks), strict=True)
        for block, query, out, (row_max, row_sum) in parts:
            if block.keys:
                total = self._attend(chunk, block, call.rows(query), key, value, row_max, row_sum)
                torch.div(total.view(out.shape), row_sum.view(*out.shape[:4], 1), out=out)
            else:
                out.zero_()
        rows.store()

    def _attend(
        self,
        chunk: Chunk,
        block: Block,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
    ) -> Tensor:
        """Return the weighted sums of values of one block, not yet divided by the sums of the weights.

        `key` is (units, head_dim_qk, seqlen_kv), `value` (units, seqlen_kv, head_dim_v).
        """
        call, buffers = self._call, self._buffers
        units, rows, _ = query.shape
        total = buffers.rows("total", call.score_dtype, units, rows, value.shape[2])
        for number, (j0, j1) in enumerate(block.keys):
            tile = self._tiles.tile(chunk, block, j0, j1)
            scores = buffers.scores("scores", (units, rows, j1 - j0))
            matmul_into(scores, query, key.narrow(2, j0, j1 - j0), alpha=call.spec.scale)
            if self._function is not None:
                self._function.apply(self._tiles.region(chunk, block, j0, j1), scores)
            probs = buffers.operand("probs", scores)
            rescale = torch.empty_like(row_max) if number else None
            call.steps.softmax_tile(tile, scores, probs, row_max, row_sum, rescale)
            if rescale is not None:
                total.mul_(rescale[..., None])
            matmul_into(
                total, probs, value.narrow(1, j0, j1 - j0), alpha=call.spec.keep_scale, accumulate=number > 0
            )
        return total
