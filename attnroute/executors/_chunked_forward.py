"""The forward direction of chunked attention."""

from __future__ import annotations

import torch
from torch import Tensor

from attnroute.executors._chunked_call import Buffers, Call, Saved, matmul_into, store_rows
from attnroute.executors._chunked_eager import finite_shift
from attnroute.executors._chunked_plan import Block, Chunk
from attnroute.executors._chunked_tile import TileSource


def run_forward(call: Call) -> Saved:
    """Compute the output, row by row exact, and what the backward pass needs."""
    shape = call.shape
    batch, heads_q = call.query.shape[:2]
    out = call.query.new_empty(batch, heads_q, shape.seqlen_q, call.value.shape[3])
    shift = call.query.new_empty(batch, heads_q, shape.seqlen_q, dtype=call.score_dtype)
    saved = Saved(out, shift, torch.empty_like(shift))
    tiles, buffers = call.tiles(), Buffers(call)
    for chunk in call.plan.chunks:
        key, value = call.keys(call.key, chunk), call.keys(call.value, chunk)
        for block in call.plan.blocks:
            _forward_block(call, tiles, buffers, chunk, block, key, value, saved)
    return saved


def _forward_block(
    call: Call,
    tiles: TileSource,
    buffers: Buffers,
    chunk: Chunk,
    block: Block,
    key: Tensor,
    value: Tensor,
    saved: Saved,
) -> None:
    query = call.rows(call.query, chunk, block)
    row_max, row_sum = _start_rows(call, chunk, query)
    total = row_max.new_zeros(*row_max.shape, value.shape[2])
    for number, (j0, j1) in enumerate(block.keys):
        tile = tiles.tile(chunk, block, j0, j1)
        scores = buffers.scores("scores", *query.shape[:2], j1 - j0)
        matmul_into(scores, query, key[:, j0:j1].transpose(1, 2), alpha=call.spec.scale)
        probs = buffers.operand("probs", scores)
        rescale = torch.empty_like(row_max) if number else None
        call.steps.softmax_tile(tile, scores, probs, row_max, row_sum, rescale)
        if rescale is not None:
            total.mul_(rescale[..., None])
        matmul_into(total, probs, value[:, j0:j1], accumulate=number > 0)
    empty = row_sum == 0
    total.mul_((call.spec.keep_scale / row_sum).masked_fill_(empty, 0.0)[..., None])
    store_rows(call, saved.out, chunk, block, total)
    store_rows(call, saved.shift, chunk, block, finite_shift(row_max))
    store_rows(call, saved.log_sum, chunk, block, row_sum.log_().masked_fill_(empty, float("inf")))


def _start_rows(call: Call, chunk: Chunk, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row maxima and sums before any key: those of the sink where there is one."""
    units, rows = query.shape[:2]
    row_max = torch.full((units, rows), float("-inf"), dtype=call.score_dtype, device=query.device)
    row_sum = torch.zeros_like(row_max)
    if call.extras.sink is not None:
        heads = call.extras.sink.unflatten(0, (call.shape.heads_kv, call.shape.group))[chunk.h0 : chunk.h1]
        view = row_max.view(chunk.b1 - chunk.b0, chunk.h1 - chunk.h0, call.shape.group, -1)
        view.copy_(heads[..., None].expand_as(view))
        row_sum.copy_(row_max > float("-inf"))
    return row_max, row_sum
