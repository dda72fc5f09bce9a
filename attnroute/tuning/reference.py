"""Attention by its definition, which holds all scores: what is true of a call whose tensors are float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnroute.api.intake import take
from attnroute.api.records import Given

if TYPE_CHECKING:
    from attnroute.api.records import Problem


def attend(
    *, kept: Tensor | None = None, rounded: torch.dtype | None = None, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `attention()` returns for the same arguments; each step is a plain operator of torch.

    Args:
        kept: Which weights dropout leaves, (batch, num_heads_q, seqlen_q, seqlen_kv); without it all.
        rounded: A dtype to which weights, output and the gradient of the scores are rounded, as fused kernels
            round them between their products.
        **arguments: Those of `attention()`.
    """
    problem = take(Given(**arguments))
    given, value = problem.given, problem.value
    scores = _scores(problem)
    if given.sink is not None:
        sink = given.sink.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    if rounded is not None and scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(rounded).to(grad.dtype))
    lse = _log_sum_exp(scores)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    weights = weights[..., : value.shape[2]]
    if kept is not None:
        weights = weights * kept / (1 - given.dropout_p)
    if rounded is not None:
        weights = _rounded(weights, rounded)
    mixed = weights @ _shared(problem, value)
    out, lse_given = problem.in_given_layout(mixed if rounded is None else _rounded(mixed, rounded), lse)
    return out if lse_given is None else (out, lse_given)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the values of a dtype, and a gradient as if it had its own."""
    return tensor + (tensor.to(dtype).to(tensor.dtype) - tensor).detach()


def _scores(problem: Problem) -> Tensor:
    """Return all scores in the order of their steps: scale, softcap, bias, mask."""
    given, query = problem.given, problem.query
    scale = query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    scores = (query @ _shared(problem, problem.key).mT) * scale
    if given.softcap:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    if problem.bias is not None:
        scores = scores + problem.bias
    batch, heads, rows, columns = _places(problem)
    if given.alibi_slopes is not None:
        slopes = given.alibi_slopes.reshape(-1, query.shape[1], 1, 1)
        scores = scores - slopes * (rows + columns.shape[-1] - rows.shape[-2] - columns).abs()
    if problem.score_mod is not None:
        scores = problem.score_mod(scores, batch, heads, rows, columns)
    mask = problem.whole_mask
    if mask is None:
        return scores
    allowed = mask.materialize(
        query.shape[2],
        problem.key.shape[2],
        batch=query.shape[0],
        num_heads_q=query.shape[1],
        device=query.device,
    )
    return scores.masked_fill(~allowed, -math.inf)


def _shared(problem: Problem, tensor: Tensor) -> Tensor:
    """Return keys or values for each query head."""
    return tensor.repeat_interleave(problem.query.shape[1] // max(1, tensor.shape[1]), 1)


def _places(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices of batch row, head, query and key, which broadcast to the scores."""
    sizes = (*problem.query.shape[:3], problem.key.shape[2])
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    device = problem.query.device
    batch, heads, rows, columns = (
        torch.arange(size, device=device).reshape(shape) for size, shape in zip(sizes, shapes, strict=True)
    )
    return batch, heads, rows, columns


def _log_sum_exp(scores: Tensor) -> Tensor:
    """Return the log-sum-exp of each query, -inf where it may attend no key."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = torch.exp(scores - top).sum(-1)
    # A row of nothing has no gradient, where that of log(0) would be NaN.
    found = torch.where(total > 0, total, 1.0).log() + top[..., 0]
    return torch.where(total > 0, found, -math.inf)
