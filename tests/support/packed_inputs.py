"""Packed sequences for the tests of layout thd, and the oracle: every sequence alone, in float64."""

from __future__ import annotations

import torch
from support.reference import attend


def packed(
    lengths_q, lengths_kv=None, *, heads=4, heads_kv=2, head_dim=8, head_dim_v=None, dtype=torch.float64
):
    """Return random query, key and value (total, heads, head_dim)."""
    total_q = sum(lengths_q)
    total_kv = total_q if lengths_kv is None else sum(lengths_kv)
    return [
        torch.randn(total_q, heads, head_dim, dtype=dtype),
        torch.randn(total_kv, heads_kv, head_dim, dtype=dtype),
        torch.randn(total_kv, heads_kv, head_dim_v or head_dim, dtype=dtype),
    ]


def sums_of(lengths_q, lengths_kv=None, dtype=torch.int32):
    """Return the prefix sums as arguments."""
    given = {"cu_seqlens_q": lengths_q, "cu_seqlens_kv": lengths_kv}
    return {
        name: torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        for name, lengths in given.items()
        if lengths is not None
    }


def band(seqlen_q, seqlen_kv, is_causal, window, alignment):
    """Return who may attend in one sequence, True = attend."""
    offset = seqlen_kv - seqlen_q if alignment == "bottom_right" else 0
    distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] - offset
    left, right = window or (None, None)
    allowed = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    allowed = allowed if left is None else allowed & (distance >= -left)
    allowed = allowed if right is None else allowed & (distance <= right)
    return allowed & (distance <= 0) if is_causal else allowed


def alone(
    inputs, lengths_q, lengths_kv=None, *, is_causal=False, window=None, causal_alignment="top_left", **scores
):
    """Return (out, lse) of every sequence by itself, in float64; differentiable in every input that is."""
    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    query, key, value = inputs
    outs, lses = [], []
    cut = zip(query.split(lengths_q), key.split(lengths_kv), value.split(lengths_kv), strict=True)
    for one in cut:
        q, k, v = (t.transpose(0, 1)[None] for t in one)
        allowed = band(q.shape[2], k.shape[2], is_causal, window, causal_alignment)
        out, lse = attend(q, k, v, allowed=allowed, **scores)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)
