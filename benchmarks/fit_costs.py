"""Fits the numbers of `capability_tables/<arch>/costs/` to recorded times, and says how far off they are.

python -m benchmarks.fit_costs            # writes the files of sm_90 and prints the errors
python -m benchmarks.fit_costs --check    # fails where a file is not what the records give

A kernel's numbers are those that make `attnroute.engine.costs.device_ms` come nearest to the times of the
records' part "fit", in the logarithm and with outliers counting less (Levenberg-Marquardt; each number is
drawn a little to where it starts, so that one that no call speaks about stays there). The numbers of the host
are medians over calls of one kind.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from attnroute.engine.costs import Rates, device_ms
from attnroute.engine.select import select
from attnroute.engine.work import Work, steps_of, work_of
from attnroute.question.policy import Policy
from attnroute.tables.cards import peak_of
from attnroute.tables.costs import FOLDER, Trait
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from benchmarks import recorded
from benchmarks.fit_hosts import Sample, hosts_of, rounded
from benchmarks.recorded import Record

Array = NDArray[np.float64]
SOURCES: Final = {
    "h200-torch2.11-sweep": 1.0,
    "h200-torch2.11-models": 2.0,
    "h200-torch2.11-grid": 2.0,
    "h200-torch2.11-grid-tokens": 2.0,
}
"""Results, and how many drawn calls one of theirs counts for: those of models are what people run."""
FAR: Final = 0.5
"""Power of the fastest backend's time over its own with which the call of a backend counts: the further it is
behind, the less an error changes who is first."""
FIRST: Final = next(iter(SOURCES))
ARCH: Final = "sm_90"
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
    "repair_gbs": 600.0,
    "repair_us": 6.0,
    "ragged_us": 2.0,
}
"""Where the numbers of a kernel start."""
START_TFLOPS: Final = 300.0
PULL: Final = 0.05
"""How strongly a number is drawn to its start: as one call that is off by this share of the logarithm."""
PULL_DIM: Final = 0.2
"""The same for the rate of one head_dim, which is drawn to that of all."""
PULL_FACTOR: Final = 0.2
"""The same for the factor of a trait, which is drawn to 1."""
HELD: Final = 100.0
"""The same for a number that stays where it starts."""
REPAIRING: Final = ("cudnn", "forward")
"""The kernel whose calls say what repairs take: they are the same for all, and it needs most of them."""
OUTLIER: Final = 0.15
"""From this error on a call counts less."""
NEAR: Final = 0.05
"""Relative difference of two fits to the same records."""
FEWEST_WITH: Final = 3
"""Calls with a trait without which no factor is fitted."""
FEWEST: Final = 8
"""Calls without which nothing is fitted."""


class Point(NamedTuple):
    """One direction of one call on one backend."""

    work: Work
    ms: float
    is_fit: bool
    name: str
    weight: float


class Fitted(NamedTuple):
    """The numbers of one kernel, and how far off they are: medians of the relative error."""

    numbers: dict[str, Any]
    calls: int
    seen: float
    unseen: float
    worst: tuple[float, str]

    def __str__(self) -> str:
        """Say how far off they are."""
        error, name = self.worst
        told = f"{self.calls} calls, off by {self.seen:.1%}, where not seen {self.unseen:.1%}"
        return f"{told}; furthest {math.exp(error):.2f} times: {name}"


def points() -> tuple[dict[tuple[str, str], list[Point]], dict[str, list[Sample]]]:
    """Return the points by backend and kernel, and the host times by backend."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    hosts: dict[str, list[Sample]] = defaultdict(list)
    for source in SOURCES:
        for record in recorded.READERS[source](source, recorded.load(source)):
            for backend, kernel, point in _points_of(record, hosts):
                found[backend, kernel].append(point)
    return found, hosts


