"""What the parts of `masks_beside_stock.py` share: sizes, cases, first calls, timing and saving.

A smoke run has tiny sizes and may be on a CPU, where times are only a sign that something ran.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from common import Run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention, explain

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
Steps = Generator[None, None, Any]
"""A job that runs; `masks_jobs` says what its yields mean. It returns what it found."""
Job = Callable[[], Steps]

Allowed = Callable[[Tensor, Tensor], Tensor]
"""From query indices (seqlen, 1) and key indices (1, seqlen) to who may attend."""


class Sizes(NamedTuple):
    """What is measured, or tiny sizes that only show that the script runs."""

    smoke: bool = False

    def tokens(self, count: int) -> int:
        """Return a length."""
        return count // 32 if self.smoke else count

    def heads(self, heads_q: int, heads_kv: int) -> tuple[int, int]:
        """Return numbers of heads."""
        return (4, 2) if self.smoke else (heads_q, heads_kv)

    def head_dim(self, head_dim: int) -> int:
        """Return a head_dim."""
        return 16 if self.smoke else head_dim


class Case(NamedTuple):
    """One call.

    Attributes:
        inputs: Query, key and value.
        ours: The other arguments of `attention`.
        allowed: Who may attend, written down once more without the library.
        stock: Makes the mask argument of stock, None where stock cannot say it.
        train: Forward and backward are run, else the forward.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    ours: dict[str, Any]
    allowed: Allowed
    stock: Callable[[], dict[str, Any]] | None
    train: bool

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients."""
        sink = self.ours.get("sink")
        return self.inputs if sink is None else (*self.inputs, sink)


def draw(*size: int, train: bool = False) -> Tensor:
    """Return random bfloat16 numbers."""
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=train)


def dense(allowed: Allowed, length: int) -> Tensor:
    """Return who may attend as the bool tensor that a user builds for stock."""
    places = torch.arange(length, device=DEVICE)
    return allowed(places[:, None], places[None])


def forwards(case: Case, backends: Iterable[str] = ()) -> dict[str, Run]:
    """Return the forward pass as routed, and on every one of these backends that may run it."""
    runs: dict[str, Run] = {"attnroute": partial(attention, *case.inputs, **case.ours)}
    for backend in backends:
        if explain(*case.inputs, **case.ours, backend=backend).selected == backend:
            runs[backend] = partial(attention, *case.inputs, **case.ours, backend=backend)
    return runs


def stock_forward(case: Case) -> Run | None:
    """Return the forward pass of stock, None where stock cannot say the call."""
    if case.stock is None:
        return None
    return partial(sdpa, *case.inputs, **case.stock(), enable_gqa=True)


def passes(case: Case, forward: Run) -> Run:
    """Return the forward pass, with the backward pass where the case trains."""
    if not case.train:
        return forward
    query, _, value = case.inputs
    cotangent = draw(*query.shape[:-1], value.shape[-1])
    return lambda: torch.autograd.grad(forward(), case.trained, cotangent)


def wait() -> None:
    """Wait for the device, and let what it found wrong be raised here."""
    if ON_GPU:
        torch.cuda.synchronize()


def usable() -> bool:
    """Say whether this process can still use the device: some CUDA errors stay until it ends."""
    try:
        wait()
    except RuntimeError:
        return False
    return True


def raised(error: BaseException) -> str:
    """Return an exception as a result: its type and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def first_calls(runs: dict[str, Run]) -> tuple[dict[str, float], dict[str, str]]:
    """Call each run once, which compiles what is to be compiled.

    Args:
        runs: Loses those that raise.

    Returns:
        Seconds of each call, and what was raised.
    """
    seconds, errors = {}, {}
    for name, run in tuple(runs.items()):
        start = time.perf_counter()
        try:
            run()
            wait()
        except Exception as error:  # noqa: BLE001 - no kind of failure is excepted
            errors[name] = raised(error)
            del runs[name]
        else:
            seconds[name] = round(time.perf_counter() - start, 2)
    return seconds, errors


def timed(runs: dict[str, Run], *, rounds: int, rep: int, far: float = math.inf) -> dict[str, float]:
    """Return the median of each run in milliseconds, the runs taking turns.

    Args:
        runs: What is timed.
        rounds: Turns of each.
        rep: Milliseconds of a turn.
        far: A run that takes more than so many times as long as the fastest is timed by single calls.
    """
    once = {name: _once(run) for name, run in runs.items()}
    near = {name: run for name, run in runs.items() if once[name] <= far * min(once.values())}
    times = common.side_by_side(near, rounds=rounds, rep=rep) if ON_GPU else {}
    return {name: round(ms, 4) for name, ms in (once | times).items()}


def _once(run: Run) -> float:
    """Time one call in milliseconds, the better of two."""
    best = math.inf
    for _ in range(2):
        wait()
        start = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def kernels_of(run: Run) -> list[str]:
    """Return the names of the kernels of one run, none on a CPU."""
    return common.kernels_of(run) if ON_GPU else []


def peak_extra_bytes(run: Run) -> int | None:
    """Return how far one call raises the allocated memory, None on a CPU."""
    if not ON_GPU:
        run()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def release() -> None:
    """Give memory that is only cached back to the other processes."""
    if ON_GPU:
        torch.cuda.empty_cache()


def number(value: float) -> float | str:
    """Return a number as JSON has it; infinity and NaN as words."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


@cache
def environment() -> dict[str, str]:
    """Return card, driver, versions and date, asked for once; a CPU has little of it to tell."""
    return common.environment() if ON_GPU else {"card": "none", "torch": torch.__version__}


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON with the environment beside them."""
    text = json.dumps({"environment": environment(), **results}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
