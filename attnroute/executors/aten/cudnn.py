"""CUDNN: torch's cuDNN attention operator.

torch keeps a plan of the backward for calls that are alike (run_cudnn_SDP_bprop in MHA.cpp, torch 2.7 and
later). It is made for the strides of the first gradient, and what torch compares has no strides of gradients:
one that lies otherwise gives wrong numbers, silently. `attention()` hands over gradients that lie as the
output does. Other code of the process may have made the plan for other ones, so calls that train have plans
of their own: torch compares the bytes of the dropout's probability, and -0.0 has others than 0.0.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnroute.executors.aten.handover import Launch, pair_of, short_way
from attnroute.executors.aten.operators import attn_of, is_causal, operator_of, scaled
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
from attnroute.masks.lowered.form import as_4d

_NO_DROPOUT: Final = -0.0
"""Of calls that train: equal to 0.0 in every comparison, and another key of torch's plans."""


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator."""
    keep_lse = plan.training or plan.return_lse
    out, lse, *_ = _operator(inputs, keep_lse=keep_lse, dropout_p=_dropout_of(inputs, plan))
    watch(out, plan, as_output=True)
    return out, lse.view(out.shape[:3]) if plan.return_lse else None


def forward(inputs: Inputs, _: Plan) -> ForwardResult:
    """Run the operator and keep what `backward` takes beside output and log-sum-exp."""
    dropout_p = inputs.dropout_p or _NO_DROPOUT
    out, lse, *rest = _operator(inputs, keep_lse=True, dropout_p=dropout_p)
    return ForwardResult(out, lse.view(out.shape[:3]), (lse.shape, *rest))


def backward(inputs: Inputs, _: Plan, result: ForwardResult, grad_out: Tensor, wanted: Wanted) -> Grads:
    """Run the operator's backward; the kernel makes all three gradients or none."""
    shape, sums_q, sums_kv, max_q, max_kv, seed, offset, *_rest = result.rest
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        fitted(grad_out, result.out, as_output=True),
        inputs.query,
        inputs.key,
        inputs.value,
        result.out,
        # Before 9.26 some kernels take it to be packed, whatever its strides say (NVIDIA/cudnn-frontend#304).
        result.lse.contiguous().view(shape),
        seed,
        offset,
        attn_of(inputs),
        sums_q,
        sums_kv,
        max_q,
        max_kv,
        inputs.dropout_p or _NO_DROPOUT,
        is_causal(inputs),
        scale=inputs.scale,
    )
    return *grads, None


def _dropout_of(inputs: Inputs, plan: Plan) -> float:
    return inputs.dropout_p or (_NO_DROPOUT if plan.training else 0.0)


def _operator(inputs: Inputs, *, keep_lse: bool, dropout_p: float) -> tuple[Any, ...]:
    """Return the operator's outputs; the log-sum-exp may have a last dimension of size 1."""
    return operator_of("_scaled_dot_product_cudnn_attention", inputs.query)(  # type: ignore[no-any-return]
        inputs.query,
        inputs.key,
        inputs.value,
        attn_of(inputs),
        keep_lse,
        dropout_p,
        is_causal(inputs),
        False,
        scale=inputs.scale,
    )


def _launch_of(inputs: Inputs, plan: Plan) -> Launch:
    """Return what calls the operator."""
    operator = scaled(operator_of("_scaled_dot_product_cudnn_attention", inputs.query), inputs.scale)
    causal, dropout_p = is_causal(inputs), _dropout_of(inputs, plan)
    keep_lse = plan.training or plan.return_lse

    def launch(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, *, whole: bool = False) -> Any:
        attn = None if attn is None else as_4d(attn)
        made = operator(query, key, value, attn, keep_lse, dropout_p, causal, False)
        return made if whole else made[0]

    return launch


executor = Executor(
    run,
    pair_of(forward, backward, _launch_of, as_output=True),
    bind=short_way(SDPBackend.CUDNN_ATTENTION, _launch_of, as_output=True, no_dropout=_NO_DROPOUT),
)