def _points_of(record: Record, hosts: dict[str, list[Sample]]) -> Iterator[tuple[str, str, Point]]:
    judgements = select(record.call, record.host, load(), Policy()).judgements
    fastest = min((time.total_ms for time in record.times.values() if time.is_right), default=0.0)
    for backend, time in record.times.items():
        judgement = judgements[backend]
        if not judgement.is_able or not time.is_right or time.forward_ms is None:
            continue
        given, final = judgement.form.call, judgement.final.form.call
        work = work_of(given, final, judgement.repairs, judgement.stages.extra_bytes)
        if work is None:
            continue
        weight = SOURCES[record.source] * (fastest / time.total_ms) ** FAR
        is_fit = record.part == "fit"
        forward = "forward_few" if work.is_few else "forward"
        yield backend, forward, Point(work, time.forward_ms, is_fit, record.id, weight)
        if is_fit and time.host_us is not None:
            steps = steps_of(final)
            others = [t.first_ms for t in record.times.values() if t.first_ms is not None]
            first = None if time.first_ms is None else time.first_ms - min(others)
            host = Sample(record.id, given.phase, judgement.repairs, work.traits, steps, time.host_us, first)
            hosts[backend].append(host)
        if time.backward_ms is not None:
            whose = "chunked" if "backward_from_chunked" in judgement.repairs else backend
            yield whose, "backward", Point(work, time.backward_ms, is_fit, record.id, weight)


class Model:
    """The numbers of one kernel as a vector of logarithms, and what it predicts for points."""

    def __init__(self, points: list[Point], known: Mapping[str, float]) -> None:
        """Take those numbers that the points speak about; what is known stays as it is."""
        self._works = [point.work for point in points]
        fields = [name for name in Work._fields if name not in ("traits", "is_few", "head_dim")]
        columns = {name: np.array([float(getattr(w, name)) for w in self._works]) for name in fields}
        self._work: Any = Work(
            **columns, head_dim=np.array([w.head_dim for w in self._works]), traits=frozenset(), is_few=False
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
                *(_inner(name, value) for name, value in {**START, **known}.items()),
                math.log(START_TFLOPS),
                *([0.0] * (len(self.dims) + len(self.traits))),
            ]
        )
        strengths = [HELD if name in known else PULL for name in START]
        apart = [PULL_DIM] * len(self.dims) + [PULL_FACTOR] * len(self.traits)
        self.pull = np.array([*strengths, PULL, *apart])

    def predicted(self, vector: Array) -> Array:
        """Return the milliseconds of each point."""
        numbers, tflops, factors = self._parts(vector)
        rates: Any = Rates(
            **numbers, tflops=tflops[self._dim], factor=np.exp(self._has @ np.log(factors)), sms=SMS
        )
        return np.asarray(device_ms(self._work, rates))

    def numbers(self, vector: Array) -> dict[str, Any]:
        """Return the vector as a `Kernel` of the tables has it."""
        numbers, tflops, factors = self._parts(vector)
        return {
            **{name: rounded(value) for name, value in numbers.items()},
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
    return math.log(value / (1 - value)) if name == "packing" else math.log(value)


def _outer(name: str, value: float) -> float:
    return float(1 / (1 + np.exp(-value)) if name == "packing" else np.exp(value))


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


def fitted(points: list[Point], known: Mapping[str, float]) -> Fitted | None:
    """Fit the numbers of one kernel that are not known; None where too few calls speak about it."""
    seen = np.array([point.is_fit for point in points])
    if seen.sum() < FEWEST:
        return None
    model = Model(points, known)
    measured = np.log(np.array([point.ms for point in points]))
    weights = np.sqrt(np.array([point.weight for point in points]))[seen]

    def residuals(vector: Array) -> Array:
        error = (np.log(model.predicted(vector)) - measured)[seen]
        # The square of this grows as the error itself from OUTLIER on.
        softened = np.sign(error) * np.sqrt(2 * OUTLIER**2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1))
        return np.concatenate([weights * softened, model.pull * (vector - model.start)])

    vector = minimized(residuals, model.start)
    error = np.log(model.predicted(vector)) - measured
    furthest = int(np.argmax(np.abs(np.where(seen, 0.0, error))))
    return Fitted(
        model.numbers(vector),
        int(seen.sum()),
        float(np.median(np.abs(error[seen]))),
        float(np.median(np.abs(error[~seen]))) if (~seen).any() else math.nan,
        (float(error[furthest]), points[furthest].name),
    )


