"""Small random inputs and comparisons for the tests of `attention()` at its edges."""

from __future__ import annotations

import torch
from support.reference import TOLERANCE, error

CPU_BACKENDS = ("flash", "chunked", "math")


WITH_LSE = ("flash", "chunked")


def normal(batch=2, heads=4, heads_kv=2, seqlen_q=6, seqlen_kv=9, head_dim=8, dtype=torch.float32):
    return (
        torch.randn(batch, heads, seqlen_q, head_dim, dtype=dtype),
        torch.randn(batch, heads_kv, seqlen_kv, head_dim, dtype=dtype),
        torch.randn(batch, heads_kv, seqlen_kv, head_dim, dtype=dtype),
    )


def close(got, want, dtype=torch.float32, floor=0.1):
    assert got.shape == want.shape
    assert error(got, want, floor) <= TOLERANCE[dtype]


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def doubles(**sizes):
    return normal(
        **{"seqlen_q": 3, "seqlen_kv": 4, "heads": 2, "heads_kv": 1, "head_dim": 4, **sizes},
        dtype=torch.float64,
    )
