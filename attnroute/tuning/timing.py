"""Device time, host time and memory of one way to run a call, forward and backward apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

CYCLES_PER_SECOND = 2.0e9
"""Of the GPU's clock: how long `torch.cuda._sleep` keeps it busy while the host runs ahead."""
BATCH_SECONDS = 0.015
"""About how long the repetitions of one batch take."""
REPETITIONS = (3, 20)
"""The fewest and the most in one batch."""
TOO_LONG_SECONDS = 1.0
"""A step that takes longer is timed once."""


@dataclass
class Step:
    """One forward, and one backward where leaves are given."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    grad: Tensor

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; none in inference."""
        return torch.autograd.grad(out, self.leaves, self.grad) if self.leaves else ()

    def run(self) -> tuple[Tensor, ...]:
        """Run both and return output and gradients."""
        out = self.forward()
        return (out.detach(), *self.backward(out))


@dataclass
class Samples:
    """What was measured in each repetition.

    Attributes:
        device_ms: Of the forward and of the backward.
        host_us: The same, of each batch: calls in a row until the last one returned, by their number.
        ahead: Whether the host ran ahead of the device in each batch: else device times hold host gaps.
    """

    device_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    host_us: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    ahead: bool = True

    @property
    def totals(self) -> tuple[float, float]:
        """Milliseconds of the device and of the host, forward and backward together, in the median."""
        device = sum(median(spans) for spans in self.device_ms if spans)
        return device, sum(median(spans) for spans in self.host_us if spans) / 1e3

    def summary(self) -> dict[str, Any]:
        """Return the medians."""
        found: dict[str, Any] = {"repetitions": len(self.device_ms[0]), "ahead": self.ahead}
        for name, device, host in zip(("fwd", "bwd"), self.device_ms, self.host_us, strict=True):
            if host:
                found[f"{name}_ms"] = round(median(device), 5)
                found[f"{name}_host_us"] = round(median(host), 2)
        return found


class CudaClock:
    """Times with CUDA events. The L2 cache is not flushed: inputs may lie in it, as in a row of layers."""

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def batch(self, step: Step, repetitions: int, seconds: float, into: Samples) -> None:
        """Time some repetitions, first on the device and then on the host."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repetitions + 1)]
        sleep = 1.5 * repetitions * seconds + 0.0005
        self.wait()
        began = time.perf_counter()
        # The device sleeps first, so that the host runs ahead of it.
        torch.cuda._sleep(int(sleep * CYCLES_PER_SECOND))  # noqa: SLF001 - torch has no public way
        marks[0].record()
        for i in range(repetitions):
            out = step.forward()
            marks[2 * i + 1].record()
            grads = step.backward(out)
            marks[2 * i + 2].record()
            del out, grads
        into.ahead &= time.perf_counter() - began < sleep
        self.wait()
        spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
        forward_us = self._row_us(step.forward, repetitions)
        hosts = (forward_us, self._row_us(step.run, repetitions) - forward_us if step.leaves else 0.0)
        for at in (0, 1) if step.leaves else (0,):
            into.device_ms[at].extend(spans[at::2])
            into.host_us[at].append(hosts[at])

    def _row_us(self, run: Callable[[], object], repetitions: int) -> float:
        """Return what the host takes for one of several calls in a row."""
        self.wait()
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        seconds = time.perf_counter() - start
        self.wait()
        return 1e6 * seconds / repetitions

    def extra_bytes(self, step: Step) -> dict[str, int]:
        """Return how far the forward, and forward and backward, raise the allocated memory at most."""
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = step.forward()
        found = {"fwd_bytes": torch.cuda.max_memory_allocated() - before}
        if step.leaves:
            grads = step.backward(out)
            found["step_bytes"] = torch.cuda.max_memory_allocated() - before
            del grads
        return found


class CpuClock:
    """Times with the host's clock, which is the device's as well."""

    def wait(self) -> None:
        """Nothing runs behind the host."""

    def batch(self, step: Step, repetitions: int, seconds: float, into: Samples) -> None:
        """Time some repetitions."""
        for _ in range(repetitions):
            marks = [time.perf_counter()]
            out = step.forward()
            marks.append(time.perf_counter())
            step.backward(out)
            marks.append(time.perf_counter())
            for at in (0, 1) if step.leaves else (0,):
                into.device_ms[at].append(1e3 * (marks[at + 1] - marks[at]))
                into.host_us[at].append(1e6 * (marks[at + 1] - marks[at]))

    def extra_bytes(self, step: Step) -> dict[str, int]:
        """Nothing counts them here."""
        return {}


Clock = CudaClock | CpuClock


def clock_of(device: str) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device == "cuda" else CpuClock()


def first(step: Step, clock: Clock) -> tuple[float, tuple[Tensor, ...]]:
    """Return the seconds of the first run, and what it gave."""
    clock.wait()
    start = time.perf_counter()
    given = step.run()
    clock.wait()
    return time.perf_counter() - start, given


@dataclass
class Timing:
    """A step in the middle of being timed: it takes turns with the others, batch after batch."""

    step: Step
    clock: Clock
    samples: Samples = field(default_factory=Samples)
    seconds: float = 0.0
    host_seconds: float = 0.0

    def warm_up(self) -> dict[str, int]:
        """Run until nothing is new, say how long a step takes, and return its extra bytes."""
        self.seconds, _ = first(self.step, self.clock)
        if self.seconds < TOO_LONG_SECONDS:
            self.seconds, _ = first(self.step, self.clock)
        extra = self.clock.extra_bytes(self.step)
        self.clock.wait()
        start = time.perf_counter()
        self.step.run()
        self.host_seconds = time.perf_counter() - start
        self.clock.wait()
        self.seconds = min(self.seconds, time.perf_counter() - start)
        return extra

    def turn(self) -> None:
        """Time one batch."""
        fewest, most = REPETITIONS
        repetitions = max(fewest, min(most, int(BATCH_SECONDS / max(self.seconds, 1e-6))))
        if self.seconds > TOO_LONG_SECONDS:
            if self.samples.host_us[0]:
                return
            repetitions = 1
        self.clock.batch(self.step, repetitions, self.host_seconds, self.samples)
