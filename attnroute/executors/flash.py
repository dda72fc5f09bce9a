"""FLASH: torch's built-in FlashAttention-2 on CUDA, and torch's flash kernel on the CPU.

Seen on an H100 with torch 2.11 (benchmarks/results/h100-torch2.11-kernel-facts.json): the CUDA kernel aligns
causal
masks at the bottom right, takes windows and ragged batches, gives zeros for rows with no key and says +inf
for their log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnroute.executors._inputs import Inputs, Output, Plan
from attnroute.executors._repairs import empty_rows
from attnroute.masks.tensors import as_4d


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator that fits the device and the mask."""
    if plan.device_type == "cpu":
        return _cpu(inputs, plan)
    if "to_varlen" in plan.repairs:
        out, lse = _varlen(inputs)
    elif _is_plain(inputs):
        causal = inputs.mask.band_hi is not None
        out, lse, *_ = torch._scaled_dot_product_flash_attention(  # type: ignore[attr-defined]
            inputs.query, inputs.key, inputs.value, inputs.dropout_p, causal, False, scale=inputs.scale
        )
    else:
        out, lse = _window(inputs)
    return out, lse.masked_fill(lse == math.inf, -math.inf) if plan.return_lse else None


def _cpu(inputs: Inputs, plan: Plan) -> Output:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.dropout_p,
        inputs.attn is None and inputs.mask.band_hi is not None,
        attn_mask=None if inputs.attn is None else as_4d(inputs.attn),
        scale=inputs.scale,
    )
    if not plan.return_lse:
        return out, None
    # The CPU kernel says 0 for rows with no key.
    return out, lse if inputs.attn is None else lse.masked_fill(empty_rows(inputs.attn), -math.inf)


def _is_plain(inputs: Inputs) -> bool:
    offset = inputs.key.shape[2] - inputs.query.shape[2]
    return inputs.mask.band_lo is None and inputs.mask.band_hi in (None, offset)


def _window_sizes(inputs: Inputs, offset: int) -> tuple[int | None, int | None]:
    """The band as counts of keys to each side of the bottom-right diagonal; None is open."""
    low, high = inputs.mask.band_lo, inputs.mask.band_hi
    return (None if low is None else offset - low), (None if high is None else high - offset)


def _window(inputs: Inputs) -> tuple[Tensor, Tensor]:
    query, key, value = (t.transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
    left, right = _window_sizes(inputs, key.shape[1] - query.shape[1])
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
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
    return out.transpose(1, 2), lse


def _varlen(inputs: Inputs) -> tuple[Tensor, Tensor]:
    batch, heads, seqlen, _ = inputs.query.shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (inputs.query, inputs.key, inputs.value))
    left, right = _window_sizes(inputs, 0)
    sums, longest = _cu_seqlens(inputs, batch, seqlen), inputs.mask.max_seqlen
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        sums,
        sums,
        longest,
        longest,
        inputs.dropout_p,
        False,
        False,
        scale=inputs.scale,
        window_size_left=left,
        window_size_right=right,
    )
    out = out.unflatten(0, (batch, seqlen)).transpose(1, 2)
    return out, lse.unflatten(1, (batch, seqlen)).transpose(0, 1)[:, :heads]


def _cu_seqlens(inputs: Inputs, batch: int, seqlen: int) -> Tensor:
    """Every batch row has the same documents: their prefix sums follow each other."""
    sums = inputs.mask.cu_seqlens
    if sums is None:
        msg = "to_varlen requires documents given by lengths or cu_seqlens; the decision promised them."
        raise ValueError(msg)
    if batch == 1:
        return sums
    starts = torch.arange(batch, dtype=sums.dtype, device=sums.device)[:, None] * seqlen
    return torch.cat([sums[:1], (sums[1:] + starts).flatten()])
