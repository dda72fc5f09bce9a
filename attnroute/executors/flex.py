"""FLEX: torch's FlexAttention, compiled once per structure of mask and scores.

Lengths, document ids, window sizes and slopes are tensors that the compiled code reads, so a new mask of a
known structure compiles nothing, and a second length compiles once more for all lengths after it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

import torch

from attnroute.executors import _flex_compile as compiling
from attnroute.executors._flex_program import Blocked, Part, blocked, scored

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors._inputs import Inputs, Output, Plan

WHOLE: Final = 128
"""Tokens: torch's own test for lengths that need no look at the ends (flex_attention.py, IS_DIVISIBLE)."""


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the compiled call of the structure.

    Raises:
        NotCompiledError: torch.compile cannot compile here, or has compiled this structure too often.
    """
    mask, score, settings = _program(inputs, plan)
    entry = compiling.entry(_key(inputs, mask, score, settings), mask.part, score, settings)
    qkv = (inputs.query, inputs.key, inputs.value)
    if plan.device_type == "cpu":
        qkv = _as_the_cpu_takes_them(qkv)
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function("attnroute::flex"):
            out, lse = compiling.run(entry, qkv, mask, score)
    else:
        out, lse = compiling.run(entry, qkv, mask, score)
    if inputs.sink is not None and lse is not None:
        out, lse = _with_sink(out, lse, inputs.sink)
    return out, lse if plan.return_lse else None


def key(inputs: Inputs, plan: Plan) -> Hashable:
    """Return under which key the code of a call is compiled."""
    return _key(inputs, *_program(inputs, plan))


def _program(inputs: Inputs, plan: Plan) -> tuple[Blocked, Part, compiling.Settings]:
    mask, score = blocked(inputs), scored(inputs)
    settings = compiling.Settings(
        scale=inputs.scale,
        enable_gqa=inputs.query.shape[1] != inputs.key.shape[1],
        return_lse=plan.return_lse or inputs.sink is not None,
        size=mask.size,
        options=_options(inputs, plan),
    )
    return mask, score, settings


def _as_the_cpu_takes_them(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Without gradients, and each with memory of its own: inductor's C++ template names them by it."""
    query, key, value = (t.detach() for t in qkv)
    if key.data_ptr() == query.data_ptr():
        key = key.clone()
    if value.data_ptr() in (query.data_ptr(), key.data_ptr()):
        value = value.clone()
    return query, key, value


def _options(inputs: Inputs, plan: Plan) -> tuple[tuple[str, int | bool | str], ...]:
    """Whole blocks need no look at the ends, which lengths that vary would otherwise always get."""
    whole = inputs.query.shape[2] % WHOLE == 0 and inputs.key.shape[2] % WHOLE == 0
    if whole and inputs.query.device.type != "cpu":
        return (*plan.options, ("IS_DIVISIBLE", True))
    return plan.options


def _key(inputs: Inputs, mask: Blocked, score: Part, settings: compiling.Settings) -> Hashable:
    """What makes compiled code of its own: everything but lengths and the values of tensors."""
    tensors = (inputs.query, inputs.key, inputs.value)
    return (
        mask.part.structure,
        score.structure,
        settings,
        tuple((t.shape[1], t.shape[3], _order(t), t.requires_grad) for t in tensors),
        inputs.query.dtype,
        inputs.query.device,
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        torch.is_autocast_enabled(inputs.query.device.type),
        tuple(t is None or tuple(n > 1 for n in t.shape[:2]) for t in mask.blocks[:3]),
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the widest stride to the narrowest: dynamo guards on strides."""
    return tuple(sorted(range(4), key=tensor.stride, reverse=True))


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh the output down by the share of the sink; exact, and differentiable because this lse is."""
    logit = sink.to(lse.dtype)[None, :, None].expand_as(lse)
    empty = lse == -math.inf
    known = lse.masked_fill(empty, 0.0)
    weight = torch.sigmoid(known - logit).masked_fill(empty, 0.0)
    return (out * weight[..., None]).to(out.dtype), torch.where(empty, logit, torch.logaddexp(known, logit))
