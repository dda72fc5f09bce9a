"""What tables and pictures show, as plain data: the recorded calls and what the engine chooses for them."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

from attnroute.cli._demo_cases import CASES
from attnroute.question.line import render
from benchmarks import recorded_h100 as h100
from benchmarks.kinds import KINDS, Kind, kind_of
from benchmarks.recorded import RESULTS, Record, load, records
from benchmarks.replay import Choice, Packages, choose

BY_LENGTH = ("causal", "full", "window", "documents", "padding")
"""The kinds whose speed-up is drawn by length."""
MODELS = ("h200-torch2.11-grid-tokens", "h200-torch2.11-grid")
"""Calls of known models: tokens outermost in memory, as models have them, where they were measured so."""


class Row(NamedTuple):
    """A recorded call and today's choices for it; None where nothing that was timed may run."""

    record: Record
    everything: Choice | None
    alone: Choice | None

    @property
    def kind(self) -> Kind:
        """The kind of the call."""
        return kind_of(self.record.call)

    def choice(self, packages: Packages) -> Choice | None:
        """Return the choice with these packages."""
        return self.everything if packages == "everything" else self.alone


@cache
def rows() -> tuple[Row, ...]:
    """Return every recorded call."""
    return tuple(Row(r, choose(r, "everything"), choose(r, "torch alone")) for r in records())


def rows_of_models() -> list[Row]:
    """Return calls of known models, each once, by kind and then by stock attention's time."""
    found: dict[str, Row] = {}
    for source in MODELS:
        for row in rows():
            if row.record.source == source:
                found.setdefault(row.record.name, row)
    return sorted(found.values(), key=lambda row: (KINDS.index(row.kind), row.record.name))


def best_ms(choice: Choice) -> float:
    """Return what the fastest backend takes."""
    return choice.record.times[choice.best].total_ms


def stock_ms(record: Record) -> float | None:
    """Return what stock attention takes; None where it cannot say the call or gave a wrong result."""
    return record.stock.total_ms if record.stock and record.stock.is_right else None


def calls() -> list[dict[str, Any]]:
    """Return the times of calls of known models, for a picture."""
    return [
        {
            "kind": row.kind,
            "name": row.record.name,
            "selected": row.everything.selected,
            "stock": stock_ms(row.record),
            "ours": row.everything.took_ms,
            "best": best_ms(row.everything),
        }
        for row in rows_of_models()
        if row.everything
    ]


def regrets() -> dict[str, dict[str, list[float]]]:
    """Return by part how far choices are from the best, sorted: those when it was measured, and today's."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    for row in rows():
        choice = row.everything
        earlier = row.record.times.get(row.record.selected or "")
        if choice and choice.options > 1 and earlier:
            found[row.record.part]["before"].append(max(1.0, earlier.total_ms / best_ms(choice)))
            found[row.record.part]["after"].append(choice.regret)
    return {
        part: {when: sorted(round(r, 4) for r in each) for when, each in found[part].items()}
        for part in sorted(found)
    }


def speed_ups() -> dict[str, list[tuple[int, float, str]]]:
    """Return by kind the length, how many times as fast as stock attention the choice is, and the phase."""
    found: dict[str, list[tuple[int, float, str]]] = {kind: [] for kind in BY_LENGTH}
    for row in rows():
        call = row.record.call
        if (
            row.kind in found
            and row.everything
            and row.everything.speed_up
            and call.seqlen_q == call.seqlen_kv
        ):
            found[row.kind].append((call.seqlen_kv, round(row.everything.speed_up, 4), call.phase))
    return {kind: sorted(points) for kind, points in found.items()}


def environment(source: str) -> dict[str, Any]:
    """Return what a file says of its machine, driver and date among them."""
    found = load(source)
    return {**h100.ENVIRONMENT, **(found.get("environment") or found.get("env") or {})}


def demo() -> dict[str, Any]:
    """Return what `attnroute demo` shows of a GPU: its calls with the times of stock and of every backend."""
    rows_by_name = {row.record.name: row.record for row in rows_of_models()}
    found = {case.recorded: rows_by_name[case.recorded] for case in CASES}
    (source,) = {record.source for record in found.values()}
    one = next(iter(found.values()))
    return {
        "source": source,
        "date": environment(source)["date"],
        "everything": one.host.model_dump(exclude_defaults=True),
        "alone": one.torch_alone.model_dump(exclude_defaults=True),
        "calls": {name: _demo_call(record) for name, record in found.items()},
    }


def _demo_call(record: Record) -> dict[str, Any]:
    assert record.stock is not None
    return {
        "line": render(record.call),
        "stock_ms": record.stock.total_ms,
        "stock_is_right": record.stock.is_right,
        "ms": {name: time.total_ms for name, time in record.times.items() if time.is_right},
    }


def host_times() -> dict[str, Any]:
    """Return the result of `host_times.py`."""
    return load("h200-torch2.11-host-times")


def package_host() -> dict[str, Any]:
    """Return the result of `package_host.py`."""
    return load("h200-torch2.11-package-host")


def models() -> dict[str, dict[str, Any]]:
    """Return the results of `models.py` by file."""
    return {path.stem: load(path.stem) for path in sorted(RESULTS.glob("*-whole-models*.json"))}
