"""Fits what the host takes for a call on each backend, and what repairs and traits add: part of `fit_costs`.

Machines, and one machine from minute to minute, differ by more than backends do. What was measured for one
call in one run was as fast or slow for all of its backends: that pace is fitted too, and taken out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from attnroute.vocabulary import Phase, Repair

Array = NDArray[np.float64]
FEW: Final = 3
"""Calls with a repair or a trait without which nothing is said of what it takes."""
IN_STEPS: Final = frozenset({"chunked"})
"""Backends whose host launches kernels for each part of the scores."""
ADDING: Final = ("bias_grad", "documents", "function", "key_padding", "prefix", "sink", "softcap", "varlen")
"""Traits for which a package may do more before it launches."""
PASSES: Final = 40
"""How often each number of the host is set in turn."""
PLANNING: Final = frozenset({"cudnn", "cudnn_fe"})
"""Backends that plan each new shape: a graph of cuDNN has fixed sizes (torch's MHA.cpp, cudnn/sdpa)."""
PLAN_SHARE: Final = 0.1
"""Of the first calls that took least, so many are looked past: others load and compile code as well."""
ROUNDS: Final = 8
"""How often numbers and paces are fitted in turn."""


class Sample(NamedTuple):
    """The host time of one call on one backend.

    Attributes:
        record: The name of the call; its backends share a pace.
        phase: Forward alone, or with the backward.
        repairs: What was done to the call.
        traits: What it has.
        steps: Of a backend that computes the scores in parts.
        us: The time.
        first_ms: What the first call of the shape took above the shortest first call of another backend; None
            where nobody timed it.
        weight: How many calls it counts for: less where the device takes longer, so that it matters less.
    """

    record: str
    phase: Phase
    repairs: tuple[str, ...]
    traits: frozenset[str]
    steps: float
    us: float
    first_ms: float | None = None
    weight: float = 1.0


class _Host:
    """The samples of one backend and phase as columns, and its numbers."""

    def __init__(self, samples: list[Sample], *, in_steps: bool) -> None:
        parts = [(*s.repairs, *(t for t in ADDING if t in s.traits)) for s in samples]
        counts = Counter(part for found in parts for part in found)
        self.seldom = {name for name, count in counts.items() if count < FEW}
        self.names = sorted(name for name, count in counts.items() if FEW <= count < len(samples))
        self.records = [s.record for s in samples]
        self.measured = np.array([s.us for s in samples])
        self.weights = np.array([s.weight for s in samples])
        rows = [
            [True, s.steps * in_steps, *(name in found for name in self.names)]
            for s, found in zip(samples, parts, strict=True)
        ]
        self.columns = np.array(rows, dtype=float)
        self.found = np.zeros(self.columns.shape[1])

    def predicted(self) -> Array:
        return np.asarray(self.columns @ self.found)

    def fit(self, paces: dict[str, float]) -> None:
        """Set the numbers that make the sum of relative errors least, one after the other."""
        measured = self.measured / np.array([paces[name] for name in self.records])
        for _ in range(PASSES):
            for at, column in enumerate(self.columns.T):
                its = column > 0
                if its.any():
                    rest = measured - self.predicted() + column * self.found[at]
                    weights = self.weights[its] * column[its] / measured[its]
                    self.found[at] = max(0.0, _middle(rest[its] / column[its], weights))

    def told(self, usual: dict[str, float]) -> dict[str, Any]:
        """Return the numbers as `HostTimes` has them; of repairs that too few calls had, what is usual."""
        call_us, step_us, *adding = map(rounded, self.found.tolist())
        known = {name: us for name, us in usual.items() if name in self.seldom}
        adding_us = known | dict(zip(self.names, adding, strict=True))
        told = {"call_us": call_us, "step_us": step_us} if step_us else {"call_us": call_us}
        return told | {"adding_us": {name: us for name, us in sorted(adding_us.items()) if us >= 1}}


def rounded(value: float) -> float:
    """Return three significant digits: more say nothing."""
    return float(f"{value:.3g}")


def hosts_of(samples: dict[str, list[Sample]]) -> dict[str, dict[Phase, dict[str, Any]]]:
    """Return the host's times by backend and phase."""
    found: dict[str, dict[Phase, dict[str, Any]]] = {name: {} for name in samples}
    for phase in get_args(Phase):
        its = {name: [s for s in all_ if s.phase == phase] for name, all_ in samples.items()}
        hosts = {n: _Host(some, in_steps=n in IN_STEPS) for n, some in its.items() if len(some) >= FEW}
        paces = dict.fromkeys((s.record for some in its.values() for s in some), 1.0)
        if not hosts:
            continue
        for _ in range(ROUNDS):
            for host in hosts.values():
                host.fit(paces)
            paces = _paces(hosts)
        usual = _usual(hosts)
        for name, host in hosts.items():
            found[name][phase] = _plan(name, its[name]) | host.told(usual)
    return found


def _plan(backend: str, samples: list[Sample]) -> dict[str, float]:
    """Return what a plan takes: nearly the least by which a first call is longer than other backends'."""
    first = [s.first_ms for s in samples if s.first_ms is not None] if backend in PLANNING else []
    return {"plan_ms": rounded(float(np.quantile(first, PLAN_SHARE)))} if first else {}


def _usual(hosts: dict[str, _Host]) -> dict[str, float]:
    """Return the median over backends of what each repair adds: their code is the same for all."""
    added: dict[str, list[float]] = defaultdict(list)
    for host in hosts.values():
        for name, us in zip(host.names, host.found[2:].tolist(), strict=True):
            if name in get_args(Repair):
                added[name].append(us)
    return {name: rounded(float(np.median(us))) for name, us in added.items()}


def _paces(hosts: dict[str, _Host]) -> dict[str, float]:
    """Return how slow the host was while each call was measured: medians over backends, 1 in the middle."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for host in hosts.values():
        for name, ratio in zip(host.records, host.measured / host.predicted(), strict=True):
            ratios[name].append(float(ratio))
    middle = {name: float(np.median(found)) for name, found in ratios.items()}
    usual = float(np.median(list(middle.values())))
    return {name: pace / usual for name, pace in middle.items()}


def _middle(values: Array, weights: Array) -> float:
    """Return the weighted median."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(sums, sums[-1] / 2))])
