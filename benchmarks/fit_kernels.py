"""Fits the numbers of one kernel to the times of its calls: part of `fit_costs`.

A kernel's numbers are those that make `attnroute.engine.costs.device_ms` come nearest to the times of the
records' part "fit", in the logarithm and with outliers counting less (Levenberg-Marquardt; each number is
drawn a little to where it starts, so that one that no call speaks about stays there).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from attnroute.engine.costs import Rates, device_ms, repairing_ms
from attnroute.engine.work import Work
from attnroute.tables.costs import Trait
from benchmarks.fit_hosts import rounded
from benchmarks.fit_repairs import Repaired, Repairing

Array = NDArray[np.float64]
SMS: Final = 132.0
START: Final = {
    "launch_us": 6.0,
    "block_us": 0.3,
    "wave": 0.3,
    "packing": 0.5,
    "split_keys": 4000.0,
    "gbs": 3000.0,
    "idle": 0.2,
    "mask_gbs": 3000.0,
    "ragged_us": 2.0,
}
"""Where the numbers of a kernel start."""
MOST: Final = {"packing": 1.0, "gbs": 4800.0}
"""What they stay below: the card's memory gives no more bytes a second."""
START_TFLOPS: Final = 300.0
PULL: Final = 0.05
"""How strongly a number is drawn to its start: as one call that is off by this share of the logarithm."""
PULL_DIM: Final = 0.2
"""The same for the rate of one head_dim, which is drawn to that of all."""
PULL_FACTOR: Final = 0.2
"""The same for the factor of a trait, which is drawn to 1."""
OUTLIER: Final = 0.15
"""From this error on a call counts less."""
FEWEST_WITH: Final = 3
"""Calls with a trait without which no factor is fitted."""
FEWEST: Final = 8
"""Calls without which nothing is fitted."""
APART: Final = frozenset({"traits", "is_few", "head_dim", "repair_bytes"})
"""What of `Work` is no plain column."""


class Point(NamedTuple):
    """One direction of one call on one backend.

    Attributes:
        work: What the kernel does.
        ms: What was measured.
        is_fit: Whether a fit may read it.
        name: The call's; its backends share a pace.
        weight: How many calls it counts for.
        pace: How much slower the call was for all backends than predicted, as far as that is taken out.
    """

    work: Work
    ms: float
    is_fit: bool
    name: str
    weight: float
    pace: float = 1.0


class Fitted(NamedTuple):
    """The numbers of one kernel, and how far off they are.

    Attributes:
        numbers: As a `Kernel` of the tables has them.
        calls: How many were fitted.
        seen: Median of the relative error of these.
        unseen: The same of the others.
        worst: The largest of the others as a logarithm, and its call.
        repaired: Fitted calls that repairs were made for.
        errors: Of every point, as logarithms: predicted over measured.
    """

    numbers: dict[str, Any]
    calls: int
    seen: float
    unseen: float
    worst: tuple[float, str]
    repaired: list[Repaired]
    errors: list[float]

    def __str__(self) -> str:
        """Say how far off they are."""
        error, name = self.worst
        told = f"{self.calls} calls, off by {self.seen:.1%}, where not seen {self.unseen:.1%}"
        return f"{told}; furthest {math.exp(error):.2f} times: {name}"


