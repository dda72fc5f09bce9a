"""Chunked attention as custom operators, for torch.compile: opaque to the tracer, so no graph break.

Eager calls do not come here, since an operator of Python costs more on the host than an autograd function.
The seed of dropout is a tensor, drawn by the compiled graph anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attnroute.errors import AttnRouteError
from attnroute.executors.chunked.backward import NeedsGrad, run_backward
from attnroute.executors.chunked.call import Call, Saved, matmuls_of
from attnroute.executors.chunked.forward import run_forward
from attnroute.executors.chunked.plan import Limits
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.executors.operators import Side, no_gradient, register, spread
from attnroute.masks.lowered.flat import Flat, flatten, restore
from attnroute.masks.lowered.form import LoweredMask

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? sink, Tensor? key_keep,"
    " Tensor? ids_q, Tensor? ids_kv, Tensor? dense, Tensor? seed,"
    " float scale, float softcap, float dropout_p,"
    " SymInt? band_lo, SymInt? band_hi, SymInt[]? bounds, SymInt? block_q,"
    " str program, Tensor[] program_tensors, SymInt[] program_numbers"
)
_GRADS = 6
"""Query, key, value, bias, slopes and sink, in the order of the arguments."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, extras: Extras, spec: Spec, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp through the operator, whose arguments are tensors and numbers.

    Raises:
        AttnRouteError: The call has functions, or blocks, which have one.
    """
    if spec.score_mod is not None or (spec.program is not None and _has_functions(spec.program)):
        raise AttnRouteError(
            "backend 'chunked' requires a mask and scores without functions inside a compiled graph; got one;"
            " call attnroute.attention(), which then runs outside of the graph."
        )
    out, lse, _ = forward(*arguments_of(query, key, value, extras, spec, seed=seed))
    return out, lse


def arguments_of(
    query: Tensor, key: Tensor, value: Tensor, extras: Extras, spec: Spec, *, seed: Tensor | None
) -> tuple[Any, ...]:
    """Return the operators' common arguments, of a call without functions."""
    limits = spec.limits
    program = Flat("", [], []) if spec.program is None else flatten(spec.program)
    bounds = None if limits.bounds is None else list(limits.bounds)
    tensors = (extras.bias, extras.slopes, extras.sink)
    masks = (extras.key_keep, extras.ids_q, extras.ids_kv, extras.dense)
    numbers = (spec.scale, spec.softcap, spec.dropout_p, limits.band_lo, limits.band_hi, bounds, spec.block_q)
    return (query, key, value, *tensors, *masks, seed, *numbers, *program)


def _has_functions(mask: LoweredMask) -> bool:
    parts = (*mask.exclude, *(part for alternatives in mask.either for part in alternatives))
    return bool(mask.functions or mask.sparse) or any(_has_functions(part) for part in parts)


def _call(arguments: tuple[Any, ...]) -> tuple[Call, AbstractContextManager[None]]:
    """Read the operator's arguments back."""
    query, key, value, *extras = arguments[:10]
    seed, scale, softcap, dropout_p, band_lo, band_hi, bounds, block_q, *program = arguments[10:]
    spec = Spec(
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=0 if seed is None else int(seed),
        limits=Limits(band_lo, band_hi, None if bounds is None else tuple(bounds)),
        block_q=block_q,
        program=restore(*program) if program[0] else None,
    )
    return Call.build(query, key, value, Extras(*extras), spec), matmuls_of(query)


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, context = _call(arguments)
    with context:
        saved = run_forward(call)
        return saved.out, saved.lse, saved.stats


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    lse = query.new_empty(rows, dtype=torch.float32)
    return out, lse, query.new_empty(*rows, 2, dtype=wide)


def _run_backward(*arguments: Any) -> list[Tensor]:
    *forwards, out, stats, grad_out, grad_lse, wanted = arguments
    call, context = _call(tuple(forwards))
    with context:
        grads = run_backward(call, Saved(out, stats), grad_out, grad_lse, NeedsGrad(*wanted))
    found = (grads.query, grads.key, grads.value, grads.bias, grads.slopes, grads.sink)
    return [grad for grad in found if grad is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs, wanted = arguments[:_GRADS], arguments[-1]
    return [torch.empty_like(t) for t, wants in zip(inputs, wanted, strict=True) if wants]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, stats = output
    text, tensors, numbers = inputs[-3:]
    ctx.save_for_backward(*inputs[:11], *tensors, out, stats)
    ctx.numbers, ctx.program = inputs[11:-3], (text, numbers)


def _gradients(
    backward: Callable[..., list[Tensor]], ctx: Any, grad_out: Tensor, grad_lse: Tensor, *_: Tensor
) -> tuple[Any, ...]:
    *tensors, out, stats = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:_GRADS])
    (text, numbers), masks = ctx.program, tensors[11:]
    forwards = (*tensors[:11], *ctx.numbers, text, masks, numbers)
    found = backward(*forwards, out, stats, grad_out, grad_lse, wanted)
    return *spread(found, wanted), *(no_gradient(value) for value in forwards[_GRADS:])


forward, backward = register(
    "chunked",
    Side(
        f"({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor stats)",
        _run_forward,
        _fake_forward,
    ),
    Side(
        f"({_ARGUMENTS}, Tensor out, Tensor stats, Tensor grad_out, Tensor grad_lse,"
        " bool[] wanted) -> Tensor[]",
        _run_backward,
        _fake_backward,
    ),
    save=_save,
    gradients=_gradients,
)
