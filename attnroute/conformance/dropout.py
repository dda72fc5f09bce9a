"""Holds calls with dropout against float64: what a kernel dropped is read off the kernel itself.

With one seed a kernel drops the same weights in each call. From values that are rows of the identity its
output is the weights themselves, so those that are 0 were dropped, and attention without them is what is true
of the output and of every gradient. Where the weights are too many for that, gradients are held against
differences of outputs of the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnroute.conformance import judge
from attnroute.conformance.values import stored
from attnroute.tuning import gate
from attnroute.tuning.reference import attend

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.tuning.remake import Problem

Run = Callable[[float], dict[str, Tensor]]
"""Runs the kernel on what the tensors hold now, with a probability of dropout."""
_MOST_WEIGHTS: Final = 2**27
_MOST_RUNS: Final = 32
"""A run reads as many keys as a value has features."""
_STEPS: Final = 1 / 200
"""How far the share that is dropped may be off: kernels keep the probability in 8 bits."""
_SIGMAS: Final = 6.0
_MOVED: Final = 0.05
"""The share of a tensor by which it is moved to see what its gradient says."""
_APART: Final = 0.05
"""How far both may be apart: a mask that differs in one of two places moves a gradient by more."""


def wrong(problem: Problem, call: Call, run: Run, got: dict[str, Tensor]) -> str:
    """Return what is wrong, as a clause; "" where nothing is.

    Args:
        problem: The call's tensors; after the return they hold what they held.
        call: The call.
        run: Runs its kernel, each time with the same seed.
        got: What that gave.
    """
    if not is_readable(call):
        return _beside_itself(problem, call, run, got)
    there, kept = (_weights(problem, call, run, p) for p in (0.0, call.dropout_p))
    kept &= there
    count = max(1, int(there.sum()))
    share = 1 - int(kept.sum()) / count
    allowed = _STEPS + _SIGMAS * math.sqrt(call.dropout_p * (1 - call.dropout_p) / count)
    if abs(share - call.dropout_p) > allowed:
        return f"the share of dropped weights requires {call.dropout_p:g}; got {share:.3g}"
    wide = gate.widened(problem, torch.float64)
    want = gate.run(wide, None, partial(attend, kept=kept), dropout_p=call.dropout_p)
    return judge.wrong(problem, call, got, want, kept)


def is_readable(call: Call) -> bool:
    """Return whether the weights of a call are few enough to be read off its kernel."""
    weights = call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
    return weights <= _MOST_WEIGHTS and call.seqlen_kv <= _MOST_RUNS * call.head_dim_v


def _weights(problem: Problem, call: Call, run: Run, dropout_p: float) -> Tensor:
    """Return which weights are not 0, (batch, num_heads_q, seqlen_q, seqlen_kv)."""
    value, width, parts = problem.given.value, call.head_dim_v, []
    for first in range(0, call.seqlen_kv, width):
        last = min(first + width, call.seqlen_kv)
        rows = torch.zeros(call.seqlen_kv, width, dtype=value.dtype, device=value.device)
        rows[first:last, : last - first] = torch.eye(last - first, dtype=value.dtype, device=value.device)
        with _holding(value, rows.unsqueeze(-2) if call.layout != "bhsd" else rows):
            out = _heads_first(run(dropout_p)["output"], call)
        parts.append(out[..., : last - first] != 0)
    return torch.cat(parts, -1)


@contextmanager
def _holding(tensor: Tensor, values: Tensor) -> Iterator[None]:
    """Let a tensor hold other values inside of the block, where it lies."""
    place = stored(tensor.detach())
    before = place.clone()
    place.copy_(values.expand(tensor.shape)[tuple(slice(0, n) for n in place.shape)])
    try:
        yield
    finally:
        place.copy_(before)


def _heads_first(tensor: Tensor, call: Call) -> Tensor:
    if call.layout == "thd":
        return tensor.transpose(0, 1)[None]
    return tensor.transpose(1, 2) if call.layout == "bshd" else tensor


def _beside_itself(problem: Problem, call: Call, run: Run, got: dict[str, Tensor]) -> str:
    """Hold gradients against differences of outputs, for each batch row and key/value head."""
    value = problem.given.value
    with _holding(value, torch.ones_like(value)):
        mean = float(run(call.dropout_p)["output"].double().mean())
    if abs(mean - 1) > 2 * _STEPS:
        return f"the mean weight requires 1; got {mean:.3g}"
    for name in ("query", "key", "value"):
        if name in got and (apart := _apart(problem, call, run, name, got[name])) > _APART:
            return (
                f"the gradient of {name} and differences of outputs require the same; got {apart:.2g} apart"
            )
    return ""


def _apart(problem: Problem, call: Call, run: Run, name: str, grad: Tensor) -> float:
    """Return how far what a gradient says of a small change is from what the change does."""
    leaf: Tensor = getattr(problem.given, name)
    size = float(leaf.detach().double().square().mean().sqrt())
    most = max(float(grad.double().square().mean().sqrt()), 1e-30)
    did = torch.zeros(1, dtype=torch.float64, device=grad.device)
    said = did.clone()
    for sign in (1, -1):
        moved = (leaf.detach().float() + grad.float() * (sign * _MOVED * size / most)).to(leaf.dtype)
        with _holding(leaf, moved):
            out = run(call.dropout_p)["output"]
        did = did + sign * _of_heads(out.float() * problem.grad.float(), call)
        said = said + sign * _of_heads(moved.float() * grad.float(), call)
    return float(((did - said).abs() / said.abs().clamp_min(1e-30)).max())


def _of_heads(products: Tensor, call: Call) -> Tensor:
    """Return sums over what belongs to one batch row and key/value head."""
    first = _heads_first(products, call)
    return first.double().reshape(call.batch, call.num_heads_kv, -1).sum(-1)
