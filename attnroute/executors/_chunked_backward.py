"""The backward direction of chunked attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnroute.executors._chunked_call import Buffers, Call, Saved, cut_rows, matmul_into, store_rows
from attnroute.executors._chunked_plan import Block, Chunk
from attnroute.executors._chunked_tile import Tile, cut


class Grads(NamedTuple):
    """Gradients; None where none was asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None


class Wanted(NamedTuple):
    """Which gradients to compute."""

    query: bool
    key: bool
    value: bool
    bias: bool
    slopes: bool
    sink: bool


def run_backward(
    call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
) -> Grads:
    """Compute gradients, with every tile of scores made again.

    A forward pass of any other origin will do if it gives the output and the log-sum-exp: `saved` then
    has `shift` = lse (0 in rows without a key) and `log_sum` = 0 (+inf in those rows).
    """
    back = _Backward(call, saved, grad_out, grad_lse, wanted)
    for chunk in call.plan.chunks:
        back.run_chunk(chunk)
    return back.grads()


class _Backward:
    """One backward pass: its accumulators and the loop over tiles."""

    def __init__(
        self, call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> None:
        self._call, self._saved, self._wanted = call, saved, wanted
        self._grad_out, self._grad_lse = grad_out, grad_lse
        self._tiles, self._buffers = call.tiles(), Buffers(call)
        self._query = torch.empty_like(call.query) if wanted.query else None
        self._key = torch.empty_like(call.key) if wanted.key else None
        self._value = torch.empty_like(call.value) if wanted.value else None
        self._bias = self._zeros_like(self._tiles.bias) if wanted.bias else None
        self._slopes = self._zeros_like(self._tiles.slopes) if wanted.slopes else None
        self._sink = self._zeros_like(call.extras.sink) if wanted.sink else None

    def grads(self) -> Grads:
        """Return the gradients in the shapes and dtypes of the inputs."""
        extras = self._call.extras
        return Grads(
            self._query,
            self._key,
            self._value,
            _as(self._bias, extras.bias),
            _as(self._slopes, extras.slopes),
            _as(self._sink, extras.sink),
        )

    def run_chunk(self, chunk: Chunk) -> None:
        """Add the gradients of one chunk."""
        call = self._call
        key, value = call.keys(call.key, chunk), call.keys(call.value, chunk)
        grad_key = torch.zeros_like(key, dtype=call.score_dtype) if self._wanted.key else None
        grad_value = torch.zeros_like(value, dtype=call.score_dtype) if self._wanted.value else None
        for block in call.plan.blocks:
            self._run_block(chunk, block, key, value, grad_key, grad_value)
        for full, part in ((self._key, grad_key), (self._value, grad_value)):
            if full is not None and part is not None:
                target = full[chunk.b0 : chunk.b1, chunk.h0 : chunk.h1]
                target.copy_(part.view(target.shape))

    def _run_block(
        self,
        chunk: Chunk,
        block: Block,
        key: Tensor,
        value: Tensor,
        grad_key: Tensor | None,
        grad_value: Tensor | None,
    ) -> None:
        call, spec, buffers = self._call, self._call.spec, self._buffers
        query, grad_out = call.rows(call.query, chunk, block), call.rows(self._grad_out, chunk, block)
        shift = cut_rows(call, self._saved.shift, chunk, block)
        log_sum = cut_rows(call, self._saved.log_sum, chunk, block)
        delta = self._delta(chunk, block, grad_out, log_sum)
        self._add_sink(chunk, shift, log_sum, delta)
        grad_query = query.new_zeros(query.shape, dtype=call.score_dtype) if self._wanted.query else None
        keep_bias_grad = self._bias is not None or self._slopes is not None
        for number, (j0, j1) in enumerate(block.keys):
            tile = self._tiles.tile(chunk, block, j0, j1)
            scores = buffers.scores("scores", *query.shape[:2], j1 - j0)
            grad_probs = buffers.scores("grad_probs", *scores.shape)
            matmul_into(scores, query, key[:, j0:j1].transpose(1, 2), alpha=spec.scale)
            matmul_into(grad_probs, grad_out, value[:, j0:j1].transpose(1, 2))
            probs = buffers.operand("probs", scores)
            grad_scores = buffers.operand("grad_scores", grad_probs)
            if keep_bias_grad and tile.softcap and grad_scores is grad_probs:
                grad_scores = buffers.scores("grad_scores", *scores.shape)
            call.steps.grad_tile(
                tile, scores, grad_probs, probs, grad_scores, shift, log_sum, delta, keep_bias_grad
            )
            self._add_bias(tile, chunk, block, j0, j1, grad_probs)
            if grad_value is not None:
                matmul_into(
                    grad_value[:, j0:j1],
                    probs.transpose(1, 2),
                    grad_out,
                    alpha=spec.keep_scale,
                    accumulate=True,
                )
            if grad_key is not None:
                matmul_into(
                    grad_key[:, j0:j1], grad_scores.transpose(1, 2), query, alpha=spec.scale, accumulate=True
                )
            if grad_query is not None:
                matmul_into(grad_query, grad_scores, key[:, j0:j1], alpha=spec.scale, accumulate=number > 0)
        if self._query is not None and grad_query is not None:
            store_rows(call, self._query, chunk, block, grad_query)

    def _delta(self, chunk: Chunk, block: Block, grad_out: Tensor, log_sum: Tensor) -> Tensor:
        call = self._call
        out = call.rows(self._saved.out, chunk, block)
        delta = (grad_out.to(call.score_dtype) * out).sum(-1)
        if self._grad_lse is not None:
            delta.sub_(cut_rows(call, self._grad_lse, chunk, block))
        return delta.masked_fill_(log_sum == float("inf"), 0.0)

    def _add_sink(self, chunk: Chunk, shift: Tensor, log_sum: Tensor, delta: Tensor) -> None:
        sink = self._call.extras.sink
        if self._sink is None or sink is None:
            return
        heads = (self._call.shape.heads_kv, self._call.shape.group)
        size = (chunk.b1 - chunk.b0, chunk.h1 - chunk.h0, self._call.shape.group, -1)
        logit = sink.to(shift.dtype).unflatten(0, heads)[chunk.h0 : chunk.h1, :, None]
        share = (logit - shift.view(size)).sub_(log_sum.view(size)).exp_()
        self._sink.unflatten(0, heads)[chunk.h0 : chunk.h1].sub_((share * delta.view(size)).sum((0, 3)))

    def _add_bias(self, tile: Tile, chunk: Chunk, block: Block, j0: int, j1: int, grad: Tensor) -> None:
        grad5 = grad.view(tile.shape)
        if self._bias is not None:
            target = cut(self._bias, chunk, block, j0, j1)
            target.add_(grad5.sum_to_size(target.shape))
        if self._slopes is not None:
            target = cut(self._slopes, chunk, block, j0, j1)
            target.add_((grad5 * tile.distance(grad)).sum_to_size(target.shape))

    def _zeros_like(self, tensor: Tensor | None) -> Tensor | None:
        return (
            None
            if tensor is None
            else torch.zeros(tensor.shape, dtype=self._call.score_dtype, device=tensor.device)
        )


def _as(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else grad.reshape(like.shape).to(like.dtype)
