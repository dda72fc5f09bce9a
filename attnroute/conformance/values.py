"""Fills the tensors of a call with values at which kernels go wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnroute.conformance.trials import Values
from attnroute.masks import KeyPadding
from attnroute.masks.objects.base import Mask

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.tuning.remake import Problem

_SHARP: Final = 16.0
"""Scores of normal numbers are normal numbers; so they reach some tens."""
_LOW: Final = 4.0
"""Every query is raised and every key lowered by so much: scores are about -128 at a head_dim of 64."""
_EVERY: Final = 3


def fill(problem: Problem, values: Values) -> None:
    """Change the values of query, key and value where they lie."""
    query, key, value = (stored(t.detach()) for t in problem.given[:3])
    tokens = 0 if problem.given.layout == "thd" else 1 if problem.given.layout == "bshd" else 2
    if values == "sharp":
        query.copy_(query.float() * _SHARP)
    elif values == "low":
        query.copy_(query.float() + _LOW)
        key.copy_(key.float() - _LOW)
    elif values == "equal" and key.shape[tokens]:
        key.copy_(key.narrow(tokens, 0, 1).clone())
    elif values == "zeros":
        for tensor in (query, key, value):
            _every(tensor, tokens).zero_()


def _every(tensor: Tensor, dim: int) -> Tensor:
    """Return every third row, a view."""
    return tensor[(slice(None),) * dim + (slice(None, None, _EVERY),)]


def stored(tensor: Tensor) -> Tensor:
    """Return what of a tensor has memory of its own: expanded heads are one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def spoil(problem: Problem, call: Call) -> None:
    """Put NaN and infinities into the keys and values that padding leaves out."""
    found = _left_out(problem, call)
    if found is None:
        return
    garbage = (math.nan, math.inf)
    for tensor, number in zip((problem.given.key, problem.given.value), garbage, strict=True):
        heads = 2 if problem.given.layout == "bshd" else 1
        where = found.unsqueeze(heads)[..., None]
        place = stored(tensor.detach())
        place.masked_fill_(where.expand_as(place), number)


def _left_out(problem: Problem, call: Call) -> Tensor | None:
    """Return which keys padding leaves out that may hold anything, (batch, seqlen_kv); None without any."""
    mask = problem.given.mask
    parts = [p for p in mask.nodes if isinstance(p, KeyPadding)] if isinstance(mask, Mask) else []
    parts = [part for part in parts if not part.finite]
    if not parts:
        return None
    device = problem.given.query.device
    kept = torch.ones(call.batch, call.seqlen_kv, dtype=torch.bool, device=device)
    for part in parts:
        made = part.materialize(1, call.seqlen_kv, batch=call.batch, num_heads_q=1, device=device)
        kept &= made.expand(call.batch, 1, 1, call.seqlen_kv)[:, 0, 0]
    return ~kept
