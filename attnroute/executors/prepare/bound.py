"""What runs calls that differ from one in values alone: the kernel, and what it gets of the mask."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.errors import KernelRefusedError
from attnroute.executors.prepare.apply import prepare_qkv
from attnroute.executors.prepare.clear import with_cleared
from attnroute.executors.prepare.masks import (
    ADDITIVE,
    DENSE,
    as_given,
    dense_of,
    empty_rows_of,
    extent_of,
    is_kept,
    is_small,
    place_of,
)
from attnroute.executors.prepare.sink import bind_with_sink, run_with_sink
from attnroute.executors.protocol import Bound, Executor, Inputs, Plan, Run
from attnroute.masks.kept import keeper_of, known_keeper
from attnroute.masks.layout import ALIGN
from attnroute.masks.lowered.dense import additive, build, empty_rows
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.masks.tracing import address

_OF_MASKS: Final = frozenset(
    {"materialize_mask", "cast_mask", "zero_empty_rows", "clear_left_out", "to_varlen", "from_varlen"}
)
"""Repairs that need nothing but what is made once for each mask."""
_WITH_SINK: Final = _OF_MASKS | {"sink_from_lse"}
Lower = Callable[[Any], LoweredMask]
"""Lowers a mask as the user gave it."""


def bind(executor: Executor, inputs: Inputs, plan: Plan, given: object) -> Bound | None:
    """Return what runs calls that differ from this one in values alone, None where only `run_repaired` can.

    Args:
        executor: The backend's.
        inputs: The call.
        plan: How it runs.
        given: The mask or bias that the user gave, which what is returned is called with.

    Returns:
        A function that keeps no mask alive: what was prepared of one is kept with that.
    """
    repairs = _left(executor, inputs, plan)
    if repairs is None:
        return None
    prepares = bool(repairs & DENSE) and not (inputs.mask.is_full and inputs.bias is None)
    if prepares and not is_kept(inputs):
        return None
    attn = dense_of(inputs, repairs, kept=True) if prepares else as_given(inputs)
    if attn is not None and not (prepares or isinstance(given, Tensor)):
        return None
    run = _kernel(executor, inputs, plan, attn, repairs)
    if run is None:
        return None
    if "clear_left_out" in repairs and inputs.mask.key_keep is not None:
        run = with_cleared(run, inputs)
    if attn is not None and "zero_empty_rows" in repairs:
        empty = weakref.ref(empty_rows_of(replace(inputs, attn=attn), repairs))
        run = _with_zeros(run, empty, trains=plan.training)
    if attn is not None and prepares:
        return _with(run, weakref.ref(attn))
    return run if attn is not None or given is None else _without(run)


def bind_form(executor: Executor, inputs: Inputs, plan: Plan, given: object, lower: Lower) -> Bound | None:
    """Return what runs calls that differ from this one in values and in a mask of the same form.

    What tells forms apart is no value, so that one kernel is bound for all of them.

    Args:
        executor: The backend's.
        inputs: The call, which has a mask.
        plan: How it runs.
        given: Its mask as the user gave it; what is returned is called with any of the form.
        lower: Lowers any of them.

    Returns:
        None where the kernel gets more of a mask than one tensor. What is made of a mask is kept with that,
        where it may be kept.
    """
    repairs = _left(executor, inputs, plan)
    if repairs is None or inputs.bias is not None or inputs.mask.is_full or not is_small(inputs):
        return None
    prepares = bool(repairs & DENSE)
    if not (prepares or isinstance(given, Tensor)):
        return None
    if "clear_left_out" in repairs and inputs.mask.key_keep is not None:
        return None
    attn = dense_of(inputs, repairs) if prepares else as_given(inputs)
    run = None if attn is None else _kernel(executor, inputs, plan, attn, repairs)
    return None if run is None else _with_any(run, inputs, repairs, lower, trains=plan.training)


def in_layout(run: Bound, layout: str) -> Bound:
    """Make a kernel of layout bhsd one of layout bshd, or of thd, where all tokens stand in one row."""

    def heads_first(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor | None:
        out = run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), *rest)
        return None if out is None else out.transpose(1, 2)

    def in_one_row(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor | None:
        row = (t.unsqueeze(0).transpose(1, 2) for t in (query, key, value))
        out = run(*row, *rest)
        return None if out is None else out.squeeze(0).transpose(0, 1)

    return heads_first if layout == "bshd" else in_one_row


def _left(executor: Executor, inputs: Inputs, plan: Plan) -> frozenset[str] | None:
    """Return the repairs that the kernel does not spare; None where some are made anew in each call."""
    repairs = frozenset(plan.repairs)
    spared, sinks = repairs & executor.spared, "sink_from_lse" in repairs
    if spared and (sinks or ("align_bias" in spared and not _is_only_bias(inputs))):
        return None
    repairs -= spared
    return None if plan.return_lse or not repairs <= _WITH_SINK else repairs


def _kernel(
    executor: Executor, inputs: Inputs, plan: Plan, attn: Tensor | None, repairs: frozenset[str]
) -> Bound | None:
    """Return what runs the kernel on prepared tensors."""
    if repairs or attn is not None:
        inputs = replace(inputs, attn=attn)
        prepare_qkv(inputs, repairs)
    sinks = "sink_from_lse" in repairs
    if sinks:
        run = bind_with_sink(executor, inputs, plan)
    else:
        run = None if executor.bind is None else executor.bind(inputs, plan)
    if run is None and not executor.spared.intersection(plan.repairs):
        run = _in_general(executor, inputs, plan, sinks=sinks)
    return run


def _is_only_bias(inputs: Inputs) -> bool:
    """Return whether a bias stands without a mask, and starts where kernels can read it."""
    return inputs.bias is not None and inputs.mask.is_full and address(inputs.bias) % 16 == 0


def _in_general(executor: Executor, inputs: Inputs, plan: Plan, *, sinks: bool) -> Bound | None:
    """Return what runs an executor itself on prepared tensors; None where it would keep a mask alive."""
    mask, attn = inputs.mask, inputs.attn
    if inputs.alibi_slopes is not None or not (sinks or attn is None):
        return None
    if attn is not None:
        # Kernels that need the log-sum-exp for a sink read the tensor alone.
        mask = FULL
    elif not mask.is_band_only:
        return None
    scale, softcap, dropout_p = inputs.scale, inputs.softcap, inputs.dropout_p
    runs: Run = partial(run_with_sink, executor) if sinks else executor.run

    def run(
        query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, sink: Tensor | None = None
    ) -> Tensor | None:
        made = Inputs(query, key, value, mask, None, None, attn, scale, softcap, sink, None, dropout_p, None)
        try:
            return runs(made, plan)[0]
        except KernelRefusedError:
            # Run as any other it is refused again, and another backend takes it.
            return None

    return run


def _with(run: Bound, kept: weakref.ref[Tensor]) -> Bound:
    """Give a kernel the mask that was prepared for it, for as long as that is kept."""

    def with_kept(query: Tensor, key: Tensor, value: Tensor, _: object, *sink: Tensor) -> Tensor | None:
        attn = kept()
        return None if attn is None else run(query, key, value, attn, *sink)

    return with_kept


def _with_any(run: Bound, inputs: Inputs, repairs: frozenset[str], lower: Lower, *, trains: bool) -> Bound:
    """Give a kernel what is made of any mask of one form, once for each where that may be kept."""
    prepares, zeros = bool(repairs & DENSE), "zero_empty_rows" in repairs
    if not (prepares or zeros):
        return run
    place = place_of(inputs, repairs)
    of_attn, of_rows = ("dense", *place), ("empty rows", *place)
    make = _maker(inputs, lower, as_bias=bool(repairs & ADDITIVE))

    def with_any(query: Tensor, key: Tensor, value: Tensor, mask: Any, *sink: Tensor) -> Tensor | None:
        keeper, attn = known_keeper(mask) or keeper_of(mask), mask
        if prepares:
            attn = make(mask) if keeper is None else keeper.keep(of_attn, lambda: make(mask))
        out = run(query, key, value, attn, *sink)
        if out is None or not zeros:
            return out

        def find() -> Tensor:
            return empty_rows(attn).unsqueeze(-1)

        empty = find() if keeper is None else keeper.keep(of_rows, find)
        return out.masked_fill(empty, 0.0) if trains else out.masked_fill_(empty, 0.0)

    return with_any


def _maker(inputs: Inputs, lower: Lower, *, as_bias: bool) -> Callable[[Any], Tensor]:
    """Return what makes a kernel's tensor of any mask of a form."""
    dtype, extent = inputs.query.dtype, extent_of(inputs)
    is_dense = inputs.mask.dense is not None and replace(inputs.mask, dense=None) == FULL
    numbers: tuple[Tensor, Tensor] | None = None

    def make(mask: Any) -> Tensor:
        nonlocal numbers
        lowered = lower(mask)
        allowed = lowered.dense if is_dense and lowered.dense is not None else build(lowered, extent)
        if not as_bias:
            return allowed
        if allowed.shape[-1] % ALIGN == 0 and allowed.is_contiguous():
            # Rows are aligned as they are, and one operator makes them.
            numbers = numbers or _numbers(dtype, allowed.device)
            return torch.where(allowed, *numbers)
        return additive(allowed, None, dtype)

    return make


def _numbers(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 0 and minus infinity on a device, which is waited for where it is given numbers."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.zeros((), dtype=dtype, device=device), torch.full(
            (), -math.inf, dtype=dtype, device=device
        )


def _without(run: Bound) -> Bound:
    """Give a kernel no mask, where that was recognized as one that it has an argument for."""
    return lambda query, key, value, _, *sink: run(query, key, value, None, *sink)


def _with_zeros(run: Bound, kept: weakref.ref[Tensor], *, trains: bool) -> Bound:
    """Give rows with no key zeros, for as long as it is kept which they are; in place where none trains."""

    def with_zeros(*tensors: Tensor | None) -> Tensor | None:
        empty = kept()
        out = None if empty is None else run(*tensors)
        if out is None or empty is None:
            return None
        return out.masked_fill(empty, 0.0) if trains else out.masked_fill_(empty, 0.0)

    return with_zeros
