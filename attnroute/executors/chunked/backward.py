"""The backward direction of chunked attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.chunked.buffers import Buffers
from attnroute.executors.chunked.call import Call, Saved, copy_block, matmul_into
from attnroute.executors.chunked.steps_eager import NEG_INF, finite_shift
from attnroute.executors.chunked.tile import Tile, cut

if TYPE_CHECKING:
    from attnroute.executors.chunked.plan import Block, Chunk


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

    A forward pass of any other origin will do if it gives the output and the log-sum-exp, which `saved` then
    has as row maxima, with sums of 1.
    """
    delta = call.steps.row_dots(grad_out, saved.out)
    if grad_lse is not None:
        delta.sub_(grad_lse)
    back = _Backward(call, saved.stats, delta, grad_out, wanted)
    for chunk in call.plan.chunks:
        back.run_chunk(chunk)
    return back.grads()


class _Backward:
    """One backward pass: its accumulators and the loop over tiles."""

    def __init__(self, call: Call, stats: Tensor, delta: Tensor, grad_out: Tensor, wanted: NeedsGrad) -> None:
        self._call, self._wanted = call, wanted
        self._stats, self._delta, self._grad_out = stats, delta, grad_out
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
        call, blocks = self._call, self._call.plan.blocks
        key, value = call.keys(call.key, chunk), call.keys(call.value, chunk)
        pass_ = _ChunkPass(
            key=key,
            key_t=key.transpose(1, 2),
            value_t=value.transpose(1, 2),
            grad_key=self._sums(self._key, chunk),
            grad_value=self._sums(self._value, chunk),
        )
        queries, grad_outs = (call.operands(t, chunk) for t in (call.query, self._grad_out))
        stats, delta = (call.by_block(t, chunk) for t in (self._stats, self._delta))
        targets: tuple[Tensor | None, ...] = (None,) * len(blocks)
        places: tuple[Tensor | None, ...] | None = None
        if self._query is not None:
            targets, places = call.by_block(self._query, chunk), call.places(self._query, chunk)
        parts = zip(blocks, queries, grad_outs, zip(stats, delta, strict=True), targets, strict=True)
        for number, (block, query, grad_out, rows, target) in enumerate(parts):
            if not block.keys:
                if target is not None:
                    target.zero_()
                continue
            place = None if places is None or len(block.keys) > 1 else places[number]
            grad_query = place
            if target is not None and place is None:
                # One tile needs no running sum, so its result can be rounded at once.
                dtype = call.operand_dtype if len(block.keys) == 1 else call.score_dtype
                grad_query = self._buffers.rows("grad_query", dtype, target)
            self._run_block(chunk, block, pass_, (query, grad_out), rows, grad_query)
            if target is not None and place is None and grad_query is not None:
                copy_block(target, grad_query.view(target.shape))
        self._store(self._key, pass_.grad_key, chunk)
        self._store(self._value, pass_.grad_value, chunk)

    def _sums(self, full: Tensor | None, chunk: Chunk) -> Tensor | None:
        """Return what the gradients of a chunk's keys or values are summed in, (units, seqlen_kv, dim)."""
        if full is None:
            return None
        call, part = self._call, self._call.part(full, chunk)
        only = call.plan.blocks[0] if len(call.plan.blocks) == 1 else None
        # Nothing is added to what one block gives, so it can be rounded at once, if possible in its place.
        dtype = call.score_dtype if only is None else call.operand_dtype
        sums = None if only is None else call.in_place(part, 1)
        if sums is None:
            sums = part.new_empty(chunk.units, *part.shape[2:], dtype=dtype)
        ends = () if only is None or not only.keys else (only.keys[0][0], only.keys[-1][1])
        return sums if ends == (0, part.shape[2]) else sums.zero_()

    def _store(self, full: Tensor | None, sums: Tensor | None, chunk: Chunk) -> None:
        """Round the sums of a chunk into their place in the whole gradient, unless they are there."""
        if full is not None and sums is not None:
            part = self._call.part(full, chunk)
            if part.data_ptr() != sums.data_ptr():
                copy_block(part, sums.view(part.shape))

    def _run_block(
        self,
        chunk: Chunk,
        block: Block,
        pass_: _ChunkPass,
        operands: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        grad_query: Tensor | None,
    ) -> None:
        """Add to the gradients of keys and values, and set that of the block's queries.

        Args:
            chunk: Of the block.
            block: A block with keys.
            pass_: What the chunk's blocks share.
            operands: The block of the queries, and of the output's gradient.
            rows: The statistics of the rows, and their delta.
            grad_query: (units, rows, head_dim_qk), or None where none is wanted.
        """
        call, (query, grad_out) = self._call, operands
        scale, keep_scale = call.spec.scale, call.spec.keep_scale
        adds = len(call.plan.blocks) > 1
        for number, (j0, j1) in enumerate(block.keys):
            probs, grad_scores = self._run_tile(chunk, block, (j0, j1), pass_, operands, rows)
            if pass_.grad_value is not None:
                target = pass_.grad_value.narrow(1, j0, j1 - j0)
                matmul_into(target, probs.transpose(1, 2), grad_out, alpha=keep_scale, accumulate=adds)
            if pass_.grad_key is not None:
                target = pass_.grad_key.narrow(1, j0, j1 - j0)
                matmul_into(target, grad_scores.transpose(1, 2), query, alpha=scale, accumulate=adds)
            if grad_query is not None:
                key = pass_.key.narrow(1, j0, j1 - j0)
                matmul_into(grad_query, grad_scores, key, alpha=scale, accumulate=number > 0)

    def _run_tile(
        self,
        chunk: Chunk,
        block: Block,
        keys: tuple[int, int],
        pass_: _ChunkPass,
        operands: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the probabilities of one tile and the gradient of its scaled QK^T, as matmul operands."""
        call, buffers, (j0, j1), (query, grad_out) = self._call, self._buffers, keys, operands
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
        call.steps.grad_tile(tile, scores, grad_probs, probs, grad_scores, *rows, keep_bias_grad)
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
        return sink_grad(sink, self._stats, self._delta)

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


def sink_grad(sink: Tensor, stats: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of a sink from the statistics of all rows, and their `delta`."""
    row_max, row_sum = stats.unbind(-1)
    share = torch.exp(sink.to(row_max.dtype)[:, None] - finite_shift(row_max))
    share.div_(row_sum.clamp(min=0.5)).mul_(delta).masked_fill_(row_max == NEG_INF, 0.0)
    return share.sum((0, 2)).neg_().to(sink.dtype)


def as_given(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Return a gradient in the shape and dtype of what it belongs to; None where one is missing."""
    if grad is None or like is None:
        return None
    return grad.reshape(like.shape).to(like.dtype)
