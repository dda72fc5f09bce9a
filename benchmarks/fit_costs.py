"""Fits the numbers of `capability_tables/<arch>/costs/` to recorded times, and says how far off they are.

python -m benchmarks.fit_costs            # writes the files of sm_90 and prints the errors
python -m benchmarks.fit_costs --check    # fails where a file is not what the records give

Numbers of kernels (`fit_kernels`), repairs (`fit_repairs`) and the host (`fit_hosts`, `fit_rings`) are
those that come nearest to the times of the records' part "fit". What a call took longer on all backends than
predicted changes no rank: half of that pace is taken out of its times before the next round.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import numpy as np

from attnroute.engine.select import select
from attnroute.engine.work import steps_of, work_of
from attnroute.question.policy import Policy
from attnroute.tables.cards import peak_of
from attnroute.tables.costs import FOLDER
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.vocabulary import Repair
from benchmarks import recorded
from benchmarks.fit_hosts import Sample, hosts_of, rounded
from benchmarks.fit_kernels import Fitted, Point, fitted, minimized, softened
from benchmarks.fit_repairs import NO_BACKWARD, refitted, start
from benchmarks.fit_rings import add_rings
from benchmarks.recorded import Record

Points = dict[tuple[str, str], list[Point]]
"""By backend and kernel."""
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
BOUND: Final = 3
"""Power of the host's time over the call's with which a host time counts: what a mask that fills the device's
memory costs the host is hidden behind the device."""
FIRST: Final = next(iter(SOURCES))
ARCH: Final = "sm_90"
KERNELS: Final = ("forward", "forward_few", "backward")
ROUNDS: Final = 3
"""How often kernels, repairs and paces are fitted in turn before the last fit of the kernels."""
SHARED: Final = 0.5
"""How much of a call's pace is taken out, as a power."""
FEWEST_SHARING: Final = 3
"""Backends without which a call has no pace."""
NEAR: Final = 0.05
"""Relative difference of two fits to the same records."""


def points() -> tuple[Points, dict[str, list[Sample]]]:
    """Return the points by backend and kernel, and the host times by backend."""
    found: Points = defaultdict(list)
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
        work = work_of(given, final, judgement.repairs, judgement.stages.sizes)
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
            bound = time.host_us / 1e3 / max(time.device_ms or 0.0, time.host_us / 1e3)
            host = Sample(
                record.id,
                given.phase,
                judgement.repairs,
                work.traits,
                steps,
                time.host_us,
                first,
                bound**BOUND,
            )
            hosts[backend].append(host)
        if time.backward_ms is not None:
            whose = "chunked" if "backward_from_chunked" in judgement.repairs else backend
            yield whose, "backward", Point(work, time.backward_ms, is_fit, record.id, weight)


def fits_of(found: Points) -> dict[tuple[str, str], Fitted]:
    """Fit kernels, what repairs take, and the paces of calls in turn."""
    known = {goes_back: start(_sized(found, goes_back=goes_back)) for goes_back in (False, True)}

    def fit() -> dict[tuple[str, str], Fitted]:
        every = ((key, fitted(its, known[_goes_back(key)])) for key, its in found.items())
        return {key: fit for key, fit in every if fit is not None}

    for _ in range(ROUNDS):
        fits = fit()
        for goes_back, before in known.items():
            its = [each for key, f in fits.items() if _goes_back(key) == goes_back for each in f.repaired]
            known[goes_back] = refitted(its, before, softened, minimized)
        found = paced(found, fits)
    return fit()


def _goes_back(key: tuple[str, str]) -> bool:
    return key[1] == "backward"


def _sized(found: Points, *, goes_back: bool) -> set[Repair]:
    """Return the repairs that allocate something for a call of one direction."""
    its = (point for key, points in found.items() if _goes_back(key) == goes_back for point in points)
    sized = {name for point in its for name in point.work.repair_bytes}
    return sized - NO_BACKWARD if goes_back else sized


def paced(found: Points, fits: dict[tuple[str, str], Fitted]) -> Points:
    """Return the points with the paces that the errors of their call on all backends tell."""
    slower: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for key, fit in fits.items():
        for point, error in zip(found[key], fit.errors, strict=True):
            slower[point.name, _goes_back(key)].append((-error, point.weight))
    paces = {
        call: math.exp(SHARED * _middle(its)) for call, its in slower.items() if len(its) >= FEWEST_SHARING
    }
    return {
        key: [point._replace(pace=paces.get((point.name, _goes_back(key)), 1.0)) for point in points]
        for key, points in found.items()
    }


def _middle(weighted: list[tuple[float, float]]) -> float:
    """Return the weighted median."""
    values, weights = (np.array(column) for column in zip(*sorted(weighted), strict=True))
    sums = np.cumsum(weights)
    return float(values[int(np.searchsorted(sums, sums[-1] / 2))])


def tables() -> Iterator[tuple[str, str, str]]:
    """Yield backend, the text of its file and a report on its fit."""
    found, hosts = points()
    host_times, all_fits = hosts_of(hosts), fits_of(found)
    add_rings(host_times)
    for backend in sorted(hosts):
        fits = {k: fit for k in KERNELS if (fit := all_fits.get((backend, k))) is not None}
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
