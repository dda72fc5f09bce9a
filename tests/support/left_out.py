"""Calls whose padding holds garbage, in every memory layout, against clean keys in float64."""

from __future__ import annotations

import torch
from support.reference import attend, error

import attnroute
from attnroute import masks

BATCH, HEADS, HEADS_KV, LENGTH, HEAD_DIM = 4, 4, 2, 37, 16
COUNTS = torch.tensor([20, 37, 5, 0])
TOKENS = torch.arange(LENGTH)[None]
RIGHT = COUNTS[:, None] > TOKENS
LEFT = LENGTH - COUNTS[:, None] <= TOKENS


def _cache(tensor):
    """Return the start of a longer buffer, as a static cache gives it."""
    return torch.cat([tensor, torch.full_like(tensor, float("nan"))], 2)[:, :, : tensor.shape[2]]


MEMORY = {
    "packed": lambda t: t.clone(),
    "tokens outermost": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "static cache": _cache,
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "between words": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "rows that end between words": lambda t: torch.cat([t, t[..., :1]], -1)[..., :-1],
    "expanded": lambda t: t[:, :1].clone().expand(t.shape),
}
"""How keys and values lie; the last one holds other numbers than given."""


def inputs_of(memory, garbage, keep, dtype=torch.float32, head_dim=HEAD_DIM, queries=LENGTH):
    """Return query, key and value, in which the keys that do not exist hold garbage."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, queries, head_dim), *[(BATCH, HEADS_KV, LENGTH, head_dim)] * 2]
    made = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    query, key, value = (t.to(keep.device, dtype) for t in made)
    spoilt = [t.masked_fill(~keep[:, None, :, None], garbage) for t in (key, value)]
    return query, *(MEMORY[memory](t) for t in spoilt)


def hold(inputs, mask, keep, causal, tolerance, *, train=True, **given):
    """Compare output and gradients with those of clean keys in float64."""
    inputs = [t.requires_grad_(train) for t in inputs]
    clean = [t.detach().double().nan_to_num(0, 0, 0).requires_grad_(train) for t in inputs]
    allowed = keep[:, None, None]
    if causal:
        allowed = allowed & torch.ones_like(keep[0], dtype=torch.bool).expand(LENGTH, LENGTH).tril()
    known = {k: v for k, v in given.items() if k in ("softcap", "sink", "bias")}
    want, _ = attend(*clean, allowed=allowed, **known)
    got = attnroute.attention(*inputs, mask & masks.Causal() if causal else mask, **given)
    assert error(got, want) <= tolerance
    if not train:
        return
    cotangent = torch.randn_like(want)
    grads = torch.autograd.grad(got, inputs, cotangent.to(got.dtype))
    wanted = torch.autograd.grad(want, clean, cotangent.to(got.dtype).double())
    for grad, true in zip(grads, wanted, strict=True):
        assert error(grad, true, floor=1.0) <= 2 * tolerance
    for grad in grads[1:]:
        assert grad.masked_select(~keep[:, None, :, None]).eq(0).all()
