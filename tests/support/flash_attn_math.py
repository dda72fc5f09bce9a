"""The mathematics of the flash-attention packages in float64, as their kernels read their arguments.

Tensors are (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim). What the real kernels do not
write is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from support.cuda_operators import weights_kept


@dataclass
class Attention:
    """What one call asks, windows counted from the bottom right.

    Attributes:
        scale: Factor on QK^T.
        left: Keys before the diagonal; negative = all.
        right: Keys after it; negative = all.
        softcap: 0.0 = off.
        slopes: ALiBi, (num_heads,) or (batch, num_heads), or None.
        dropout: Probability and state.
        empty: The log-sum-exp of a row with no key.
    """

    scale: float
    left: int
    right: int
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    dropout: tuple = (0.0, (0,))
    empty: float = math.inf

    def allowed(self, seqlen_q, seqlen_kv):
        distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] - (seqlen_kv - seqlen_q)
        allowed = torch.ones_like(distance, dtype=torch.bool)
        allowed = allowed if self.left < 0 else allowed & (distance >= -self.left)
        return allowed if self.right < 0 else allowed & (distance <= self.right)

    def scores(self, query, key):
        """Return the scores with what is hidden at -inf, and the derivative of the softcap."""
        seqlen_q, seqlen_kv = query.shape[2], key.shape[2]
        scores = query @ key.transpose(-1, -2) * self.scale
        slope = torch.ones_like(scores)
        if self.softcap:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = capped * self.softcap, 1 - capped**2
        if self.slopes is not None:
            columns = torch.arange(seqlen_kv)
            rows = torch.arange(seqlen_q)[:, None] + seqlen_kv - seqlen_q
            is_causal = self.left < 0 and self.right == 0
            term = columns.expand(seqlen_q, -1) if is_causal else -(rows - columns).abs()
            scores = scores + self.slopes.double().reshape(-1, query.shape[1], 1, 1) * term
        return scores.masked_fill(~self.allowed(seqlen_q, seqlen_kv), -math.inf), slope

    def forward(self, query, key, value):
        """Return output and log-sum-exp (batch, num_heads, seqlen_q) of padded tensors."""
        query, key, value = (_heads_first(t, query.shape[2]) for t in (query, key, value))
        scores, _ = self.scores(query, key)
        lse = (
            torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:3], -math.inf)
        )
        weights = torch.exp(scores - torch.where(lse == -math.inf, math.inf, lse)[..., None])
        weights = weights * weights_kept(weights.shape, *self._dropped())
        return (weights @ value).transpose(1, 2), torch.where(lse == -math.inf, self.empty, lse).float()

    def backward(self, query, key, value, out, lse, grad_out):
        """Return the gradients from nothing but what is given; the weights are exp(scores - lse)."""
        heads, group = query.shape[2], query.shape[2] // key.shape[2]
        query, key, value, out, grad = (_heads_first(t, heads) for t in (query, key, value, out, grad_out))
        scores, slope = self.scores(query, key)
        # As scale_apply_exp2: a log-sum-exp of -inf counts as 0.
        weights = torch.exp(scores - lse.double().masked_fill(lse == -math.inf, 0.0)[..., None])
        kept = weights_kept(weights.shape, *self._dropped())
        grad_scores = weights * (grad @ value.transpose(-1, -2) * kept - (grad * out).sum(-1, keepdim=True))
        grad_scores = grad_scores * slope * self.scale
        found = (
            grad_scores @ key,
            (grad_scores.transpose(-1, -2) @ query).unflatten(1, (-1, group)).sum(2),
            ((weights * kept).transpose(-1, -2) @ grad).unflatten(1, (-1, group)).sum(2),
        )
        return tuple(t.transpose(1, 2) for t in found)

    def of_sequence(self, n):
        """Return the attention of one sequence of a ragged batch, whose slopes may be its own."""
        if self.slopes is None or self.slopes.dim() == 1:
            return self
        return replace(self, slopes=self.slopes[n])

    def _dropped(self):
        probability, state = self.dropout
        return probability, state[0]


def _heads_first(tensor, heads):
    tensor = tensor.double().transpose(1, 2)
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def cuts_of(sums_q, sums_kv, used=None):
    """Return the slices of queries and keys of each sequence."""
    queries, keys = (list(pairwise(s.tolist())) for s in (sums_q, sums_kv))
    if used is not None:
        keys = [(start, start + n) for (start, _), n in zip(keys, used.tolist(), strict=True)]
    return [(slice(*a), slice(*b)) for a, b in zip(queries, keys, strict=True)]


def ragged_forward(attention, tensors, cuts):
    """Return output (total, num_heads, head_dim_v) and log-sum-exp (num_heads, total)."""
    query, key, value = tensors
    out = torch.full((*query.shape[:2], value.shape[2]), math.nan, dtype=torch.float64)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan)
    for n, (rows, keys) in enumerate(cuts):
        part, part_lse = attention.of_sequence(n).forward(
            query[None, rows], key[None, keys], value[None, keys]
        )
        out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def ragged_backward(attention, tensors, out, lse, grad_out, cuts):
    """Return the gradients of query, key and value."""
    query, key, value = tensors
    grads = [torch.full(t.shape, math.nan, dtype=torch.float64) for t in tensors]
    for n, (rows, keys) in enumerate(cuts):
        read = (query[None, rows], key[None, keys], value[None, keys], out[None, rows])
        part = attention.of_sequence(n).backward(*read, lse[None, :, rows], grad_out[None, rows])
        for grad, place, found in zip(grads, (rows, keys, keys), part, strict=True):
            grad[place] = found[0]
    return grads
