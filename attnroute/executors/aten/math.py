"""MATH: torch's composite of matmul and softmax; the only one that can be differentiated twice."""

from __future__ import annotations

import torch

from attnroute.executors.aten.operators import attn_of, is_causal
from attnroute.executors.protocol import Executor, Inputs, Output, Plan


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the composite; it gives no log-sum-exp."""
    out, _ = torch._scaled_dot_product_attention_math(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        attn_of(inputs),
        inputs.dropout_p,
        is_causal(inputs),
        scale=inputs.scale,
        enable_gqa=bool(inputs.query.shape[1] != inputs.key.shape[1]),
    )
    return out, None


executor = Executor(run)
