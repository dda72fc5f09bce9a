"""Chunked attention where one tile holds all scores: its weights stay for the backward pass.

Small calls on the CPU take the host longer than the arithmetic. With one tile there is nothing to walk, to
rescale or to make again, at the price of memory that `WHOLE` bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from attnroute.executors.chunked.backward import Grads, NeedsGrad, as_given, sink_grad
from attnroute.executors.chunked.call import Saved, matmul_into
from attnroute.executors.chunked.plan import Limits
from attnroute.executors.chunked.steps_eager import NEG_INF, adjust_scores, finite_shift, row_dots

if TYPE_CHECKING:
    from attnroute.executors.chunked.call import Call
    from attnroute.executors.chunked.tile import Tile

WHOLE: Final = 2**21
"""Most scores that stay, 8 MiB in float32. Measured on one core of a server (float32, head_dim 64, dropout or
a bias that trains): up to 512 tokens of 8 heads faster than blocks, by a quarter to a half in training."""

SKIPPING: Final = 2**19
"""The same where a band or documents let blocks be skipped, which wins later."""

_NO_LIMITS: Final = Limits()


class Weights(NamedTuple):
    """What stays of the scores, (units, rows, keys) each; None where another field has the same values.

    Attributes:
        probs: The probabilities.
        dropped: Those after dropout, not yet scaled for it; None without dropout.
        slope: The derivative of the capped score by the score; None without a softcap.
    """

    probs: Tensor
    dropped: Tensor | None
    slope: Tensor | None


def one_block(query: Tensor, key: Tensor, limits: Limits) -> int | None:
    """Return the queries per block that put a small call into one tile, None for others."""
    batch, heads, seqlen_q, _ = query.shape
    most = WHOLE if limits == _NO_LIMITS else SKIPPING
    small = query.device.type == "cpu" and 0 < batch * heads * seqlen_q * key.shape[2] <= most
    return seqlen_q if small else None


def is_whole(call: Call) -> bool:
    """Return whether one tile of the CPU holds all scores of a call, and no function changes them."""
    plan, shape, spec = call.plan, call.shape, call.spec
    if call.query.device.type != "cpu" or spec.program is not None or spec.score_mod is not None:
        return False
    one = len(plan.chunks) == 1 and len(plan.blocks) == 1 and plan.blocks[0].keys == ((0, shape.seqlen_kv),)
    return one and plan.chunks[0].units * call.block_rows * shape.seqlen_kv <= WHOLE


def forward_whole(call: Call, *, want_slope: bool) -> tuple[Saved, Weights]:
    """Compute what `run_forward` does, and what `backward_whole` needs; `want_slope` for the latter."""
    rows = call.query.shape[:3]
    query, key, value = _operands(call, call.query, call.key, call.value)
    scores = query.new_empty(*query.shape[:2], key.shape[1])
    matmul_into(scores, query, key.transpose(1, 2), alpha=call.spec.scale)
    slope = adjust_scores(_tile(call, scores), scores, want_slope=want_slope)
    row_max = scores.amax(-1)
    probs = torch.softmax(scores, -1)
    # The largest score adds 1 to the sum that it was divided by.
    row_sum = probs.amax(-1).reciprocal_()
    empty = row_max == NEG_INF
    if empty.any():
        probs.masked_fill_(empty[..., None], 0.0)
        row_sum.masked_fill_(empty, 0.0)
    row_max, row_sum = row_max.view(rows), row_sum.view(rows)
    if call.extras.sink is not None:
        row_max, row_sum, share = _with_sink(call.extras.sink, row_max, row_sum)
        probs.mul_(share.view(*probs.shape[:2], 1))
    dropped = _drop(call, probs) if call.spec.dropout_p else None
    total = query.new_empty(*query.shape[:2], value.shape[2])
    matmul_into(total, probs if dropped is None else dropped, value, alpha=call.spec.keep_scale)
    out = total.view(*rows, value.shape[2]).to(call.query.dtype)
    return Saved(out, torch.stack((row_max, row_sum), -1)), Weights(probs, dropped, slope)


def backward_whole(
    call: Call, saved: Saved, weights: Weights, grad_out: Tensor, grad_lse: Tensor | None, wanted: NeedsGrad
) -> Grads:
    """Compute what `run_backward` does, from weights that stayed."""
    (probs, dropped, slope), sink = weights, call.extras.sink
    query, key, value, grad_rows = _operands(call, call.query, call.key, call.value, grad_out)
    delta = row_dots(grad_out, saved.out)
    if grad_lse is not None:
        delta.sub_(grad_lse)
    delta.masked_fill_(saved.stats[..., 0] == NEG_INF, 0.0)
    rows, scale, keep_scale = delta.view(*probs.shape[:2], 1), call.spec.scale, call.spec.keep_scale
    grad_query, grad_key, grad_value = (
        torch.empty_like(t, memory_format=torch.contiguous_format) if wants else None
        for t, wants in zip((query, key, value), wanted[:3], strict=True)
    )
    if grad_value is not None:
        used = probs if dropped is None else dropped
        matmul_into(grad_value, used.transpose(1, 2), grad_rows, alpha=keep_scale)
    grad = torch.empty_like(probs)
    matmul_into(grad, grad_rows, value.transpose(1, 2), alpha=keep_scale)
    if dropped is None:
        grad.sub_(rows).mul_(probs)
    else:
        grad.mul_(dropped).addcmul_(rows, probs, value=-1.0)
    bias, slopes = _bias_grads(call, grad, wanted)
    if slope is not None:
        # Not in place: the gradient of a bias of the same shape is a view.
        grad = grad * slope
    if grad_query is not None:
        matmul_into(grad_query, grad, key, alpha=scale)
    if grad_key is not None:
        matmul_into(grad_key, grad.transpose(1, 2), query, alpha=scale)
    return Grads(
        as_given(grad_query, call.query),
        as_given(grad_key, call.key),
        as_given(grad_value, call.value),
        bias,
        slopes,
        None if sink is None or not wanted.sink else sink_grad(sink, saved.stats, delta),
    )


def _with_sink(sink: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row maxima and sums with one more logit per head, and the share that the keys keep."""
    logit = sink.to(row_max.dtype)[:, None]
    highest = torch.maximum(row_max, logit)
    shift = finite_shift(highest)
    of_keys = row_sum.mul(torch.exp(row_max - shift))
    total = of_keys + torch.exp(logit - shift)
    return highest, total, of_keys / total.clamp(min=0.5)