class Model:
    """The numbers of one kernel as a vector of logarithms, and what it predicts for points."""

    def __init__(self, points: list[Point], known: Repairing) -> None:
        """Take those numbers that the points speak about; what repairs take is known."""
        self._known = known
        self._works = [point.work for point in points]
        fields = [name for name in Work._fields if name not in APART]
        columns = {name: np.array([float(getattr(w, name)) for w in self._works]) for name in fields}
        sizes: Any = {
            name: np.array([float(w.repair_bytes.get(name, 0.0)) for w in self._works]) for name in known.gbs
        }
        self._work: Any = Work(
            **columns,
            repair_bytes=sizes,
            head_dim=np.array([w.head_dim for w in self._works]),
            traits=frozenset(),
            is_few=False,
        )
        self.dims = sorted({work.head_dim for work in self._works})
        counts = {t: sum(t in p.work.traits and p.is_fit for p in points) for t in get_args(Trait)}
        seen = sum(p.is_fit for p in points)
        # One that all calls have cannot be told from the rate, and of few calls nothing is learned.
        self.traits = [t for t, count in counts.items() if FEWEST_WITH <= count <= 0.97 * seen]
        self._dim = np.array([self.dims.index(work.head_dim) for work in self._works])
        self._has = np.array([[float(t in work.traits) for t in self.traits] for work in self._works])
        self.start = np.array(
            [
                *(_inner(name, value) for name, value in START.items()),
                math.log(START_TFLOPS),
                *([0.0] * (len(self.dims) + len(self.traits))),
            ]
        )
        apart = [PULL_DIM] * len(self.dims) + [PULL_FACTOR] * len(self.traits)
        self.pull = np.array([*([PULL] * len(START)), PULL, *apart])

    def predicted(self, vector: Array) -> Array:
        """Return the milliseconds of each point."""
        numbers, tflops, factors = self._parts(vector)
        rates: Any = Rates(
            **numbers,
            repair_gbs=self._known.gbs,
            repair_us=self._known.us,
            tflops=tflops[self._dim],
            factor=np.exp(self._has @ np.log(factors)),
            sms=SMS,
        )
        return np.asarray(device_ms(self._work, rates))

    def repaired(self, predicted: Array, points: list[Point]) -> list[Repaired]:
        """Return the fitted calls with repairs, and what is predicted without these."""
        moving = np.broadcast_to(repairing_ms(self._work, self._known.gbs), predicted.shape)
        us = self._known.us * self._work.repairs
        rest = (predicted - moving - us / 1e3).tolist()
        return [
            Repaired(ms, dict(p.work.repair_bytes), p.work.repairs, p.ms / p.pace, p.weight)
            for p, ms in zip(points, rest, strict=True)
            if p.work.repairs and p.is_fit
        ]

    def numbers(self, vector: Array) -> dict[str, Any]:
        """Return the vector as a `Kernel` of the tables has it."""
        numbers, tflops, factors = self._parts(vector)
        return {
            **{name: rounded(value) for name, value in numbers.items()},
            "repair_us": rounded(self._known.us),
            "repair_gbs": {name: rounded(gbs) for name, gbs in self._known.gbs.items()},
            "tflops": {f"d{d}": rounded(rate) for d, rate in zip(self.dims, tflops, strict=True)},
            "factor": {
                trait: value
                for trait, factor in zip(self.traits, factors, strict=True)
                if (value := rounded(factor)) != 1.0
            },
        }

    def _parts(self, vector: Array) -> tuple[dict[str, Any], Array, Array]:
        first = len(START)
        end = first + 1 + len(self.dims)
        numbers = {name: _outer(name, v) for name, v in zip(START, vector[:first], strict=True)}
        return numbers, np.exp(vector[first] + vector[first + 1 : end]), np.exp(vector[end:])


def _inner(name: str, value: float) -> float:
    most = MOST.get(name)
    return math.log(value) if most is None else math.log(value / (most - value))


def _outer(name: str, value: float) -> float:
    most = MOST.get(name)
    return float(np.exp(value) if most is None else most / (1 + np.exp(-value)))


def minimized(residuals: Callable[[Array], Array], vector: Array, *, steps: int = 80) -> Array:
    """Return the vector that makes the sum of squares least, by Levenberg-Marquardt."""
    damping = 1e-2
    found = residuals(vector)
    for _ in range(steps):
        columns = [(residuals(vector + step) - found) / 1e-4 for step in np.eye(len(vector)) * 1e-4]
        jacobian = np.stack(columns, axis=1)
        square, gradient = jacobian.T @ jacobian, jacobian.T @ found
        before = float(found @ found)
        while damping < 1e8:
            scaled = square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(vector)))
            moved = vector - np.clip(np.linalg.solve(scaled, gradient), -1, 1)
            tried = residuals(moved)
            if float(tried @ tried) < before:
                break
            damping *= 4
        else:
            return vector
        vector, found, damping = moved, tried, damping / 3
        if before - float(found @ found) < 1e-7 * before:
            return vector
    return vector


def softened(error: Array) -> Array:
    """Return numbers whose squares grow as the error itself from `OUTLIER` on."""
    return np.sign(error) * np.sqrt(2 * OUTLIER**2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1))


def fitted(points: list[Point], known: Repairing) -> Fitted | None:
    """Fit the numbers of one kernel; None where too few calls speak about it."""
    seen = np.array([point.is_fit for point in points])
    if seen.sum() < FEWEST:
        return None
    model = Model(points, known)
    measured = np.log(np.array([point.ms for point in points]))
    wanted = measured - np.log(np.array([point.pace for point in points]))
    weights = np.sqrt(np.array([point.weight for point in points]))[seen]

    def residuals(vector: Array) -> Array:
        error = (np.log(model.predicted(vector)) - wanted)[seen]
        return np.concatenate([weights * softened(error), model.pull * (vector - model.start)])

    vector = minimized(residuals, model.start)
    predicted = model.predicted(vector)
    error = np.log(predicted) - measured
    furthest = int(np.argmax(np.abs(np.where(seen, 0.0, error))))
    return Fitted(
        model.numbers(vector),
        int(seen.sum()),
        float(np.median(np.abs(error[seen]))),
        float(np.median(np.abs(error[~seen]))) if (~seen).any() else math.nan,
        (float(error[furthest]), points[furthest].name),
        model.repaired(predicted, points),
        error.tolist(),
    )
