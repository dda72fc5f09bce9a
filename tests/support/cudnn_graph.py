"""cuDNN's attention graph in float64, as its frontends set it up: what two executors' fake packages run.

What the real one leaves undefined is NaN here: rows with no key, the log-sum-exp of such rows, and in ragged
batches the gradients of tokens that take part in nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from support.reference import attend


@dataclass
class Graph:
    """The graph's attributes.

    Attributes:
        scale: Factor on QK^T.
        left: Keys before the diagonal with the diagonal's own, at least 1; None = all.
        right: Keys after it; None = all.
        bottom_right: The diagonal ends with the last query and key.
        sink: (num_heads_q,) or None.
    """

    scale: float
    left: int | None
    right: int | None
    bottom_right: bool
    sink: torch.Tensor | None = None

    def __post_init__(self):
        assert self.left is None or self.left >= 1, "left bound must be positive"
        assert self.right is None or self.right >= 0, "right bound must not be negative"

    def allowed(self, seqlen_q, seqlen_kv):
        offset = seqlen_kv - seqlen_q if self.bottom_right else 0
        distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] - offset
        allowed = torch.ones_like(distance, dtype=torch.bool)
        allowed = allowed if self.left is None else allowed & (distance > -self.left)
        return allowed if self.right is None else allowed & (distance <= self.right)

    def forward(self, query, key, value):
        """Return output and log-sum-exp (batch, num_heads_q, seqlen_q); heads stand before tokens."""
        allowed = self.allowed(query.shape[2], key.shape[2])
        out, lse = attend(query, key, value, allowed=allowed, scale=self.scale, sink=self.sink)
        empty = ~allowed.any(-1)
        return out.masked_fill(empty[:, None], math.nan).to(query.dtype), lse.masked_fill(
            empty, math.nan
        ).float()

    def backward(self, query, key, value, out, lse, grad_out):
        """Return the gradients from nothing but what is given; the weights are exp(scores - lse)."""
        allowed, group = self.allowed(query.shape[2], key.shape[2]), query.shape[1] // key.shape[1]
        assert not (lse == -math.inf).any(), "-inf - -inf is NaN"
        q, k, v, out, grad = (t.double() for t in (query, key, value, out, grad_out))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~allowed, -math.inf)
        weights = torch.exp(scores - lse.double()[..., None])
        grad_scores = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
        found = (
            grad_scores @ k * self.scale,
            (grad_scores.transpose(-1, -2) @ q * self.scale).unflatten(1, (-1, group)).sum(2),
            (weights.transpose(-1, -2) @ grad).unflatten(1, (-1, group)).sum(2),
        )
        return tuple(t.to(query.dtype) for t in found)


def sequences(lengths_q, lengths_kv, starts_q, starts_kv):
    """Return the slices of queries and keys of each sequence."""
    for (start_q, length_q), (start_kv, length_kv) in zip(
        zip(starts_q, lengths_q, strict=True), zip(starts_kv, lengths_kv, strict=True), strict=True
    ):
        yield slice(start_q, start_q + length_q), slice(start_kv, start_kv + length_kv)


def lengths_of(sums):
    return [b - a for a, b in pairwise(sums.tolist())]


def ragged_forward(graph, query, key, value, cuts):
    """Return output (total, num_heads_q, head_dim_v) and log-sum-exp (total, num_heads_q)."""
    out = query.new_full((*query.shape[:2], value.shape[2]), math.nan)
    lse = torch.full(query.shape[:2], math.nan)
    for rows, keys in cuts:
        if rows.start < rows.stop and keys.start < keys.stop:
            one = (t.transpose(0, 1)[None] for t in (query[rows], key[keys], value[keys]))
            part, part_lse = graph.forward(*one)
            out[rows], lse[rows] = part[0].transpose(0, 1), part_lse[0].T
    return out, lse


def ragged_backward(graph, tensors, lse, cuts):
    """Return gradients of query, key and value; tensors are (query, key, value, out, grad_out)."""
    grads = [torch.full_like(t, math.nan) for t in tensors[:3]]
    for rows, keys in cuts:
        if rows.start < rows.stop and keys.start < keys.stop:
            query, key, value, out, grad_out = (
                t[keys if n in (1, 2) else rows].transpose(0, 1)[None] for n, t in enumerate(tensors)
            )
            part = graph.backward(query, key, value, out, lse[rows].T[None], grad_out)
            for grad, place, found in zip(grads, (rows, keys, keys), part, strict=True):
                grad[place] = found[0].transpose(0, 1)
    return tuple(grads)


def per_token(lse, lengths_q):
    """Return (total, num_heads) of (sequences, num_heads, longest sequence)."""
    return torch.cat([lse[n, :, :length].T for n, length in enumerate(lengths_q)])


def padded(lse, lengths_q, longest):
    """Undo `per_token`, NaN where a sequence has no such query."""
    rows = torch.full((len(lengths_q), lse.shape[1], longest), math.nan)
    for n, part in enumerate(lse.split(lengths_q)):
        rows[n, :, : part.shape[0]] = part.T
    return rows