def repairing(points: list[Point]) -> dict[str, float]:
    """Return the numbers of repairs.

    Raises:
        SystemExit: Too few calls speak about them.
    """
    found = fitted(points, {})
    if found is None:
        raise SystemExit(f"the records require {FEWEST} calls of {' '.join(REPAIRING)}.")
    return {name: found.numbers[name] for name in START if name.startswith("repair_")}


def tables() -> Iterator[tuple[str, str, str]]:
    """Yield backend, the text of its file and a report on its fit."""
    found, hosts = points()
    known, host_times = repairing(found[REPAIRING]), hosts_of(hosts)
    for backend in sorted(hosts):
        fits = {
            kernel: fit
            for kernel in ("forward", "forward_few", "backward")
            if (its := found.get((backend, kernel))) and (fit := fitted(its, known)) is not None
        }
        if "forward" in fits:
            lines = [f"{backend:10}{kernel:12} {fit}" for kernel, fit in fits.items()]
            yield backend, text_of(backend, fits, host_times[backend]), "\n".join(lines)


def text_of(backend: str, fits: dict[str, Fitted], host: dict[str, Any]) -> str:
    """Return a backend's file."""
    data = recorded.load(FIRST)
    machine = next(recorded.READERS[FIRST](FIRST, data)).host
    peak = peak_of(load(), machine)
    if peak is None:
        raise SystemExit(f"{ARCH}/arch.toml requires [peak] for {machine.device_name}.")
    date = data["environment"]["date"]
    head = {
        "card": machine.device_name,
        "date": date,
        "versions": machine.versions,
        "calls": max(fit.calls for fit in fits.values()),
        "error": rounded(median(fit.unseen for fit in fits.values() if not math.isnan(fit.unseen))),
    }
    evidence = [{"kind": "measured", "ref": source, "date": date} for source in SOURCES]
    lines = [
        f"# What {backend} takes on {ARCH}; written by `python -m benchmarks.fit_costs`, not by hand.",
        f"evidence = {_toml(evidence)}",
        f"measured = {_toml(head)}",
        f"peak = {_toml(peak.model_dump(mode='json', exclude_none=True, exclude_defaults=True))}",
        *(f"host.{phase} = {_toml(times)}" for phase, times in host.items()),
    ]
    for kernel, fit in fits.items():
        lines += ["", f"[{kernel}]", *(f"{name} = {_toml(value)}" for name, value in fit.numbers.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Return a value as TOML writes it in one line."""
    if isinstance(value, dict):
        parts = ", ".join(f"{_key(name)} = {_toml(part)}" for name, part in value.items())
        return f"{{ {parts} }}" if parts else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else f"{value:g}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)


def is_like(one: str, other: str) -> bool:
    """Return whether two files say the same: numbers differ by rounding between machines."""
    return _is_near(tomllib.loads(one), tomllib.loads(other))


def _is_near(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_near(one[name], other[name]) for name in one)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=NEAR, abs_tol=NEAR)
    return one == other


def main() -> None:
    """Fit, print the errors, and write or compare the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the files with what is fitted")
    options = parser.parse_args()
    folder = shipped_folder() / ARCH / FOLDER
    folder.mkdir(exist_ok=True)
    differing = []
    for backend, text, report in tables():
        print(report)
        path = folder / f"{backend}.toml"
        if options.check and (not path.is_file() or not is_like(path.read_text(encoding="utf-8"), text)):
            differing.append(path.name)
        elif not options.check:
            path.write_text(text, encoding="utf-8")
    if differing:
        raise SystemExit(f"{', '.join(differing)}: run `python -m benchmarks.fit_costs`.")


if __name__ == "__main__":
    main()
