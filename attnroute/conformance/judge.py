"""Says whether what a kernel gave is right: within its roundings of what float64 gives."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from attnroute.tuning import gate
from attnroute.tuning.reference import attend

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.tuning.remake import Problem

_SLACK: Final = 4.0
"""How many times the error that the roundings of every kernel bring about is still right."""
_MOST_NUMBERS: Final = 2**27
"""Elements of a tensor that are looked at; larger ones count as normal numbers."""
_MOST_SCORES: Final = {"cpu": 2**24, "cuda": 2**28}
"""Scores up to which that is worked out: of all heads, or else of one."""


def wrong(
    problem: Problem,
    call: Call,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    kept: Tensor | None = None,
) -> str:
    """Return what is wrong, as a clause with the error; "" where nothing is.

    Args:
        problem: The call's tensors.
        call: The call.
        got: What a kernel gave.
        want: What is true.
        kept: Which weights dropout left.
    """
    sizes = gate.Sizes(*(_size(tensor) for tensor in problem.given[:3]))
    said = gate.wrong(got, want, call, sizes)
    if not said:
        return ""
    most = _MOST_SCORES[problem.given.query.device.type]
    if call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv > most:
        part = _one_head(problem, call)
        if part is None:
            return said
        problem, call = part
        if call.num_heads_q * call.seqlen_q * call.seqlen_kv > most:
            return said
        true = gate.run(gate.widened(problem, torch.float64), None, attend)
        slack = _of_roundings(problem, call, true, true["output"])
    else:
        slack = _of_roundings(problem, call, want, got["output"], kept)
    return gate.wrong(got, want, call, sizes, slack)


def _one_head(problem: Problem, call: Call) -> tuple[Problem, Call] | None:
    """Return what one key/value head of one batch row computes; None where heads or rows may differ in more.

    A ragged batch stays whole, as its mask says where the sequences are.
    """
    given, group = problem.given, call.num_heads_q // max(1, call.num_heads_kv)
    is_ragged = call.layout == "thd"
    differing = (None if is_ragged else given.mask, given.bias, given.sink, given.alibi_slopes)
    if isinstance(given.mask, Tensor) or any(each is not None for each in differing):
        return None
    heads = 2 if call.layout == "bshd" else 1

    def cut(tensor: Tensor, count: int) -> Tensor:
        row = tensor.detach() if is_ragged else tensor.detach()[:1]
        return row.narrow(heads, 0, count).requires_grad_(tensor.requires_grad)

    query, key, value = cut(given.query, group), cut(given.key, 1), cut(given.value, 1)
    given = given._replace(query=query, key=key, value=value)
    leaves = {name: getattr(given, name) for name in problem.leaves}
    one = call.changed(batch=1, num_heads_q=group, num_heads_kv=1)
    return problem._replace(given=given, leaves=leaves, grad=cut(problem.grad, group)), one


def _of_roundings(
    problem: Problem, call: Call, want: dict[str, Tensor], out: Tensor, kept: Tensor | None = None
) -> dict[str, float]:
    """Return the relative errors that come of roundings which every fused kernel makes.

    Weights and the gradient of the scores are rounded before they are multiplied. Where keys have a mean,
    what the rounding adds to their sum is not small beside what is left of it.

    Args:
        problem: The call's tensors.
        call: The call.
        want: What is true.
        out: The output that the kernel gave, which it may round otherwise than what is true rounds.
        kept: Which weights dropout left.
    """
    dtype = getattr(torch, call.dtype)
    plain = gate.run(
        gate.widened(problem, torch.float64),
        None,
        partial(attend, rounded=dtype, kept=kept),
        dropout_p=call.dropout_p if kept is not None else 0.0,
    )
    sums = [_of_output(problem, call, want, each.to(dtype)) for each in (want["output"], out)]
    errors = {
        n: gate.error(plain[n], want[n].double(), 0.0) + max(each.get(n, 0.0) for each in sums) for n in want
    }
    # Where padding leaves out what is not finite, the definition is not finite either, and excuses nothing.
    return {name: _SLACK * error for name, error in errors.items() if math.isfinite(error)}


def _size(tensor: Tensor) -> float:
    """Return the root mean square of what is finite."""
    if not 0 < tensor.numel() <= _MOST_NUMBERS:
        return 1.0
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _of_output(problem: Problem, call: Call, want: dict[str, Tensor], rounded: Tensor) -> dict[str, float]:
    """Return the relative errors of the gradients of query and key that a rounded output brings.

    A kernel makes the gradient of the scores as P * (dP - sum(dO * O)) from an output that was rounded to the
    dtype. Where dP and the sum nearly cancel, as with one key or with sharp weights, what the rounding adds,
    P times a number for each query, is most of what is left. P @ K and (P * number).T @ Q are attention over
    keys in place of values, and its gradient.
    """
    if not {"query", "key"} <= want.keys():
        return {}
    wide = gate.widened(problem, torch.float64).given
    shift = ((rounded.double() - want["output"]) * problem.grad.double()).sum(-1, keepdim=True)
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
    return {n: gate.error(want[n].double() + e, want[n].double(), 0.0) for n, e in errors.items()}
