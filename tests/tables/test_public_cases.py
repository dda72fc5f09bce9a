"""Decisions against what public bug reports demand of a router; corrected cases carry a note."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from attnroute.call import Call
from attnroute.engine.decide import decide
from attnroute.engine.evaluate import missing_needs
from attnroute.host import Host
from attnroute.tables.load import load

DATA = Path(__file__).parent / "data"
CASES = [json.loads(line) for line in (DATA / "public.jsonl").read_text(encoding="utf-8").splitlines()]
CHUNKED_COUNTS_FOR = {"math", "efficient"}


@cache
def decided(number):
    case = CASES[number]
    return decide(Call.model_validate(case["call"]), Host.model_validate(case["host"]), load())


def wrongly_plain(number):
    """Backends that the report rules out and that are nevertheless eligible without any preparation."""
    named = {e["backend"] for e in CASES[number]["expect"]["not_plainly_eligible"]}
    verdicts = decided(number).verdicts
    return [v.backend for v in verdicts if v.backend in named and v.status == "eligible" and not v.repairs]


def acceptable(number):
    """The backends that may be selected; None where no listed one is in the tables and installed."""
    case = CASES[number]
    listed = [e["backend"] for e in case["expect"]["selected_among"]]
    host = Host.model_validate(case["host"])
    known = load().backends
    if listed and not any(b in known and not missing_needs(host, known[b]) for b in listed):
        return None
    return {*listed, "chunked"} if CHUNKED_COUNTS_FOR & set(listed) else {*listed}


def well_selected(number):
    allowed = acceptable(number)
    selected = decided(number).selected
    return allowed is None or (selected in allowed if allowed else selected is None)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["id"] for case in CASES])
def test_report_is_heeded(number):
    assert wrongly_plain(number) == []
    assert well_selected(number), (decided(number).selected, acceptable(number))


def test_corrected_cases_say_why():
    noted = {case["id"] for case in CASES if "note" in case}
    assert noted == {"C13b", "C18c", "C19d", "C28", "C29"}


def test_score_is_printed(capsys):
    judged = [n for n in range(len(CASES)) if acceptable(n) is not None]
    heeded = [n for n in range(len(CASES)) if not wrongly_plain(n)]
    right = [n for n in judged if well_selected(n)]
    with capsys.disabled():
        print(f"\npublic cases: {len(heeded)} of {len(CASES)} reports heeded, ", end="")  # noqa: T201
        print(f"{len(right)} of {len(judged)} selections as listed")  # noqa: T201
    assert len(judged) >= 60
