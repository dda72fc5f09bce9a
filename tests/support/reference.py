"""Attention in float64, written down as the definition: the oracle of every numeric test."""

from __future__ import annotations

import math

import torch

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Largest error relative to the largest true value: a few roundings of the dtype."""


def attend(
    query,
    key,
    value,
    *,
    allowed=None,
    bias=None,
    scale=None,
    softcap=0.0,
    sink=None,
    alibi_slopes=None,
):
    """Return (out, lse) in float64; differentiable in every input that is."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // max(1, key.shape[1])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if alibi_slopes is not None:
        rows = torch.arange(query.shape[2], device=query.device)[:, None] + key.shape[2] - query.shape[2]
        distance = (rows - torch.arange(key.shape[2], device=query.device)).abs()
        scores = scores - alibi_slopes.double().reshape(-1, query.shape[1], 1, 1) * distance
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if sink is not None:
        extra = sink.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], -1)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total > 0, torch.log(total) + top, torch.full_like(total, -math.inf)).squeeze(-1)
    weights = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), torch.zeros_like(weights))
    if sink is not None:
        weights = weights[..., :-1]
    return weights @ value, lse


def error(got, want, floor=0.1):
    """Return the largest difference over the largest true value, at least `floor`; infinity if not finite."""
    if got.numel() == 0:
        return 0.0
    if not torch.isfinite(got).all():
        return math.inf
    size = want.abs().max().item()
    return (got.double() - want).abs().max().item() / max(size, floor)
