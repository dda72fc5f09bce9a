"""What the kernel facts share: torch's operators, inputs, the float64 reference, the comparison with it."""

# ruff: noqa: SLF001 - torch's names for the operators begin with an underscore.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from common import relative
from torch import Tensor

Fact = Callable[[], Any]
Inputs = tuple[Tensor, Tensor, Tensor]
Outcome = tuple[Tensor, Tensor]
Kernel = Callable[..., Outcome]
DEVICE = "cuda"


def flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any) -> Outcome:
    """Run torch's flash operator and return output and log-sum-exp."""
    operator = torch._scaled_dot_product_flash_attention
    out, lse, *_ = operator(query, key, value, 0.0, is_causal, False, **options)
    return out, lse


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Outcome:
    """Run torch's cuDNN operator and return output and log-sum-exp."""
    operator = torch._scaled_dot_product_cudnn_attention
    out, lse, *_ = operator(query, key, value, bias, True, 0.0, is_causal, False, **options)
    return out, lse


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Outcome:
    """Run torch's memory-efficient operator and return output and log-sum-exp (its length is padded)."""
    operator = torch._scaled_dot_product_efficient_attention
    out, lse, *_ = operator(query, key, value, bias, True, 0.0, is_causal, **options)
    return out, lse


KERNELS: dict[str, Kernel] = {"flash": flash, "cudnn": cudnn, "eff": efficient}
"""The operators by the word that begins a fact's key."""


def lower_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Any) -> Outcome:
    """Run aten::_flash_attention_forward, which takes windows, on inputs of (batch, heads, length, width)."""
    rows = (t.transpose(1, 2) for t in (query, key, value))
    lengths = query.shape[2], key.shape[2]
    operator = torch.ops.aten._flash_attention_forward
    out, lse, *_ = operator(*rows, None, None, *lengths, 0.0, is_causal, False, **options)
    return out.transpose(1, 2), lse


def packed_flash(
    tensors: Inputs, bounds: Tensor, longest: int, *, is_causal: bool, **options: Any
) -> Outcome:
    """Run aten::_flash_attention_forward on packed documents.

    Args:
        tensors: query, key and value with one batch row, (1, heads, total length, width).
        bounds: int32 prefix sums of the document lengths, on the device.
        longest: the longest document.
        is_causal: whether each document is causal.
        options: further arguments of the operator.

    Returns:
        The output, as wide as the query, and the log-sum-exp, (heads, total length).
    """
    rows = (t[0].transpose(0, 1) for t in tensors)
    operator = torch.ops.aten._flash_attention_forward
    out, lse, *_ = operator(*rows, bounds, bounds, longest, longest, 0.0, is_causal, False, **options)
    return out.transpose(0, 1)[None], lse


def lower_efficient(tensors: Inputs, *, diagonal: int, window: int | None) -> Outcome:
    """Run aten::_efficient_attention_forward; `diagonal` is its mask type, 1 top left and 2 bottom right."""
    rows = (t.transpose(1, 2) for t in tensors)
    operator = torch.ops.aten._efficient_attention_forward
    out, lse, *_ = operator(*rows, *[None] * 5, 0.0, diagonal, True, window_size=window)
    return out.transpose(1, 2), lse


