"""Forward and backward from different kernels: the forward's own, and chunked's from the log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnroute.executors.batched_gradients import in_turn
from attnroute.executors.prepare import from_lse
from attnroute.executors.prepare.sink import shrunk, total
from attnroute.executors.protocol import Executor, Inputs, Output, Pair, Plan

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import LoweredMask

_SETTINGS: Final = 6


def run_pair(executor: Executor, inputs: Inputs, plan: Plan) -> Output:
    """Run a kernel's forward, and chunked's backward where gradients are asked for.

    Returns:
        Output and log-sum-exp; only the output carries a gradient.
    """
    tensors = (inputs.query, inputs.key, inputs.value, inputs.sink, inputs.alibi_slopes)
    settings = (plan, inputs.mask, inputs.attn, inputs.scale, inputs.softcap)
    out, lse = _Pair.apply(executor.pair, *settings, *tensors)  # type: ignore[no-untyped-call]
    return out, lse if plan.return_lse else None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Pair,
        plan: Plan,
        mask: LoweredMask,
        attn: Tensor | None,
        scale: float | None,
        softcap: float,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = _inputs(mask, scale, softcap, tensors)
        # What the mask became for the kernel; the backward reads the mask itself.
        inputs.attn = attn
        sink = inputs.sink
        # The kernel's own backward never runs, so nothing is kept for it.
        ran = kernel.forward(inputs, replace(plan, training=False, return_lse=True))
        out, lse = ran.out, ran.lse
        if sink is not None and "sink_from_lse" in plan.repairs:
            out, lse = shrunk(out, lse, sink), total(lse, sink)
        ctx.settings = (mask, scale, softcap)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        mask, scale, softcap = ctx.settings
        inputs = _inputs(mask, scale, softcap, tuple(tensors))
        wanted = tuple(ctx.needs_input_grad[_SETTINGS : _SETTINGS + 4])
        grads = in_turn(lambda grad: from_lse.gradients(inputs, out, lse, grad, wanted), grad_out)
        return *(None,) * _SETTINGS, *grads, None


def _inputs(
    mask: LoweredMask, scale: float | None, softcap: float, tensors: tuple[Tensor | None, ...]
) -> Inputs:
    query, key, value, sink, slopes = tensors
    return Inputs(
        cast("Tensor", query),
        cast("Tensor", key),
        cast("Tensor", value),
        mask,
        scale=scale,
        softcap=softcap,
        sink=sink,
        alibi_slopes=slopes,
    )
