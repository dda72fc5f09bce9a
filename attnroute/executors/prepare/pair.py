"""Forward and backward from different kernels: the forward's own, and chunked's from the log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.executors.batched_gradients import differentiable_once, in_turn
from attnroute.executors.chunked import from_lse
from attnroute.executors.prepare.sink import Fixed, may_be_empty, shrunk, total
from attnroute.executors.protocol import Executor, Inputs, Output, Pair, Plan

_CONSTANTS: Final = 4
"""Arguments of `_Pair` before its tensors."""


def run_pair(executor: Executor, inputs: Inputs, plan: Plan) -> Output:
    """Run a kernel's forward, and chunked's backward where gradients are wanted.

    Returns:
        Output and log-sum-exp; only the output carries a gradient.
    """
    tensors = (inputs.query, inputs.key, inputs.value, inputs.sink, inputs.alibi_slopes)
    constants = (executor.pair, plan, Fixed.of(inputs), inputs.attn)
    out, lse = _Pair.apply(*constants, *tensors)  # type: ignore[no-untyped-call]
    return out, lse if plan.return_lse else None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Pair, plan: Plan, fixed: Fixed, attn: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key, value, sink, slopes = tensors
        # The kernel reads what the mask became for it, and the backward the mask itself. The kernel's own
        # backward never runs, so nothing is kept for it.
        inputs = fixed.inputs(query, key, value, attn=attn, sink=sink, slopes=slopes)
        result = kernel.forward(inputs, replace(plan, training=False, return_lse=True))
        out, lse = result.out, result.lse
        if sink is not None and "sink_from_lse" in plan.repairs:
            out = shrunk(out, lse, sink, may_be_empty=may_be_empty(inputs))
            lse = total(lse, sink)
        ctx.fixed = fixed
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, slopes, out, lse = ctx.saved_tensors
        inputs = ctx.fixed.inputs(query, key, value, sink=sink, slopes=slopes)
        wanted = tuple(ctx.needs_input_grad[_CONSTANTS : _CONSTANTS + 4])
        grads = in_turn(lambda grad: from_lse.gradients(inputs, out, lse, grad, wanted), grad_out)
        return *(None,) * _CONSTANTS, *grads, None
