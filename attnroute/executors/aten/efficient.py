"""EFFICIENT: torch's memory-efficient (CUTLASS) attention operator.

Its log-sum-exp is padded to a multiple of 32 rows and is 0 in rows with no key; bottom-right causal goes
through the lower operator. Seen on an H100 with torch 2.11
(benchmarks/results/h100-torch2.11-kernel-facts.json).
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from attnroute.executors.aten.handover import Launch, pair_of, short_way
from attnroute.executors.aten.operators import scaled
from attnroute.executors.protocol import (
    Executor,
    ForwardResult,
    Grads,
    Inputs,
    Output,
    Plan,
    Wanted,
)
from attnroute.executors.strides import fitted, watch
from attnroute.masks.lowered.dense import empty_rows
from attnroute.masks.lowered.form import as_4d

CAUSAL_BOTTOM_RIGHT: Final = 2
"""`custom_mask_type` of the operator: causal from the bottom-right corner."""
LSE_ROWS: Final = 32
"""The log-sum-exp is padded to a multiple of this with +inf (kernel_forward.h, kAlignLSE)."""


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator that fits the mask."""
    out, lse, *_ = _operator(inputs, keep_lse=plan.training or plan.return_lse)
    watch(out, plan)
    return out, _unpadded(lse, inputs) if plan.return_lse else None


def forward(inputs: Inputs, _: Plan) -> ForwardResult:
    """Run the operator and keep what `backward` takes beside output and log-sum-exp."""
    out, lse, *rest = _operator(inputs, keep_lse=True)
    return ForwardResult(out, _unpadded(lse, inputs), tuple(rest))


def backward(inputs: Inputs, _: Plan, result: ForwardResult, grad_out: Tensor, wanted: Wanted) -> Grads:
    """Run the backward of the operator that `forward` ran; a bias gets a gradient where one is wanted."""
    lse, missing = result.lse, -result.lse.shape[-1] % LSE_ROWS
    if missing:
        lse = pad(lse, (0, missing), value=math.inf)
    # The kernel takes the output's rows to lie heads after heads, as its forward writes them.
    out = result.out.transpose(1, 2).contiguous().transpose(1, 2)
    grad_out = fitted(grad_out, out)
    high = _causal_band(inputs)
    if high:
        return _bottom_right_backward(inputs, ForwardResult(out, lse, result.rest), grad_out)
    seed, offset = result.rest
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out,
        inputs.query,
        inputs.key,
        inputs.value,
        _attn(inputs),
        out,
        lse,
        seed,
        offset,
        inputs.dropout_p,
        list(wanted),
        high is not None,
        scale=inputs.scale,
    )
    *grads, grad_attn = grads
    if not wanted[3] or inputs.attn is None:
        return *grads, None
    return *grads, grad_attn.sum_to_size(inputs.attn.shape)


def _operator(inputs: Inputs, *, keep_lse: bool) -> tuple[Any, ...]:
    high = _causal_band(inputs)
    if high:
        return _bottom_right(inputs, keep_lse=keep_lse)
    return torch._scaled_dot_product_efficient_attention(  # type: ignore[attr-defined,no-any-return]
        inputs.query,
        inputs.key,
        inputs.value,
        _attn(inputs),
        keep_lse,
        inputs.dropout_p,
        high is not None,
        scale=inputs.scale,
    )


def _attn(inputs: Inputs) -> Tensor | None:
    if inputs.attn is None:
        return None
    batch, heads, seqlen_q, _ = inputs.query.shape
    return as_4d(inputs.attn).expand(batch, heads, seqlen_q, inputs.key.shape[2])


def _causal_band(inputs: Inputs) -> int | None:
    """Return None where not causal, 0 for causal from the top left, else for the bottom right."""
    return inputs.mask.band_hi if inputs.attn is None else None


def _unpadded(lse: Tensor, inputs: Inputs) -> Tensor:
    """Return the log-sum-exp of the queries alone, with -inf in rows with no key."""
    lse = lse[..., : inputs.query.shape[2]]
    return lse if inputs.attn is None else lse.masked_fill(empty_rows(as_4d(inputs.attn)), -math.inf)


def _bottom_right(inputs: Inputs, *, keep_lse: bool) -> tuple[Any, ...]:
    query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward.default(
        query,
        key,
        value,
        None,
        None,
        None,
        None,
        None,
        inputs.dropout_p,
        CAUSAL_BOTTOM_RIGHT,
        keep_lse,
        scale=inputs.scale,
    )
    return out.transpose(1, 2), lse, seed, offset


def _bottom_right_backward(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> Grads:
    query, key, value, out, grad = (
        t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value, result.out, grad_out)
    )
    seed, offset = result.rest
    *grads, _ = torch.ops.aten._efficient_attention_backward.default(
        grad,
        query,
        key,
        value,
        None,
        out,
        None,
        None,
        query.shape[1],
        key.shape[1],
        result.lse,
        inputs.dropout_p,
        seed,
        offset,
        CAUSAL_BOTTOM_RIGHT,
        False,
        scale=inputs.scale,
    )
    grad_query, grad_key, grad_value = (t.transpose(1, 2) for t in grads)
    return grad_query, grad_key, grad_value, None


def _launch_of(inputs: Inputs, plan: Plan) -> Launch | None:
    """Return what calls the operator of scaled_dot_product_attention."""
    high, dropout_p = _causal_band(inputs), inputs.dropout_p
    keep_lse = plan.training or plan.return_lse
    if high or "align_bias" in plan.repairs:
        return None
    causal = high is not None
    operator = scaled(torch._scaled_dot_product_efficient_attention, inputs.scale)  # type: ignore[attr-defined]
    shape = (*inputs.query.shape[:3], inputs.key.shape[2])

    def launch(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, *, whole: bool = False) -> Any:
        attn = None if attn is None else attn.expand(shape)
        made = operator(query, key, value, attn, keep_lse, dropout_p, causal)
        return made if whole else made[0]

    return launch


executor = Executor(
    run,
    pair_of(forward, backward, _launch_of),
    bind=short_way(SDPBackend.EFFICIENT_ATTENTION, _launch_of),
    # `preprocess_mask` of torch's attention.cpp.
    spared=frozenset({"align_bias"}),
)
