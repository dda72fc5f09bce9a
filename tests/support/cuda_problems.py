"""Problems for kernels on a CUDA device, padded and ragged, and what their results are held against."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from support.reference import attend, error

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4, torch.float64: 1e-9}


def problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=130,
    seqlen_kv=130,
    head_dim=64,
    head_dim_v=None,
    dtype=torch.bfloat16,
    mean=0.0,
):
    torch.manual_seed(0)

    def make(heads, length, width, shift):
        return (torch.randn(batch, heads, length, width, device="cuda") + shift).to(dtype).requires_grad_()

    return (
        make(heads_q, seqlen_q, head_dim, mean),
        make(heads_kv, seqlen_kv, head_dim, -mean),
        make(heads_kv, seqlen_kv, head_dim_v or head_dim, 0.0),
    )


def band(seqlen_q, seqlen_kv, low, high):
    distance = torch.arange(seqlen_kv, device="cuda")[None] - torch.arange(seqlen_q, device="cuda")[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    allowed = allowed if low is None else allowed & (distance >= low)
    return allowed if high is None else allowed & (distance <= high)


def spoil_memory():
    """Leave NaN in the blocks that the next tensors are cut from, the small ones and the large ones."""
    sizes = [*[2**8] * 512, *[2**13] * 128, *[2**17] * 32, *[2**21] * 8]
    blocks = [torch.full((size,), math.nan, device="cuda") for size in sizes]
    del blocks


def compare_gradients(grads, wanted, empty, tolerance):
    """Hold gradients against float64; where nobody looks they must be zeros, whatever was in the memory."""
    for name, got, true in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        off = error(got, true.double(), floor=2.0)
        assert off <= 2 * tolerance, f"{name}: {off}"
    unseen = (wanted[2] == 0).all(-1)
    for name, got, rows in zip(("dq", "dk", "dv"), grads, (empty, unseen, unseen), strict=True):
        assert (got[rows] == 0).all(), f"{name}: not zero where nobody looks"


def packed(lengths_q, lengths_kv, *, heads=(4, 2), head_dim=64, dtype=torch.bfloat16, train=True):
    torch.manual_seed(0)
    totals = (sum(lengths_q), sum(lengths_kv), sum(lengths_kv))
    return [
        torch.randn(total, h, head_dim, device="cuda").to(dtype).requires_grad_(train)
        for total, h in zip(totals, (heads[0], heads[1], heads[1]), strict=True)
    ]


def sums_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=dtype)


def apart(inputs, lengths_q, lengths_kv, left=None, right=None, alignment="bottom_right"):
    """Return (out, lse) of every sequence by itself, in float64."""
    pieces = (t.split(n) for t, n in zip(inputs, (lengths_q, lengths_kv, lengths_kv), strict=True))
    outs, lses = [], []
    for one in zip(*pieces, strict=True):
        query, key, value = (t.transpose(0, 1)[None] for t in one)
        offset = key.shape[2] - query.shape[2] if alignment == "bottom_right" else 0
        low, high = (None if left is None else offset - left), (None if right is None else offset + right)
        out, lse = attend(query, key, value, allowed=band(query.shape[2], key.shape[2], low, high))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1).detach()
