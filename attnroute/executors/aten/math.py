"""MATH: torch's composite of matmul and softmax; the only one that can be differentiated twice."""

from __future__ import annotations

import torch

from attnroute.executors.protocol import Executor, Inputs, Output, Plan
from attnroute.masks.lowered.form import as_4d


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the composite; it gives no log-sum-exp."""
    attn = None if inputs.attn is None else as_4d(inputs.attn)
    out, _ = torch._scaled_dot_product_attention_math(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        attn,
        inputs.dropout_p,
        attn is None and inputs.mask.band_hi is not None,
        scale=inputs.scale,
        enable_gqa=bool(inputs.query.shape[1] != inputs.key.shape[1]),
    )
    return out, None


executor = Executor(run)
