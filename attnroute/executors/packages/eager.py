"""Eager calls of a package's kernel, with autograd around its launches where gradients are asked for.

A backward runs in a thread of autograd, where everything costs the host several times as much as elsewhere.
So a call is one node, in which tensors are seen in the kernel's layout, and its backward does little but
launch the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnroute.executors.batched_gradients import differentiable_once, in_turn
from attnroute.executors.packages.launcher import Launcher
from attnroute.executors.packages.request import (
    TENSORS,
    Gradients,
    Launched,
    Request,
    in_batch,
    lay_out,
    packed,
    padded,
    padded_lse,
)
from attnroute.executors.protocol import Output, Plan

RequestOf = Callable[[Tensor, Tensor, Tensor, Tensor | None], Request]
"""Returns the request of query, key and value in layout bhsd, and of the sink."""


def run(
    launcher: Launcher,
    request_of: RequestOf,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    plan: Plan,
) -> Output:
    """Run a call.

    Args:
        launcher: Of its kernel.
        request_of: Makes its request.
        tensors: Query, key and value in layout bhsd, and the sink.
        plan: How it runs.
    """
    if plan.training:
        made: Any = _Call.apply((launcher, request_of, plan), *tensors)  # type: ignore[no-untyped-call]
        # The backward knows no gradient of the log-sum-exp.
        return (made[0], made[1].detach()) if plan.return_lse else (made, None)
    request = request_of(*tensors)
    out, lse, _ = launcher.forward(request, reads_lse=plan.return_lse)
    query = tensors[0]
    return padded(request, out, query.shape[0]), padded_lse(request, lse, query) if plan.return_lse else None


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Launcher, RequestOf, Plan],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        launcher, request_of, plan = call
        # Of views that are not detached, autograd's error about an input that was written into says less.
        given = (query.detach(), key.detach(), value.detach())
        request = request_of(*given, None if sink is None else sink.detach())
        out, lse, state = launcher.forward(request)
        ctx.rest = (launcher, query.shape[0], request.numbers)
        # The backward reads the output as the kernel wrote it.
        ctx.save_for_backward(out.detach(), lse, state, *request[:TENSORS])
        # Zeros would be made for the log-sum-exp, whose gradient nobody takes.
        ctx.set_materialize_grads(False)
        out = lay_out(request, out, query.shape[0])
        if not plan.return_lse:
            return out
        lse = padded_lse(request, lse, query)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        launcher, batch, numbers = ctx.rest
        out, lse, state, *saved = ctx.saved_tensors
        request = Request(*saved, *numbers)
        of_sample = partial(_of_sample, launcher, request, Launched(out, lse, state), batch)
        query, key, value, sink = in_turn(of_sample, grad_out)
        if sink is None or request.sink is None or not ctx.needs_input_grad[-1]:
            return None, query, key, value, None
        return None, query, key, value, sink.to(request.sink.dtype)


def _of_sample(
    launcher: Launcher, request: Request, result: Launched, batch: int, grad_out: Tensor
) -> Gradients:
    """Return the gradients of one sample, in layout bhsd as the gradient of the output is."""
    return in_batch(request, launcher.backward(request, result, packed(request, grad_out)), batch)
