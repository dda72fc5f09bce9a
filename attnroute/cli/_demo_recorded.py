"""What the calls of the demo took on a card that was measured, and what the engine chooses for them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

FILE: Final = Path(__file__).with_name("demo_recorded.json")
"""Written by `python -m benchmarks.report` from the recorded times."""


class Choice(NamedTuple):
    """What is selected for a call.

    Attributes:
        backend: Its name; None where nothing may run.
        predicted_ms: What the tables predict.
        recorded_ms: What it took; None where nobody timed it.
    """

    backend: str | None
    predicted_ms: float | None
    recorded_ms: float | None


class Recorded(NamedTuple):
    """A call that was measured.

    Attributes:
        line: The call.
        stock_ms: What stock attention took.
        stock_is_right: Its result was near float64.
        alone: The choice with torch alone.
        everything: The choice with the other packages installed too.
    """

    line: str
    stock_ms: float
    stock_is_right: bool
    alone: Choice
    everything: Choice


class Measured(NamedTuple):
    """The calls by their names in the file, and where they were measured."""

    card: str
    date: str
    versions: str
    calls: dict[str, Recorded]


def measured(tables: Tables) -> Measured:
    """Return every call of the file, decided with these tables."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    alone, everything = (Host.model_validate(found[name]) for name in ("alone", "everything"))
    calls = {
        name: Recorded(
            call["line"],
            call["stock_ms"],
            call["stock_is_right"],
            _choice(call, alone, tables),
            _choice(call, everything, tables),
        )
        for name, call in found["calls"].items()
    }
    versions = ", ".join(f"{name} {version}" for name, version in everything.versions.items())
    return Measured(everything.device_name, found["date"], versions, calls)


def _choice(call: dict[str, Any], host: Host, tables: Tables) -> Choice:
    decision = decide(parse(call["line"]), host, tables, advise=False)
    if decision.selected is None:
        return Choice(None, None, None)
    predicted = decision.verdict(decision.selected).predicted_ms
    return Choice(decision.selected, predicted, call["ms"].get(decision.selected))
