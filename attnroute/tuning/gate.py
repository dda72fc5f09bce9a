"""Compares what a backend gives for a call, output and gradients, with attention in a wider dtype."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from attnroute.api.attention import attention
from attnroute.question.nodes import FunctionBias
from attnroute.tuning.reference import attend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnroute.question.call import Call
    from attnroute.tuning.remake import Problem

TOLERANCE: Final = {"float64": 1e-6, "float32": 2e-3, "float16": 0.01, "bfloat16": 0.05}
"""Largest relative error: some roundings of the dtype. A wrong kernel is off by a tenth and more."""
_COARSE: Final = 0.3
"""The same for dtypes of eight bits."""
_FEW_SCORES: Final = {"cpu": 2**23, "cuda": 2**26}
"""Up to so many scores the truth is float64 by the definition, which holds all of them."""
_WIDE: Final = 2**26
"""Up to so many elements are compared in float64."""
_CANCELLED: Final = 0.02
"""A gradient whose terms cancel counts as no smaller than this share of them: they are what is rounded."""


class Sizes(NamedTuple):
    """The root mean squares of inputs; those of normal numbers are 1."""

    query: float = 1.0
    key: float = 1.0
    value: float = 1.0


def run(
    problem: Problem, backend: str | None, way: Callable[..., Any] = attention, *, dropout_p: float = 0.0
) -> dict[str, Tensor]:
    """Return what a backend gives: "output", perhaps "log-sum-exp", and the gradients by their leaves.

    Args:
        problem: The call.
        backend: Who must run it; None = who is chosen.
        way: Makes the call, in place of `attention()`.
        dropout_p: The probability of dropout, whatever the call says: what it drops nobody knows beforehand.
    """
    result = way(**problem.given._replace(backend=backend, dropout_p=dropout_p)._asdict())
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = {"output": out.detach()} | ({} if lse is None else {"log-sum-exp": lse.detach()})
    if problem.leaves:
        grads = torch.autograd.grad(out, list(problem.leaves.values()), problem.grad.to(out.dtype))
        found |= dict(zip(problem.leaves, grads, strict=True))
    return found


def truth(problem: Problem, call: Call) -> dict[str, Tensor]:
    """Return the same in float64 by the definition, or in float32 from "chunked" where the scores are many.

    Raises:
        NoBackendError: The scores are many and chunked may not run the call; the message holds every reason.
    """
    scores = call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
    if scores <= _FEW_SCORES[problem.given.query.device.type]:
        return run(widened(problem, torch.float64), None, attend)
    return run(widened(problem, torch.float64 if call.dtype == "float64" else torch.float32), "chunked")


def widened(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem with its floating point arguments in another dtype, as leaves of their own."""
    wide: dict[str, Any] = {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad)
        for name, value in problem.given._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    given = problem.given._replace(**wide, deterministic=None)
    return problem._replace(given=given, leaves={n: wide.get(n, t) for n, t in problem.leaves.items()})


def wrong(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    call: Call,
    sizes: Sizes = Sizes(),  # noqa: B008 - a constant
    slack: dict[str, float] | None = None,
) -> str:
    """Return what a backend gives wrong, as a clause with the error; "" where nothing is.

    Args:
        got: What it gives.
        want: What is true.
        call: The call.
        sizes: How large the inputs are.
        slack: Relative errors, by name, that are right although they are larger than usual.
    """
    limit = TOLERANCE.get(call.dtype, _COARSE)
    allowed = {name: max(limit, (slack or {}).get(name, 0.0)) for name in want}
    errors = {name: error(got[name], want[name], _floor(name, call, sizes)) for name in want}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    limit = allowed[worst]
    if errors[worst] <= limit:
        return ""
    what = worst if worst in ("output", "log-sum-exp") else f"gradient of {worst}"
    return f"the relative error of the {what} requires at most {limit:g}; got {errors[worst]:.2g}"


def error(got: Tensor, want: Tensor, floor: float) -> float:
    """Return the relative error of a tensor, or a quarter of its worst row's over the size of a usual row."""
    if got.shape != want.shape or not torch.equal(torch.isinf(got), torch.isinf(want)):
        return math.inf
    if want.numel() == 0:
        return 0.0
    wide = torch.float64 if want.numel() <= _WIDE else torch.float32
    # Infinite is the log-sum-exp of a row without a key, and by now the same in both.
    got, want = (
        t.to(wide).masked_fill(torch.isinf(want), 0.0).reshape(-1, want.shape[-1]) for t in (got, want)
    )
    apart, rows = (got - want).norm(dim=-1), want.norm(dim=-1)
    usual = rows.square().mean().sqrt().clamp_min(max(floor, 1e-12))
    whole = apart.square().mean().sqrt() / usual
    worst: float = max(whole.item(), (apart / torch.maximum(rows, usual)).max().item() / 4)
    return worst if math.isfinite(worst) else math.inf


def _floor(name: str, call: Call, sizes: Sizes) -> float:
    """Return the least size of a gradient's row; the output's gradient is of normal numbers."""
    score = _CANCELLED * math.sqrt(call.head_dim_v) * sizes.value
    if name == "key":
        # A key's row sums over all queries that share it.
        shared = call.seqlen_q / max(1, call.seqlen_kv) * call.num_heads_q / call.num_heads_kv
        return score * sizes.query * max(1.0, shared)
    if name in ("sink", "alibi_slopes") or (name == "bias" and isinstance(call.bias, FunctionBias)):
        # One number sums over all queries of a head: for slopes, of distances between query and key, as the
        # function that `remake` makes has them.
        reach = (call.seqlen_q + call.seqlen_kv) / 4
        weight = 1 / (1 + call.seqlen_kv) if name == "sink" else max(1.0, reach)
        return score * weight * math.sqrt(call.batch * call.seqlen_q * call.num_heads_q)
    return score * sizes.key if name == "query" else score if name == "bias" else 0.0


@contextmanager
def deterministic(call: Call) -> Iterator[None]:
    """Turn torch's own switch on, which training reads, where a call asks for deterministic algorithms."""
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(before or call.deterministic, warn_only=warns)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
