"""CUDNN: torch's cuDNN attention operator."""

from __future__ import annotations

import torch

from attnroute.executors._inputs import Inputs, Output, Plan
from attnroute.masks.tensors import as_4d


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator; its log-sum-exp comes with a last dimension of size 1."""
    attn = None if inputs.attn is None else as_4d(inputs.attn)
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        attn,
        plan.training or plan.return_lse,
        inputs.dropout_p,
        attn is None and inputs.mask.band_hi is not None,
        False,
        scale=inputs.scale,
    )
    return out, lse.squeeze(-1) if plan.return_lse else None
