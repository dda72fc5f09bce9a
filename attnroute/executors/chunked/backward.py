"""The backward direction of chunked attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.chunked.buffers import Buffers, ChunkRows
from attnroute.executors.chunked.call import Call, Saved, matmul_into
from attnroute.executors.chunked.tile import Tile, cut

if TYPE_CHECKING:
    from attnroute.executors.chunked.plan import Block, Chunk

DOT_ELEMENTS = 2**24
"""Most products that `row_dots` holds at once."""


class Grads(NamedTuple):
    """Gradients; None where none is wanted. `trained` are those of `Call.trained`."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    trained: tuple[Tensor, ...] = ()


class NeedsGrad(NamedTuple):
    """Which gradients to compute, in the manner of `ctx.needs_input_grad`."""

    query: bool
    key: bool
    value: bool
    bias: bool
    slopes: bool
    sink: bool


def run_backward(
    call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, wanted: NeedsGrad
) -> Grads:
    """Compute gradients, with every tile of scores made again.

    A forward pass of any other origin will do if it gives the output and the log-sum-exp: `saved` then
    has `row_max` = lse and `row_sum` = 1.
    """
    empty = saved.row_max == float("-inf")
    delta = row_dots(grad_out, saved.out)
    if grad_lse is not None:
        delta.sub_(grad_lse)
    shift = saved.row_max.masked_fill(empty, 0.0)
    log_sum = saved.row_sum.log().masked_fill_(empty, float("inf"))
    stats = torch.stack((shift, log_sum, delta.masked_fill_(empty, 0.0)))
    back = _Backward(call, stats, grad_out, wanted)
    for chunk in call.plan.chunks:
        back.run_chunk(chunk)
    return back.grads()


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a * b`` over the last dimension, in float32 or float64."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    dots = a.new_empty(a.shape[:3], dtype=wide)
    step = max(DOT_ELEMENTS // max(a.shape[0] * a.shape[1] * a.shape[3], 1), 1)
    for i in range(0, a.shape[2], step):
        part = slice(i, i + step)
        torch.sum(a[:, :, part].to(wide) * b[:, :, part], -1, out=dots[:, :, part])
    return dots


class _Backward:
    """One backward pass: its accumulators and the loop over tiles."""

    def __init__(self, call: Call, stats: Tensor, grad_out: Tensor, wanted: NeedsGrad) -> None:
        self._call, self._stats, self._grad_out, self._wanted = call, stats, grad_out, wanted
        self._tiles, self._buffers = call.tiles(), Buffers(call)
        self._query = torch.empty_like(call.query) if wanted.query else None
        self._key = torch.empty_like(call.key) if wanted.key else None
        self._value = torch.empty_like(call.value) if wanted.value else None
        self._bias = self._zeros_like(self._tiles.bias) if wanted.bias else None
        self._slopes = self._zeros_like(self._tiles.slopes) if wanted.slopes else None
        self._function = call.score_function()

    def grads(self) -> Grads:
        """Return the gradients in the shapes and dtypes of the inputs."""
        extras = self._call.extras
        bias, slopes = as_given(self._bias, extras.bias), as_given(self._slopes, extras.slopes)
        found = () if self._function is None else self._function.grads
        trained = tuple(t.to(like.dtype) for t, like in zip(found, self._call.trained, strict=True))
        return Grads(self._query, self._key, self._value, bias, slopes, self._sink_grad(), trained)

    def run_chunk(self, chunk: Chunk) -> None:
        """Compute the gradients of one chunk."""
        call, wanted = self._call, self._wanted
        rows = ChunkRows(call.shape, call.plan.block_q, chunk, self._stats)
        key, value = call.keys(call.key, chunk), call.keys(call.value, chunk)
        pass_ = _ChunkPass(
            key=key,
            key_t=key.transpose(1, 2),
            value_t=value.transpose(1, 2),
            grad_key=torch.zeros_like(key, dtype=call.score_dtype) if wanted.key else None,
            grad_value=torch.zeros_like(value, dtype=call.score_dtype) if wanted.value else None,
        )
        plan = call.plan
        queries, grad_outs = (call.by_block(call.heads(t, chunk)) for t in (call.query, self._grad_out))
        targets: tuple[Tensor | None, ...] = (None,) * len(plan.blocks)
        if self._query is not None:
            targets = call.by_block(call.heads(self._query, chunk))
        parts = zip(plan.blocks, queries, grad_outs, targets, rows.blocks(plan.blocks), strict=True)
        for block, query, grad_out, target, stats in parts:
            grad_query = self._run_block(chunk, block, pass_, call.rows(query), call.rows(grad_out), stats)
            if target is not None and grad_query is not None:
                target.copy_(grad_query.view(target.shape))
            elif target is not None:
                target.zero_()
        _store(self._key, pass_.grad_key, chunk)
        _store(self._value, pass_.grad_value, chunk)

    def _run_block(
        self,
        chunk: Chunk,
        block: Block,
        pass_: _ChunkPass,
        query: Tensor,
        grad_out: Tensor,
        stats: tuple[Tensor, ...],
    ) -> Tensor | None:
        """Add to the gradients of keys and values, and return that of the block's queries."""
        call = self._call
        grad_query = None
        if self._query is not None and block.keys:
            # One tile needs no running sum, so its result can be rounded at once.
            dtype = call.operand_dtype if len(block.keys) == 1 else call.score_dtype
            grad_query = self._buffers.rows("grad_query", dtype, *query.shape)
        for number, (j0, j1) in enumerate(block.keys):
            probs, grad_scores = self._run_tile(chunk, block, (j0, j1), pass_, query, grad_out, stats)
            scale, keep_scale = call.spec.scale, call.spec.keep_scale
            if pass_.grad_value is not None:
                target = pass_.grad_value.narrow(1, j0, j1 - j0)
                matmul_into(target, probs.transpose(1, 2), grad_out, alpha=keep_scale, accumulate=True)
            if pass_.grad_key is not None:
                target = pass_.grad_key.narrow(1, j0, j1 - j0)
                matmul_into(target, grad_scores.transpose(1, 2), query, alpha=scale, accumulate=True)
            if grad_query is not None:
                key = pass_.key.narrow(1, j0, j1 - j0)
                matmul_into(grad_query, grad_scores, key, alpha=scale, accumulate=number > 0)
        return grad_query

    def _run_tile(
        self,
        chunk: Chunk,
        block: Block,
        keys: tuple[int, int],
        pass_: _ChunkPass,
        query: Tensor,
        grad_out: Tensor,
        stats: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return the probabilities of one tile and the gradient of its scaled QK^T, as matmul operands."""
        call, buffers, (j0, j1) = self._call, self._buffers, keys
        tile = self._tiles.tile(chunk, block, j0, j1)
        size = (query.shape[0], query.shape[1], j1 - j0)
        scores = buffers.scores("scores", size)
        grad_probs = buffers.scores("grad_probs", size)
        matmul_into(scores, query, pass_.key_t.narrow(2, j0, j1 - j0), alpha=call.spec.scale)
        matmul_into(grad_probs, grad_out, pass_.value_t.narrow(2, j0, j1 - j0))
        tape = None
        if self._function is not None:
            tape = self._function.apply_on_tape(self._tiles.region(chunk, block, j0, j1), scores)
        probs = buffers.operand("probs", scores)
        grad_scores = buffers.operand("grad_scores", grad_probs)
        has_bias_grad = self._bias is not None or self._slopes is not None
        keep_bias_grad = has_bias_grad or tape is not None
        if keep_bias_grad and tile.softcap and grad_scores is grad_probs:
            grad_scores = buffers.scores("grad_scores", size)
        call.steps.grad_tile(tile, scores, grad_probs, probs, grad_scores, *stats, keep_bias_grad)
        if has_bias_grad:
            self._add_bias(tile, chunk, block, keys, grad_probs)
        if self._function is not None and tape is not None:
            self._function.pull(tape, grad_probs, grad_scores)
        return probs, grad_scores

    def _add_bias(self, tile: Tile, chunk: Chunk, block: Block, keys: tuple[int, int], grad: Tensor) -> None:
        grad5 = grad.view(tile.shape)
        if self._bias is not None:
            target = cut(self._bias, chunk, block, *keys)
            target.add_(grad5.sum_to_size(target.shape))
        if self._slopes is not None:
            target = cut(self._slopes, chunk, block, *keys)
            target.add_((grad5 * tile.distance(grad)).sum_to_size(target.shape))

    def _sink_grad(self) -> Tensor | None:
        sink = self._call.extras.sink
        if sink is None or not self._wanted.sink:
            return None
        shift, log_sum, delta = self._stats
        share = (sink.to(shift.dtype)[:, None] - shift).sub_(log_sum).exp_()
        return as_given(share.mul_(delta).sum((0, 2)).neg_(), sink)

    def _zeros_like(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.zeros(tensor.shape, dtype=self._call.score_dtype, device=tensor.device)


class _ChunkPass(NamedTuple):
    """Keys and values of one chunk, (units, seqlen_kv, dim) or transposed, and their gradients' sums."""

    key: Tensor
    key_t: Tensor
    value_t: Tensor
    grad_key: Tensor | None
    grad_value: Tensor | None


def _store(full: Tensor | None, part: Tensor | None, chunk: Chunk) -> None:
    """Round a chunk's (units, seqlen_kv, dim) into its place in the whole gradient."""
    if full is not None and part is not None:
        target = full[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1]
        target.copy_(part.view(target.shape))


def as_given(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Return a gradient in the shape and dtype of what it belongs to; None where one is missing."""
    if grad is None or like is None:
        return None
    return grad.reshape(like.shape).to(like.dtype)
