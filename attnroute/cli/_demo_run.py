"""Run one call of the demo: which operators appear, how far from float64, how long."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnroute.api.attention import attention, explain
from attnroute.tables.load import load

if TYPE_CHECKING:
    from attnroute.cli._demo_cases import Case
    from attnroute.engine.decision import Decision

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error relative to the largest true value: a few roundings of the dtype."""
_BLOCK: Final = 128
_REPEATS: Final = {"cpu": 5, "cuda": 20}


@dataclass(frozen=True)
class Outcome:
    """What one way of computing a call did.

    Attributes:
        backends: Whose operators appeared.
        error: Of the output and, in training, of the gradients, relative to the largest true value.
        milliseconds: Median time.
        failure: Why it could not run, "" when it did.
    """

    backends: tuple[str, ...]
    error: float
    milliseconds: float
    failure: str = ""


@dataclass(frozen=True)
class Report:
    """A case with its decision and both outcomes."""

    case: Case
    decision: Decision
    ours: Outcome
    stock: Outcome

    @property
    def problems(self) -> list[str]:
        """What is wrong with our own outcome."""
        found = []
        if self.ours.backends != (self.decision.selected,):
            ran = ", ".join(self.ours.backends) or "no known operator"
            found.append(f"{self.decision.selected} was selected and {ran} ran")
        if not self.is_right(self.ours):
            most = TOLERANCE[self.case.dtype]
            found.append(f"the error requires at most {most:g}; got {self.ours.error:.2g}")
        return found

    def is_right(self, outcome: Outcome) -> bool:
        """Return whether an outcome is as near to float64 as its dtype allows; NaN is not."""
        return outcome.error <= TOLERANCE[self.case.dtype]


@dataclass(frozen=True)
class _Job:
    """One way of computing a case; `upstream` is the gradient that comes back into its output in training."""

    attend: Callable[..., Tensor]
    arguments: dict[str, Any]
    tensors: tuple[Tensor, Tensor, Tensor]
    upstream: Tensor | None

    def __call__(self) -> list[Tensor]:
        """Return the output and, in training, the gradients of query, key and value."""
        out = self.attend(*self.tensors, **self.arguments)
        if self.upstream is None:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, self.tensors, self.upstream)]


def run_case(case: Case, device: torch.device) -> Report:
    """Decide, run both ways, compare both with float64, time both in turns."""
    tensors, sizes = case.tensors(device), case.sizes(device)
    upstream = case.upstream(device)
    truth = _truth(tensors, case.allowed(sizes, device), upstream)
    ours = _Job(attention, case.ours(sizes, device), tensors, upstream)
    stock = _Job(scaled_dot_product_attention, case.stock(device), tensors, upstream)
    decision = explain(*tensors, **case.ours(sizes, device))
    checked = _checked(ours, truth)
    try:
        beside = _checked(stock, truth)
    except torch.OutOfMemoryError:
        # Stock attention may need more memory than there is: that is a result, not an end.
        (time_ours,) = _medians([ours], device)
        return Report(
            case, decision, Outcome(*checked, time_ours), Outcome((), math.nan, math.nan, "out of memory")
        )
    time_ours, time_stock = _medians([ours, stock], device)
    return Report(case, decision, Outcome(*checked, time_ours), Outcome(*beside, time_stock))


def _checked(job: _Job, truth: list[Tensor]) -> tuple[tuple[str, ...], float]:
    """Return the backends whose operators appeared, and the largest error."""
    # The first call may compile. A profile sees compiled calls too, under which no dispatch mode may lie.
    job()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = job()
    seen = {event.key for event in profile.key_averages()}
    backends = tuple(b for b, info in load().backends.items() if seen.intersection(info.operators))
    return backends, max(_error(g, w) for g, w in zip(got, truth, strict=True))


def _error(got: Tensor, want: Tensor) -> float:
    if not torch.isfinite(got).all():
        return math.inf
    return float((got.double() - want).abs().max() / want.abs().max())


def _medians(jobs: list[_Job], device: torch.device) -> list[float]:
    """Time jobs in turns, so that what else the machine does hits all alike; milliseconds."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(_REPEATS[device.type]):
        for job, found in zip(jobs, times, strict=True):
            _wait(device)
            start = time.perf_counter()
            job()
            _wait(device)
            found.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(found) for found in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _truth(tensors: tuple[Tensor, ...], allowed: Tensor, upstream: Tensor | None) -> list[Tensor]:
    """Attention in float64 by its definition, in blocks of queries so that the scores fit."""
    group = tensors[0].shape[1] // tensors[1].shape[1]
    leaves = [t.detach().double().requires_grad_(upstream is not None) for t in tensors]
    outs = []
    for start in range(0, leaves[0].shape[2], _BLOCK):
        rows = slice(start, start + _BLOCK)
        key, value = (t.repeat_interleave(group, 1) for t in leaves[1:])
        out = _attend(leaves[0][:, :, rows], key, value, allowed[:, :, rows])
        outs.append(out.detach())
        if upstream is not None:
            out.backward(upstream[:, :, rows].double())
    return [torch.cat(outs, 2), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """A query that sees no key gives zeros."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~allowed, torch.finfo(torch.float64).min), -1)
    return weights.masked_fill(~allowed, 0.0) @ value
