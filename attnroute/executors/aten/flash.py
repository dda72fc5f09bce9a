"""FLASH: torch's built-in FlashAttention-2 on CUDA, and torch's flash kernel on the CPU.

Seen on an H100 with torch 2.11 (benchmarks/results/h100-torch2.11-kernel-facts.json): the CUDA kernel aligns
causal masks at the bottom right, takes windows and ragged batches, gives zeros for rows with no key and says
+inf for their log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from attnroute.executors.aten import flash_backward, flash_ragged
from attnroute.executors.aten.bindings import operator_of
from attnroute.executors.gradients import fitted, watch
from attnroute.executors.prepare.apply import empty_rows
from attnroute.executors.protocol import Executor, Grads, Inputs, Output, Pair, Plan, Ran, Wanted
from attnroute.masks.lowered.form import as_4d


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator that fits the device and the mask."""
    if plan.device_type == "cpu":
        return _cpu(inputs, return_lse=plan.return_lse)
    out, lse, *_ = _cuda(inputs, plan)
    watch(out, plan)
    return out, _settled(lse) if plan.return_lse else None


def forward(inputs: Inputs, plan: Plan) -> Ran:
    """Run what `run` runs, and keep what `backward` takes beside output and log-sum-exp."""
    if plan.device_type == "cpu":
        out, lse = _cpu(inputs, return_lse=True)
        return Ran(out, cast("Tensor", lse))
    out, lse, *rest = _cuda(inputs, plan)
    return Ran(out, _settled(lse), tuple(rest))


def backward(inputs: Inputs, plan: Plan, ran: Ran, grad_out: Tensor, _: Wanted) -> Grads:
    """Run the backward of the operator that `forward` ran; it makes all gradients but the mask's."""
    if plan.device_type == "cpu":
        return flash_backward.cpu(inputs, ran, grad_out)
    grad_out = fitted(grad_out, ran.out)
    if _is_plain(inputs) and "to_varlen" not in plan.repairs:
        return flash_backward.plain(inputs, ran, grad_out)
    if "to_varlen" in plan.repairs or flash_ragged.misses_keys(inputs):
        return flash_backward.ragged(inputs, ran, grad_out)
    return flash_backward.window(inputs, ran, grad_out)


def _cuda(inputs: Inputs, plan: Plan) -> tuple[Any, ...]:
    """Return output and log-sum-exp in the shapes of the inputs, then what the operator's backward takes."""
    if "to_varlen" in plan.repairs:
        ragged = flash_ragged.rows_of(inputs, training=plan.training)
        return flash_ragged.run(inputs, ragged, reads_lse=_reads_lse(plan))
    if _is_plain(inputs):
        causal = inputs.mask.band_hi is not None
        operator = operator_of("_scaled_dot_product_flash_attention", inputs.query)
        return operator(  # type: ignore[no-any-return]
            inputs.query, inputs.key, inputs.value, inputs.dropout_p, causal, False, scale=inputs.scale
        )
    if flash_ragged.misses_keys(inputs):
        return flash_ragged.run(inputs, flash_ragged.whole_rows(inputs), reads_lse=_reads_lse(plan))
    return _window(inputs)


def _reads_lse(plan: Plan) -> bool:
    return plan.training or plan.return_lse or "sink_from_lse" in plan.repairs


def _settled(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == math.inf, -math.inf)


def _cpu(inputs: Inputs, *, return_lse: bool) -> Output:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.dropout_p,
        inputs.attn is None and inputs.mask.band_hi is not None,
        attn_mask=None if inputs.attn is None else as_4d(inputs.attn),
        scale=inputs.scale,
    )
    if not return_lse:
        return out, None
    # The CPU kernel says 0 for rows with no key.
    return out, lse if inputs.attn is None else lse.masked_fill(empty_rows(inputs.attn), -math.inf)


def _is_plain(inputs: Inputs) -> bool:
    offset = inputs.key.shape[2] - inputs.query.shape[2]
    return inputs.mask.band_lo is None and inputs.mask.band_hi in (None, offset)


def _window(inputs: Inputs) -> tuple[Any, ...]:
    query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
    left, right = flash_ragged.window_sizes(inputs)
    out, *rest = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        None,
        None,
        query.shape[1],
        key.shape[1],
        inputs.dropout_p,
        False,
        False,
        scale=inputs.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out.transpose(1, 2), *rest


executor = Executor(run, Pair(forward, backward))