def _bias_grads(call: Call, grad: Tensor, wanted: NeedsGrad) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a bias and of ALiBi's slopes from that of the scores that they join."""
    bias = slopes = None
    if wanted.bias and call.extras.bias is not None:
        heads_first = grad.view(*call.query.shape[:3], grad.shape[2])
        bias = as_given(heads_first.sum_to_size(call.extras.bias.shape), call.extras.bias)
    if wanted.slopes and call.extras.slopes is not None:
        tile = _tile(call, grad)
        per_head = (grad.view(tile.shape) * tile.distance(grad)).sum((3, 4)).flatten(1)
        slopes = as_given(per_head.sum_to_size(call.extras.slopes.shape), call.extras.slopes)
    return bias, slopes


def _operands(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of four dimensions as matmul operands, (units, rows or keys, dim)."""
    heads = call.shape.heads_kv
    units = call.shape.batch * heads
    wide = (t.to(call.operand_dtype) for t in tensors)
    return tuple(t.reshape(units, t.shape[1] // heads * t.shape[2], t.shape[3]) for t in wide)


def _tile(call: Call, scores: Tensor) -> Tile:
    """Return the tile without dropout, which `_drop` draws as numbers: those multiply faster than bools."""
    return call.tiles().tile(call.plan.chunks[0], call.plan.blocks[0], 0, call.shape.seqlen_kv, dropout=False)


def _drop(call: Call, probs: Tensor) -> Tensor:
    generator = torch.Generator(device=probs.device).manual_seed(call.spec.seed)
    drawn = torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator)
    return drawn.lt_(1.0 - call.spec.dropout_p).mul_(probs)