def inputs(
    *,
    batch: int = 2,
    heads_q: int = 4,
    heads_kv: int = 4,
    seqlen_q: int = 128,
    seqlen_kv: int = 128,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    grad: bool = True,
) -> Inputs:
    """Draw bfloat16 query, key and value, (batch, heads, length, width), from seed 0."""
    torch.manual_seed(0)

    def draw(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(batch, heads, length, width, device=DEVICE).bfloat16().requires_grad_(grad)

    query = draw(heads_q, seqlen_q, head_dim)
    return query, draw(heads_kv, seqlen_kv, head_dim), draw(heads_kv, seqlen_kv, head_dim_v or head_dim)


def negative_inputs(heads: int, seqlen_q: int, seqlen_kv: int) -> Inputs:
    """Draw bfloat16 inputs, one batch row of head_dim 64, whose scores are all near -120."""
    query = torch.zeros(1, heads, seqlen_q, 64, device=DEVICE, dtype=torch.bfloat16)
    key = torch.randn(1, heads, seqlen_kv, 64, device=DEVICE).bfloat16() * 0.1
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    value = torch.randn(1, heads, seqlen_kv, 64, device=DEVICE).bfloat16()
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def band(seqlen_q: int, seqlen_kv: int, low: int | None, high: int | None) -> Tensor:
    """Return who may attend, (seqlen_q, seqlen_kv): key minus query between `low` and `high`, None open."""
    keys = torch.arange(seqlen_kv, device=DEVICE)
    distance = keys[None] - torch.arange(seqlen_q, device=DEVICE)[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        allowed &= distance >= low
    if high is not None:
        allowed &= distance <= high
    return allowed


def bias_of(allowed: Tensor) -> Tensor:
    """Return a bfloat16 bias of 0 and -inf whose rows start at multiples of 16 bytes, as the kernels ask."""
    bias = torch.zeros_like(allowed, dtype=torch.bfloat16).masked_fill(~allowed, -math.inf)
    length = allowed.shape[-1]
    return torch.nn.functional.pad(bias, (0, -length % 8))[..., :length]


def reference(
    tensors: Inputs, *, allowed: Tensor | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Outcome:
    """Return output and log-sum-exp in float64; rows that may attend no key give zeros."""
    query, key, value = (t.double() for t in tensors)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if allowed is None:
        return scores.softmax(-1) @ value, scores.logsumexp(-1)
    # The least finite number and not -inf: an empty row of -inf makes its gradients NaN.
    scores = scores.masked_fill(~allowed, torch.finfo(torch.float64).min)
    return (scores.softmax(-1) * allowed) @ value, scores.logsumexp(-1)


def error(got: Tensor, want: Tensor) -> float | str:
    """Return ``|got - want| / |want|``, or how many numbers are not finite."""
    wrong = int((~torch.isfinite(got)).sum())
    return f"nonfinite {wrong}" if wrong else round(relative(got, want), 5)


def compare(
    out: Tensor,
    tensors: Inputs,
    *,
    lse: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    cancels: bool = False,
) -> dict[str, Any]:
    """Hold output and gradients against float64, for a random cotangent.

    Args:
        out: the kernel's output, with its history.
        tensors: query, key and value, which need gradients.
        lse: the kernel's log-sum-exp, where that is looked at too.
        allowed: who may attend; None is everybody.
        bias: what is added to the scores.
        scale: what multiplies the scores; None is head_dim ** -0.5.
        cancels: whether the gradients of query and key are sums of terms that cancel. Their relative errors
            say nothing then, so the largest errors over the size of the terms are added.

    Returns:
        The relative errors of `o`, `dq`, `dk` and `dv`, and what was asked for besides.
    """
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, cotangent)
    query, key, value = (t.detach().double().requires_grad_() for t in tensors)
    want, want_lse = reference((query, key, value), allowed=allowed, bias=bias, scale=scale)
    wants = torch.autograd.grad(want, (query, key, value), cotangent.double())
    found: dict[str, Any] = {"o": error(out, want)}
    for name, got, right in zip(("dq", "dk", "dv"), gradients, wants, strict=True):
        found[name] = error(got, right)
    if cancels:
        largest = (cotangent.double() @ value.mT).abs().max() * query.shape[-1] ** -0.5
        for name, got, right, factor in zip(("dq", "dk"), gradients, wants, (key, query), strict=False):
            worst = (got.double() - right).abs().max() / (largest * factor.abs().max())
            found[f"{name}_over_terms"] = worst.item() if worst.isfinite() else "nonfinite"
    return found if lse is None else found | compare_lse(lse, want_lse, allowed)


def compare_lse(lse: Tensor, want: Tensor, allowed: Tensor | None) -> dict[str, Any]:
    """Return the largest error of the log-sum-exp, and what stands there in rows that may attend no key."""
    lse = lse.reshape(want.shape)
    empty = torch.zeros_like(want, dtype=torch.bool)
    if allowed is not None:
        empty |= ~allowed.any(-1)
    difference = (lse.double() - want)[~empty].abs().max()
    return {"lse": difference.item(), "lse_empty": str(lse[empty][:2].tolist())}


def largest_in_empty_rows(out: Tensor, allowed: Tensor) -> float:
    """Return the largest magnitude in output rows that may attend no key; 0 where there is no such row."""
    rows = out[~allowed.any(-1).expand(out.shape[:-1])]
    return rows.abs().max().item() if rows.numel() else 0.0
