"""Decisions against what public bug reports demand of a router; corrected cases carry a note."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from attnroute.engine.decide import decide
from attnroute.engine.evaluate import missing_needs
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import companions_of
from attnroute.tables.versions import comparable

DATA = Path(__file__).parent / "data"
CASES = [json.loads(line) for line in (DATA / "public.jsonl").read_text(encoding="utf-8").splitlines()]
CHUNKED_COUNTS_FOR = {"math", "efficient"}
WAYS = {"varlen": "to_varlen", "lse": "sink_from_lse"}
"""What reports call a way to run a call, and the preparation that goes it: then the kernel matters less."""


def machine(number):
    """The reporter's machine, with the compiler that every installation of that torch has."""
    host = Host.model_validate(CASES[number]["host"])
    if host.arch == "cpu":
        return host.with_versions({"c++": "present", "avx2": "present", **host.versions})
    if "torch" not in host.versions:
        return host
    wheel = companions_of(str(comparable("torch", host.versions["torch"])), shipped_folder())
    return host.with_versions({"triton": wheel.triton if wheel else "present", **host.versions})


@cache
def decided(number):
    return decide(Call.model_validate(CASES[number]["call"]), machine(number), load())


def is_plain(verdict):
    """Whether a kernel may run as it is: neither the call nor its options need a change."""
    return verdict.status == "eligible" and not verdict.repairs and not verdict.options


def wrongly_plain(number):
    """Backends that the report rules out and that are nevertheless eligible as they are."""
    named = {e["backend"] for e in CASES[number]["expect"]["not_plainly_eligible"]}
    return [v.backend for v in decided(number).verdicts if v.backend in named and is_plain(v)]


def told_of(number):
    """Backends that the report wants rejected or let through, with what each one's verdict is."""
    expect = CASES[number]["expect"]
    named = [e["backend"] for e in expect.get("rejected", [])] + expect.get("not_rejected", [])
    return {backend: decided(number).verdict(backend).status for backend in named}


def wrongly_taken(number):
    """Backends that no preparation makes right and that are not rejected: not installed does not count."""
    said = told_of(number)
    return [
        e["backend"] for e in CASES[number]["expect"].get("rejected", []) if said[e["backend"]] != "rejected"
    ]


def wrongly_rejected(number):
    """Backends that a row turns away though they are right."""
    said = told_of(number)
    return [
        backend for backend in CASES[number]["expect"].get("not_rejected", []) if said[backend] == "rejected"
    ]


def acceptable(number):
    """The backends that may be selected; None where no listed one is in the tables and installed."""
    case = CASES[number]
    listed = [e["backend"] for e in case["expect"]["selected_among"]]
    host, tables = machine(number), load()
    there = [b for b in listed if b in tables.backends and not missing_needs(host, tables.info(host.arch, b))]
    if listed and not there:
        return None
    return {*listed, "chunked"} if CHUNKED_COUNTS_FOR & set(listed) else {*listed}


def well_selected(number):
    allowed, decision = acceptable(number), decided(number)
    if not allowed or decision.selected is None:
        return allowed is None or (not allowed and decision.selected is None)
    listed = {WAYS.get(e.get("how")) for e in CASES[number]["expect"]["selected_among"]}
    goes_a_listed_way = bool(listed & set(decision.verdict(decision.selected).repairs))
    return decision.selected in allowed or goes_a_listed_way


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["id"] for case in CASES])
def test_report_is_heeded(number):
    assert wrongly_plain(number) == []
    assert wrongly_taken(number) == []
    assert wrongly_rejected(number) == []
    assert well_selected(number), (decided(number).selected, acceptable(number))


def test_corrected_cases_say_why():
    noted = {case["id"] for case in CASES if "note" in case}
    assert noted == {"C13b", "C18c", "C19d", "C22b", "C28", "C29"}


def test_score_is_printed(capsys):
    judged = [n for n in range(len(CASES)) if acceptable(n) is not None]
    heeded = [n for n in range(len(CASES)) if not wrongly_plain(n)]
    right = [n for n in judged if well_selected(n)]
    with capsys.disabled():
        print(f"\npublic cases: {len(heeded)} of {len(CASES)} reports heeded, ", end="")  # noqa: T201
        print(f"{len(right)} of {len(judged)} selections as listed")  # noqa: T201
    assert len(judged) >= 60
