"""Attention sinks on kernels that have none: exact, through the log-sum-exp.

A sink is one more logit s in the softmax's denominator. Where L is the log-sum-exp of a row's scores, the
softmax with a sink divides by exp(L') with L' = logaddexp(L, s): the kernel's weights, and with them its
output, shrink by the share exp(L - L') that the keys keep. Dropout comes after the softmax and changes none
of this.

The log-sum-exp of torch's fused operators carries no gradient, so the backward is written out. A kernel's
backward makes its weights again as P = exp(scores - L), and the gradient of the scores is P * (dP - D) with
D = sum(grad_out * out). Given L' and the smaller output, P and D are those of the softmax with a sink, and so
are the gradients of query, key, value and bias. The gradient of s is the sum of -exp(s - L') * D, in which
exp(s - L') is the share of the sink.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from attnroute.executors.batched_gradients import differentiable_once, in_turn
from attnroute.executors.fused import ALIGNED, Prebound, compiles_for
from attnroute.executors.prepare.kernels import GRADIENT, SHRINK, pieces
from attnroute.executors.protocol import (
    Bound,
    BoundForward,
    Executor,
    FitTo,
    ForwardResult,
    Inputs,
    Output,
    Pair,
    Plan,
)
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.masks.tracing import guard_bool
from attnroute.memory import cached

_CONSTANTS: Final = 3
"""Arguments of `_WithSink` before its tensors."""
_LARGE: Final = 80
"""From such a logit on the sigmoid is 1 in float64, and its exponential is still finite in float32."""
_NO_GRADS: Final = (None,) * 4
"""Of query, key, value and attn."""


class Fixed(NamedTuple):
    """What a kernel takes beside tensors: the part of a call that has no gradient."""

    mask: LoweredMask
    scale: float | None
    softcap: float
    dropout_p: float

    @classmethod
    def of(cls, inputs: Inputs) -> Fixed:
        """Return that part of a call."""
        return cls(inputs.mask, inputs.scale, inputs.softcap, inputs.dropout_p)

    def inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn: Tensor | None = None,
        sink: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Inputs:
        """Return the call with its tensors, as autograd saved them."""
        return Inputs(
            query,
            key,
            value,
            self.mask,
            attn=attn,
            scale=self.scale,
            softcap=self.softcap,
            sink=sink,
            alibi_slopes=slopes,
            dropout_p=self.dropout_p,
        )


def run_with_sink(executor: Executor, inputs: Inputs, plan: Plan) -> Output:
    """Run a kernel that knows no sink as if it knew `inputs.sink`.

    Returns:
        Output and log-sum-exp, both with the sink. Only the output carries a gradient.
    """
    sink = cast("Tensor", inputs.sink)
    if plan.training:
        fixed = Fixed.of(inputs)
        if inputs.attn is not None:
            fixed = fixed._replace(mask=FULL)
        tensors = (inputs.query, inputs.key, inputs.value, inputs.attn, sink, inputs.alibi_slopes)
        out, lse = _WithSink.apply(executor.pair, plan, fixed, *tensors)  # type: ignore[no-untyped-call]
        return out, lse
    out, lse = executor.run(inputs, _with_lse(plan))
    lse = cast("Tensor", lse)
    out = shrunk(out, lse, sink, may_be_empty=may_be_empty(inputs))
    return out, total(lse, sink) if plan.return_lse else None


def bind_with_sink(executor: Executor, inputs: Inputs, plan: Plan) -> Bound | None:
    """Return what does the same for calls that differ from this one in values alone."""
    pair = executor.pair
    if pair is None or pair.bind is None or (plan.training and not pair.rereads):
        return None
    forward = pair.bind(inputs, _with_lse(plan))
    if forward is None:
        return None
    fused = Prebound(SHRINK[plan.training]) if compiles_for(inputs.query.device) else None
    is_careful = may_be_empty(inputs)
    if not plan.training:
        return _inferred(forward, fused, is_careful=is_careful)
    fit = None if plan.device_type == "cpu" else pair.fit
    return _trained(forward, fused, fit, is_careful=is_careful)


def _inferred(forward: BoundForward, fused: Prebound | None, *, is_careful: bool) -> Bound:
    def run(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, sink: Tensor) -> Tensor | None:
        made = forward(query, key, value, attn)
        if made is None:
            return None
        out, lse = made
        if fused is None or not fused(out, lse, sink):
            share = _column(lse, out).sub_(sink.view(-1, 1, 1)).sigmoid_()
            out.mul_(share.nan_to_num_(0.0) if is_careful else share)
        return out

    return run


def _trained(forward: BoundForward, fused: Prebound | None, fit: FitTo | None, *, is_careful: bool) -> Bound:
    """Let autograd's own backward of the kernel find what is right with the sink.

    It reads output and log-sum-exp where they lie. Both are changed there, through tensors that count no
    change: autograd would take it for a mistake.
    """
    gradient = None if fused is None else _FusedGradient()

    def run(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, sink: Tensor) -> Tensor | None:
        learns = sink.requires_grad
        made = forward(query, key, value, attn, watched=not learns)
        if made is None:
            return None
        out, kept = made
        backward = gradient
        if fused is None or not fused(out, kept, sink):
            backward, kept = None, _with_sink(out.data, _column(kept.data, out), sink, is_careful=is_careful)
        if not learns:
            return out
        return cast("Tensor", _OfSink.apply(out, kept, sink, backward, fit))  # type: ignore[no-untyped-call]

    return run


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor, *, is_careful: bool) -> Tensor:
    """Bring a sink into output and log-sum-exp; return by how much this exceeded the sink."""
    logit = sink.detach().view(-1, 1, 1)
    surplus = _surplus(lse, logit, may_be_empty=is_careful)
    out.mul_(surplus.sigmoid())
    torch.logaddexp(lse, logit, out=lse)
    if is_careful:
        # As in the backward below.
        lse.nan_to_num_(posinf=math.inf, neginf=math.inf)
    return surplus


class _FusedGradient:
    """The gradient of the sinks of calls that differ in values alone, in one kernel."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: tuple[tuple[int, ...], Prebound, int] | None = None

    def __call__(self, grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        """Return it; output and log-sum-exp have the sink in them."""
        if grad.data_ptr() % ALIGNED:
            return sink_gradient(grad, out, _column(lse, out).squeeze(-1), sink)
        latest, strides = self._latest, grad.stride()
        if latest is None or latest[0] != strides:
            # Gradients lie as what came after the call left them, mostly always alike.
            self._latest = latest = (strides, Prebound(GRADIENT), pieces(out))
        _, launch, number = latest
        if number == 1:
            into = torch.empty_like(sink)
        else:
            into = torch.empty((number, sink.shape[0]), dtype=torch.float32, device=out.device)
        if not launch(grad, out, lse, sink, into):
            return sink_gradient(grad, out, _column(lse, out).squeeze(-1), sink)
        return into if number == 1 else into.sum(0).to(sink.dtype)


class _OfSink(torch.autograd.Function):
    """An output as it is, with the gradient of the sink in it; what the kernel's backward gets fits it."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, kept: Tensor, sink: Tensor, fused: _FusedGradient | None, fit: FitTo | None
    ) -> Tensor:
        """Keep the log-sum-exp with the sink in it, or for operators by how much it exceeds the sink."""
        ctx.save_for_backward(out, kept, None if fused is None else sink)
        ctx.fused, ctx.fit, ctx.dtype = fused, fit, sink.dtype
        return out.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, kept, sink = ctx.saved_tensors
        fused, fit = ctx.fused, ctx.fit

        def of_sample(grad: Tensor) -> tuple[Tensor | None, ...]:
            if fused is not None:
                return (fused(grad, out, kept, sink),)
            return (_gradient(grad, out, kept, ctx.dtype),)

        (grad_sink,) = in_turn(of_sample, grad_out)
        if fit is not None and ctx.needs_input_grad[0]:
            grad_out = fit(grad_out, out)
        return grad_out, None, grad_sink, None, None


def _column(lse: Tensor, out: Tensor) -> Tensor:
    """Return a log-sum-exp with the rows of an output alone, and a last dimension of size 1."""
    seqlen = out.shape[2]
    # EFFICIENT pads rows, and cuDNN gives the last dimension itself.
    if lse.shape[2] != seqlen:
        lse = lse[:, :, :seqlen]
    return lse if lse.dim() == out.dim() else lse.unsqueeze(-1)


def _surplus(lse: Tensor, sink: Tensor, *, may_be_empty: bool) -> Tensor:
    """Return by how much the log-sum-exp exceeds the sink; both broadcast.

    The sigmoid of that is the share that the keys keep. In a row with no key the sink has everything; if it
    is -inf as well, the difference is NaN.
    """
    surplus = lse - sink
    return surplus.nan_to_num_(-math.inf, math.inf, -math.inf) if may_be_empty else surplus


def _gradient(grad_out: Tensor, out: Tensor, surplus: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum in the wide dtype; the only large temporary is one widened output.

    The derivative of softplus is the sigmoid, so that one operator gives the output times the sink's share.
    """
    of_sink: Tensor = torch.ops.aten.softplus_backward.default(out, surplus, -1, _LARGE)
    return of_sink.mul_(grad_out).sum((0, 2, 3)).neg_().to(dtype)


def shrunk(out: Tensor, lse: Tensor, sink: Tensor, *, may_be_empty: bool) -> Tensor:
    """Return `out`, whose memory is new, times the share that the keys keep.

    Args:
        out: (batch, num_heads_q, seqlen_q, head_dim_v).
        lse: (batch, num_heads_q, seqlen_q), without the sink.
        sink: (num_heads_q,).
        may_be_empty: A query may have no key.
    """
    surplus = _surplus(lse, sink.unsqueeze(1), may_be_empty=may_be_empty)
    return out.mul_(surplus.sigmoid_().unsqueeze(-1))


def may_be_empty(inputs: Inputs) -> bool:
    """Return whether a query may have no key: not without a mask, nor where a band has one for each."""
    mask, seqlen_q, seqlen_kv = inputs.mask, inputs.query.shape[2], inputs.key.shape[2]
    low, high = mask.band_lo, mask.band_hi
    if inputs.attn is not None or not mask.is_band_only:
        return True
    if high is not None and high < (0 if low is None else max(low, 0)):
        # The first query has no key, or none has one.
        return True
    return not guard_bool(
        seqlen_kv > 0 if low is None else (seqlen_kv > 0) & (seqlen_kv > seqlen_q - 1 + low)
    )


def total(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the log-sum-exp (batch, heads, seqlen_q) with the sink (heads) among the scores."""
    return torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))


@cached(64)
def _with_lse(plan: Plan) -> Plan:
    return replace(plan, return_lse=True)


class _WithSink(torch.autograd.Function):
    """A kernel's forward and backward around one sink per head."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Pair, plan: Plan, fixed: Fixed, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, attn, sink, slopes = cast("tuple[Tensor, ...]", tensors)
        inputs = fixed.inputs(query, key, value, attn=attn, slopes=slopes)
        result = kernel.forward(inputs, plan)
        surplus = _surplus(result.lse, sink.unsqueeze(1), may_be_empty=may_be_empty(inputs)).unsqueeze(-1)
        out, lse = result.out.mul_(surplus.sigmoid()), total(result.lse, sink)
        ctx.kernel, ctx.plan, ctx.fixed = kernel, plan, fixed
        # Tensors are saved as autograd wants it, so that checkpoints and offloading see them.
        ctx.rest = tuple(None if isinstance(part, Tensor) else part for part in result.rest)
        saved = (part if isinstance(part, Tensor) else None for part in result.rest)
        ctx.save_for_backward(*tensors, surplus, out, lse, *saved)
        ctx.mark_non_differentiable(lse)
        # Zeros would be made for the log-sum-exp, whose gradient nobody takes.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        # A checkpoint recomputes what is saved when it is first read, and allows no second reading.
        query, key, value, attn, sink, slopes, surplus, out, lse, *saved = ctx.saved_tensors
        *wanted, sink_wanted, _slopes_wanted = ctx.needs_input_grad[_CONSTANTS:]
        rest = tuple(c if t is None else t for c, t in zip(ctx.rest, saved, strict=True))
        inputs = ctx.fixed.inputs(query, key, value, attn=attn, slopes=slopes)
        if may_be_empty(inputs):
            # What has no key weighs nothing: exp(-inf - inf) is 0 where exp(-inf + inf) is NaN.
            lse = lse.masked_fill(lse == -math.inf, math.inf)

        def of_sample(grad: Tensor) -> tuple[Tensor | None, ...]:
            grads: tuple[Tensor | None, ...] = _NO_GRADS
            if any(wanted):
                grads = ctx.kernel.backward(
                    inputs, ctx.plan, ForwardResult(out, lse, rest), grad, tuple(wanted)
                )
            return *grads, _gradient(grad, out, surplus, sink.dtype) if sink_wanted else None

        return *(None,) * _CONSTANTS, *in_turn(of_sample, grad_out), None


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of a sink that output and log-sum-exp have in them, of kernels that know sinks."""
    share = (sink.unsqueeze(1) - lse).exp_()
    return (out * share.unsqueeze(-1)).mul_(grad_out).sum((0, 2, 3)).neg_().to(sink.dtype)
