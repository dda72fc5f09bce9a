"""FLEX and FLEX_FA4: torch's FlexAttention, compiled once per structure of mask and scores.

Lengths, document ids, window sizes and slopes are tensors that the compiled code reads, so a new mask of a
known structure compiles nothing, and a second length compiles once more for all lengths after it. FLEX_FA4 is
the same with the option BACKEND = "FLASH", with which torch takes FlashAttention-4's kernels for Triton's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

import torch

from attnroute.executors.flex import compile as compiling
from attnroute.executors.flex import operator as flex_op
from attnroute.executors.flex.program import Blocked, Part, Settings, blocked, key_of, scored
from attnroute.executors.protocol import Executor
from attnroute.masks.lowered.blocks import BLOCK
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.protocol import Inputs, Output, Plan

_BACKEND: Final = "BACKEND"
_BLOCK_SIZE: Final = ("SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE")
"""Options for the lists of blocks, which are made here; torch reads them off the lists."""
WHOLE: Final = 128
"""Tokens: lengths that are multiples of it need no bounds checks (torch, flex_attention.py, IS_DIVISIBLE)."""


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the compiled call of the structure, under the name of the plan's backend that profiles show.

    Raises:
        NotCompiledError: torch.compile cannot compile here, or has compiled this structure too often.
    """
    compiling.need_compiler(plan.backend)
    mask, score, settings = _program(inputs, plan)
    qkv = (inputs.query, inputs.key, inputs.value)
    if is_traced(inputs.query):
        return _finished(*flex_op.attend(plan.backend, *qkv, mask, score, settings), inputs, plan)
    entry = compiling.entry(key_of(qkv, mask, score, settings), mask.part, score, settings)
    if plan.device_type == "cpu":
        qkv = flex_op.with_own_memory(qkv)
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(f"attnroute::{plan.backend}"):
            out, lse = compiling.run(entry, qkv, mask, score)
    else:
        out, lse = compiling.run(entry, qkv, mask, score)
    return _finished(out, lse, inputs, plan)


def _finished(out: Tensor, lse: Tensor | None, inputs: Inputs, plan: Plan) -> Output:
    if inputs.sink is not None and lse is not None:
        out, lse = _with_sink(out, lse, inputs.sink)
    return out, lse if plan.return_lse else None


def key(inputs: Inputs, plan: Plan) -> Hashable:
    """Return under which key the code of a call is compiled."""
    return key_of((inputs.query, inputs.key, inputs.value), *_program(inputs, plan))


def compiled_seconds(inputs: Inputs, plan: Plan) -> float | None:
    """Return how long the structure of a call took to compile in this process, None where it was not."""
    found = compiling.compiled(key(inputs, plan)) if compiling.entries() else None
    return None if found is None or not found.seconds else sum(found.seconds)


def _program(inputs: Inputs, plan: Plan) -> tuple[Blocked, Part, Settings]:
    # Kernels that take the place of Triton's are written in CuTe DSL.
    cute = _BACKEND in dict(plan.options)
    mask, score = blocked(inputs, _block_size(plan), cute=cute), scored(inputs, cute=cute)
    settings = Settings(
        scale=inputs.scale,
        enable_gqa=bool(inputs.query.shape[1] != inputs.key.shape[1]),
        return_lse=plan.return_lse or inputs.sink is not None,
        size=mask.size,
        options=_options(inputs, plan),
    )
    return mask, score, settings


def _block_size(plan: Plan) -> tuple[int, int] | None:
    """Return the queries and keys of a block that the kernel takes, where table rows state one of them."""
    stated = dict(plan.options)
    if stated.keys().isdisjoint(_BLOCK_SIZE):
        return None
    size_q, size_kv = (int(stated.get(name, usual)) for name, usual in zip(_BLOCK_SIZE, BLOCK, strict=True))
    return size_q, size_kv


def _options(inputs: Inputs, plan: Plan) -> tuple[tuple[str, int | bool | str], ...]:
    """Whole blocks need no bounds checks, which torch otherwise makes wherever lengths vary."""
    options = tuple((name, value) for name, value in plan.options if name not in _BLOCK_SIZE)
    whole = inputs.query.shape[2] % WHOLE == 0 and inputs.key.shape[2] % WHOLE == 0
    # Kernels that take the place of Triton's know no such option.
    if whole and inputs.query.device.type != "cpu" and _BACKEND not in dict(options):
        return (*options, ("IS_DIVISIBLE", True))
    return options


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the output by the share that the sink leaves; differentiable, because this lse is."""
    logit = sink.to(lse.dtype)[None, :, None].expand_as(lse)
    empty = lse == -math.inf
    known = lse.masked_fill(empty, 0.0)
    weight = torch.sigmoid(known - logit).masked_fill(empty, 0.0)
    return (out * weight[..., None]).to(out.dtype), torch.where(empty, logit, torch.logaddexp(known, logit))


executor = Executor(run, compiled_seconds=compiled_seconds)
