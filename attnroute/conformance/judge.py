"""Says whether what a kernel gave is right: within its roundings of what float64 gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from attnroute.tuning import gate
from attnroute.tuning.reference import attend

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.tuning.remake import Problem

_SLACK: Final = 4.0
"""How many times the error that the rounding of an output brings about is still right."""
_MOST_NUMBERS: Final = 2**27
"""Elements of a tensor that are looked at; larger ones count as normal numbers."""
_MOST_SCORES: Final = 2**24
"""Scores up to which that is worked out."""


def wrong(problem: Problem, call: Call, got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """Return what is wrong, as a clause with the error; "" where nothing is."""
    sizes = gate.Sizes(*(_size(tensor) for tensor in problem.given[:3]))
    said = gate.wrong(got, want, call, sizes)
    scores = call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
    if not said or "gradient" not in said or scores > _MOST_SCORES:
        return said
    return gate.wrong(got, want, call, sizes, _of_rounding(problem, call, want))


def _size(tensor: Tensor) -> float:
    """Return the root mean square of what is finite."""
    if not 0 < tensor.numel() <= _MOST_NUMBERS:
        return 1.0
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _of_rounding(problem: Problem, call: Call, want: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of the gradients of query and key that every fused kernel has.

    A kernel makes the gradient of the scores as P * (dP - sum(dO * O)) from an output that was rounded to the
    dtype. Where dP and the sum nearly cancel, as with one key or with sharp weights, what the rounding adds,
    P times a number for each query, is most of what is left. P @ K and (P * number).T @ Q are attention over
    keys in place of values, and its gradient.
    """
    if not {"query", "key"} <= want.keys():
        return {}
    wide = gate.widened(problem, torch.float64).given
    rounded = want["output"].to(getattr(torch, call.dtype)).double()
    shift = ((rounded - want["output"]) * problem.grad.double()).sum(-1, keepdim=True)
    scale = call.head_dim_qk**-0.5 if wide.scale is None else wide.scale
    keys = wide.key.detach().requires_grad_()
    given = wide._replace(
        query=wide.query.detach(),
        key=keys.detach(),
        value=keys,
        return_lse=False,
    )
    given = given._replace(bias=given.bias.detach() if isinstance(given.bias, Tensor) else given.bias)
    mixed = cast("Tensor", attend(**given._asdict()))
    (of_key,) = torch.autograd.grad(mixed, keys, shift * given.query)
    errors = {"query": scale * shift * mixed.detach(), "key": scale * of_key}
    return {n: _SLACK * gate.error(want[n].double() + e, want[n].double(), 0.0) for n, e in errors.items()}
