"""Chunked attention as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnroute.errors import AttnRouteError
from attnroute.executors._chunked_backward import Grads, Wanted, run_backward
from attnroute.executors._chunked_call import Call, Saved, plain
from attnroute.executors._chunked_forward import run_forward
from attnroute.executors._chunked_tile import Extras, Spec


def attend(query: Tensor, key: Tensor, value: Tensor, extras: Extras, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, recorded for backward only where a gradient is wanted."""
    inputs = (query, key, value, extras.bias, extras.slopes, extras.sink)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        out, lse = _Chunked.apply(spec, query, key, value, *_flat(extras))  # type: ignore[no-untyped-call]
        return out, lse
    with plain(query):
        saved = run_forward(Call.build(query, key, value, extras, spec))
        return saved.out, saved.lse


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extras: Extras,
    spec: Spec,
    saved: Saved,
    grads: tuple[Tensor, Tensor | None],
    wanted: Wanted,
) -> Grads:
    """Return the gradients, given those of output and log-sum-exp; see `run_backward`."""
    with plain(query):
        return run_backward(Call.build(query, key, value, extras, spec), saved, *grads, wanted)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: Spec, query: Tensor, key: Tensor, value: Tensor, *extras: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with plain(query):
            saved = run_forward(Call.build(query, key, value, Extras(*extras), spec))
            lse = saved.lse
        ctx.spec = spec
        ctx.save_for_backward(query, key, value, *extras, *saved)
        return saved.out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            *_ChunkedGrad.apply(  # type: ignore[no-untyped-call]
                ctx.spec, tuple(ctx.needs_input_grad[1:7]), grad_out, grad_lse, *ctx.saved_tensors
            ),
            *(None,) * 4,
        )


class _ChunkedGrad(torch.autograd.Function):
    """The first derivative; a function of its own so that asking for a second one meets a clear error."""

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, wanted: tuple[bool, ...], grad_out: Tensor, grad_lse: Tensor, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = tensors
        saved = Saved(*rest[-3:])
        grads = (grad_out, grad_lse)
        return attend_backward(query, key, value, Extras(*rest[:-3]), spec, saved, grads, Wanted(*wanted))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise AttnRouteError(
            "backend 'chunked' has no second derivative, and one was asked for; use backend='math' for calls"
            " that are differentiated twice."
        )


def _flat(extras: Extras) -> tuple[Tensor | None, ...]:
    return tuple(getattr(extras, name) for name in Extras.__slots__)
