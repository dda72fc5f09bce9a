"""Facts about scales, biases, rows without keys, log-sum-exps and very negative scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from facts_common import (
    DEVICE,
    Fact,
    Kernel,
    band,
    bias_of,
    compare,
    cudnn,
    efficient,
    error,
    flash,
    inputs,
    negative_inputs,
    reference,
)

KERNELS: dict[str, Kernel] = {"flash": flash, "cudnn": cudnn, "efficient": efficient}


def scaled(kernel: Kernel, scale: float, is_causal: bool) -> dict[str, Any]:
    """Hold a zero, negative or large scale, with and without `is_causal`, against float64."""
    tensors = inputs()
    out, _ = kernel(*tensors, is_causal=is_causal, scale=scale)
    return compare(out, tensors, allowed=band(128, 128, None, 0) if is_causal else None, scale=scale)


def empty_rows(kernel: Kernel, seqlen_q: int, seqlen_kv: int) -> dict[str, Any]:
    """Give a bias of 0 and -inf in which some queries have no key: what comes back there and around."""
    tensors = inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    allowed = torch.rand(2, 1, seqlen_q, seqlen_kv, device=DEVICE) > 0.5
    allowed[:, :, 3] = False
    allowed[:, :, 40:70] = False
    bias = bias_of(allowed)
    if kernel is efficient:
        bias = bias.expand(2, 4, seqlen_q, seqlen_kv)
    out, lse = kernel(*tensors, bias=bias)
    empty = ~allowed.any(-1).expand(2, 4, seqlen_q)
    lse_there = lse.reshape(2, 4, -1)[:, :, :seqlen_q][empty]
    return {
        "empty_max": out[empty].abs().max().item(),
        "lse_shape": list(lse.shape),
        "lse_empty": str(lse_there[:2].tolist()),
        **compare(out.masked_fill(empty[..., None], 0.0), tensors, allowed=allowed),
    }


def efficient_lse() -> dict[str, Any]:
    """Hold the log-sum-exp of the memory-efficient operator, whose length is padded, against float64."""
    tensors = inputs(seqlen_q=100, seqlen_kv=100)
    out, lse = efficient(*tensors, is_causal=True)
    found = compare(out, tensors, lse=lse[..., :100], allowed=band(100, 100, None, 0))
    return {"shape": list(lse.shape), **found}


def cudnn_lse() -> dict[str, Any]:
    """Hold the log-sum-exp of the cuDNN operator, with grouped heads, against float64."""
    tensors = inputs(heads_kv=2, seqlen_q=100, seqlen_kv=100)
    out, lse = cudnn(*tensors, is_causal=True)
    found = compare(out, tensors, lse=lse, allowed=band(100, 100, None, 0))
    return {"shape": list(lse.shape), "dtype": str(lse.dtype), **found}


def cudnn_bias_and_causal() -> dict[str, Any]:
    """Give the cuDNN operator a bias and `is_causal` together."""
    tensors = inputs()
    bias = torch.randn(128, 128, device=DEVICE, dtype=torch.bfloat16)
    out, _ = cudnn(*tensors, bias=bias[None, None], is_causal=True)
    return compare(out, tensors, allowed=band(128, 128, None, 0), bias=bias)


def cudnn_bias_shape(shape: tuple[int, ...]) -> dict[str, Any]:
    """Give the cuDNN operator a bias that it has to broadcast."""
    tensors = inputs(heads_kv=2)
    bias = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    out, _ = cudnn(*tensors, bias=bias)
    return compare(out, tensors, bias=bias)


def efficient_shared_heads(seqlen_kv: int) -> float | str:
    """Give one query, a bias and eight key/value heads that are one in memory (pytorch#191937)."""
    query = torch.randn(1, 8, 1, 512, device=DEVICE, dtype=torch.bfloat16)
    key = torch.randn(1, 1, seqlen_kv, 512, device=DEVICE, dtype=torch.bfloat16)
    value = torch.randn_like(key)
    allowed = torch.rand(1, 1, 1, seqlen_kv, device=DEVICE) > 0.2
    shared = (t.expand(1, 8, seqlen_kv, 512) for t in (key, value))
    out, _ = efficient(query, *shared, bias=bias_of(allowed).expand(1, 8, 1, seqlen_kv))
    return error(out, reference((query, key, value), allowed=allowed)[0])


def negative_scores(kernel: Kernel, heads: int, seqlen_q: int, seqlen_kv: int) -> dict[str, Any]:
    """Train with every score near -120: cuDNN's gradients can be NaN there (pytorch#196678)."""
    tensors = negative_inputs(heads, seqlen_q, seqlen_kv)
    return compare(kernel(*tensors)[0], tensors, cancels=True)


FACTS: dict[str, Fact] = {
    **{
        f"scale {name} {scale} causal={causal}": partial(scaled, kernel, scale, causal)
        for name, kernel in KERNELS.items()
        for scale in (0.0, -0.3, 5.0)
        for causal in (True, False)
    },
    **{
        f"empty rows {name} {seqlen_q}x{seqlen_kv}": partial(empty_rows, KERNELS[name], seqlen_q, seqlen_kv)
        for name in ("cudnn", "efficient")
        for seqlen_q, seqlen_kv in ((128, 128), (130, 200), (64, 1000))
    },
    "efficient lse shape/values": efficient_lse,
    "cudnn lse": cudnn_lse,
    "cudnn bias+is_causal both": cudnn_bias_and_causal,
    **{
        f"cudnn bias shape {shape}": partial(cudnn_bias_shape, shape)
        for shape in ((128, 128), (1, 1, 128, 128), (2, 1, 1, 128), (2, 4, 128, 128), (1, 4, 128, 128))
    },
    **{
        f"eff stride0 Sq=1 Skv={length} D512": partial(efficient_shared_heads, length)
        for length in (97, 96, 33)
    },
    **{
        f"neg {name} {length}": partial(negative_scores, kernel, 1, length, length)
        for name, kernel in KERNELS.items()
        for length in (192, 704, 768)
    },
    "cudnn sq1 train neg (#1072)": partial(negative_scores, cudnn, 2, 1, 192),
}
