"""Eager calls of chunked attention: an autograd function around its two directions."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from attnroute.errors import AttnRouteError
from attnroute.executors.batched_gradients import Gradients, in_turn
from attnroute.executors.chunked.backward import NeedsGrad, run_backward
from attnroute.executors.chunked.call import Call, Saved, matmuls_of
from attnroute.executors.chunked.forward import run_forward
from attnroute.executors.chunked.functions import Reads, reads_of
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.executors.chunked.whole import Weights, backward_whole, forward_whole, is_whole

_SAVED: Final = len(Saved._fields) + 3
"""Of what is kept: output, statistics, query, key and value, before the other tensors of a call."""
_NO_WEIGHTS: Final = (None,) * len(Weights._fields)


def attend(
    query: Tensor, key: Tensor, value: Tensor, extras: Extras, spec: Spec, *, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output and log-sum-exp, recorded for backward only where a gradient is wanted."""
    if torch.is_grad_enabled():
        reads = reads_of(spec, query, key)
        inputs = (query, key, value, *extras, *reads.trained)
        if any(t is not None and t.requires_grad for t in inputs):
            out, lse = _Chunked.apply(spec, reads, wants_lse, *inputs)  # type: ignore[no-untyped-call]
            return out, lse
    with matmuls_of(query):
        call = Call.build(query, key, value, extras, spec)
        saved, _ = _computed(call, want_slope=False)
        return saved.out, saved.lse if wants_lse else None


def _computed(call: Call, *, want_slope: bool) -> tuple[Saved, Weights | tuple[None, ...]]:
    """Run the forward; where one tile holds all scores, also return what its backward takes."""
    return forward_whole(call, want_slope=want_slope) if is_whole(call) else (run_forward(call), _NO_WEIGHTS)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        reads: Reads,
        wants_lse: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        extras = rest[: len(Extras._fields)]
        with matmuls_of(query):
            call = Call.build(query, key, value, Extras(*extras), spec, reads.trained)
            saved, weights = _computed(call, want_slope=spec.softcap != 0.0)
            lse = saved.lse if wants_lse else None
        # The functions go on reading the tensors themselves, so those are kept beside what autograd keeps of
        # them, which serves to notice their changes.
        ctx.spec, ctx.trained = spec, reads.trained
        ctx.save_for_backward(*saved, query, key, value, *extras, *weights, *reads.watched)
        return saved.out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = NeedsGrad(*ctx.needs_input_grad[3 : 3 + len(NeedsGrad._fields)])
        tensors = ctx.saved_tensors[: _SAVED + len(Extras._fields) + len(_NO_WEIGHTS)]

        def of_sample(grad_out: Tensor, grad_lse: Tensor | None = None) -> Gradients:
            # Only what is recorded can be differentiated again.
            first = _ChunkedGrad.apply if torch.is_grad_enabled() else _first_derivative
            made: Gradients = first(ctx.spec, ctx.trained, wanted, grad_out, grad_lse, *tensors)
            return made

        grads = in_turn(of_sample, grad_out, *(() if grad_lse is None else (grad_lse,)))
        masks = (None,) * (3 + len(Extras._fields) - len(wanted))
        return None, None, None, *grads[: len(wanted)], *masks, *grads[len(wanted) :]


def _first_derivative(
    spec: Spec,
    trained: tuple[Tensor, ...],
    wanted: NeedsGrad,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *tensors: Tensor,
) -> Gradients:
    split = _SAVED + len(Extras._fields)
    (out, stats, query, key, value, *extras), weights = tensors[:split], tensors[split:]
    with matmuls_of(query):
        call, saved = Call.build(query, key, value, Extras(*extras), spec, trained), Saved(out, stats)
        if weights[0] is None:
            grads = run_backward(call, saved, grad_out, grad_lse, wanted)
        else:
            grads = backward_whole(call, saved, Weights(*weights), grad_out, grad_lse, wanted)
    return *grads[:-1], *grads.trained


class _ChunkedGrad(torch.autograd.Function):
    """The first derivative; a function of its own, so that taking a second one raises a clear error."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        return _first_derivative(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise AttnRouteError(
            "backend 'chunked' has no second derivative, and one was asked for; use backend='math' for calls"
            " that are differentiated twice."
        )
