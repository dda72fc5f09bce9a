"""EFFICIENT: torch's memory-efficient (CUTLASS) attention operator.

Its log-sum-exp is padded to a multiple of 32 rows and says 0 for rows with no key; bottom-right causal goes
through the
lower operator (seen on an H100 with torch 2.11, benchmarks/results/h100-torch2.11-kernel-facts.json).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from attnroute.executors._inputs import Inputs, Output, Plan
from attnroute.executors._repairs import empty_rows
from attnroute.masks.tensors import as_4d

CAUSAL_BOTTOM_RIGHT: Final = 2
"""`custom_mask_type` of the operator: causal from the bottom-right corner."""


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator that fits the mask."""
    batch, heads, seqlen_q, _ = inputs.query.shape
    seqlen_kv = inputs.key.shape[2]
    attn = None if inputs.attn is None else as_4d(inputs.attn).expand(batch, heads, seqlen_q, seqlen_kv)
    high = inputs.mask.band_hi if attn is None else None
    keep_lse = plan.training or plan.return_lse
    if high is not None and high != 0:
        out, lse = _bottom_right(inputs, keep_lse=keep_lse)
    else:
        out, lse, *_ = torch._scaled_dot_product_efficient_attention(  # type: ignore[attr-defined]
            inputs.query,
            inputs.key,
            inputs.value,
            attn,
            keep_lse,
            inputs.dropout_p,
            high is not None,
            scale=inputs.scale,
        )
    if not plan.return_lse:
        return out, None
    lse = lse[..., :seqlen_q]
    return out, lse if attn is None else lse.masked_fill(empty_rows(attn), -math.inf)


def _bottom_right(inputs: Inputs, *, keep_lse: bool) -> tuple[Tensor, Tensor]:
    query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
    out, lse, *_ = torch.ops.aten._efficient_attention_forward.default(
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
    return out.transpose(1, 2), lse
