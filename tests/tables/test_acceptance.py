"""The limit rows and feature answers reproduce what torch's own checks accept, as its release binaries said.

Faults and repairs are set aside: torch's checks know neither. Where the tables differ on purpose, the answer
stands in `data/deviations.json` and in docs/deviations.md.
"""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest

from attnroute.engine.evaluate import STOCK_SCOPES, Form, Prepared, outcomes_of
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.load import load
from attnroute.tables.versions import contains

DATA = Path(__file__).parent / "data"
DEVIATIONS_PAGE = Path(__file__).parents[2] / "docs" / "deviations.md"
BACKENDS = ("flash", "cudnn", "efficient")
NOT_OF_TORCH = ("math", "chunked", "flex", "fa2", "fa3", "fa4", "cudnn_fe", "te", "triton")
"""Beginnings of the files about what torch's selector does not choose, or never refuses."""
TABLES = load()
RECORDS = [
    json.loads(line)
    for line in gzip.decompress((DATA / "torch_acceptance.jsonl.gz").read_bytes())
    .decode("utf-8")
    .splitlines()
]
CALLS = {
    name: Call.model_validate(case["call"])
    for name, case in json.loads((DATA / "torch_acceptance_calls.json").read_text(encoding="utf-8")).items()
}
FORMS = {name: Form(call) for name, call in CALLS.items()}
DEVIATIONS = json.loads((DATA / "deviations.json").read_text(encoding="utf-8"))
RELEASES = sorted({record["torch"] for record in RECORDS})
LETTERS = {True: "y", False: "n"}


@cache
def has_features(arch, backend, name):
    answers = TABLES.features(arch, backend)
    return all(answers[need].answer.value is True for need in FORMS[name].features)


@cache
def active_rows(host, backend):
    """The limit rows of torch's selector that hold for these versions; few hosts differ in them."""
    return tuple(
        row
        for row in TABLES.rules(host.arch, backend)
        if row.rule.kind == "limit"
        and row.rule.scope in STOCK_SCOPES
        and all(contains(ranges, dist, host.versions[dist]) for dist, ranges in row.rule.versions.items())
    )


class Judge:
    """Answers one call under one set of rows once, whichever hosts have that set."""

    def __init__(self):
        self.known = {}

    def accepts(self, name, host, backend):
        rows = active_rows(host, backend)
        key = (name, tuple(row.id for row in rows))
        if key not in self.known:
            prepared = Prepared(backend, host, TABLES.backends[backend], rows)
            self.known[key] = not {"fail", "unknown"} & set(outcomes_of(prepared, FORMS[name]))
        return self.known[key] and has_features(host.arch, backend, name)


JUDGE = Judge()


def key_of(record, name, backend):
    return {
        "torch": record["torch"],
        "cudnn": record["cudnn"],
        "arch": record["arch"],
        "case": name,
        "backend": backend,
    }


def differences(records):
    """Every recorded answer that the tables do not give, as the keys of data/deviations.json."""
    found = []
    for record in records:
        host = Host(arch=record["arch"], versions={"torch": record["torch"], "cudnn": record["cudnn"]})
        for name, letters in record["cases"].items():
            for backend, letter in zip(BACKENDS, letters, strict=True):
                if LETTERS[JUDGE.accepts(name, host, backend)] != letter:
                    found.append({**key_of(record, name, backend), "recorded": letter})
    return found


def test_the_recordings_are_all_here():
    answers = sum(len(record["cases"]) for record in RECORDS) * len(BACKENDS)
    assert (len(RECORDS), len(CALLS), answers) == (1176, 124, 157356)


@pytest.mark.parametrize("release", RELEASES)
def test_release_accepts_what_the_tables_say(release):
    """A deviation that is listed must be there, and none that is not."""
    listed = [{k: v for k, v in d.items() if k != "because"} for d in DEVIATIONS if d["torch"] == release]
    found = differences(record for record in RECORDS if record["torch"] == release)
    assert found == listed


def test_a_row_that_is_taken_away_is_missed(monkeypatch):
    """The comparison can fail: without FLASH's limit on head_dim, the tables accept more than torch."""
    rows = TABLES.rules

    def fewer(arch, backend):
        return tuple(row for row in rows(arch, backend) if row.rule.name != "head-dim-max")

    record = next(r for r in RECORDS if r["torch"] == "2.11.0+cu130" and r["arch"] == "sm_80")
    active_rows.cache_clear()
    monkeypatch.setattr(type(TABLES), "rules", lambda _, arch, backend: fewer(arch, backend))
    cases = {d["case"] for d in differences([record]) if d["backend"] == "flash"}
    active_rows.cache_clear()
    assert {"D264", "D320", "D512"} <= cases


def test_deviations_are_explained_on_the_page():
    page = DEVIATIONS_PAGE.read_text(encoding="utf-8")
    assert f"{len(DEVIATIONS)} of {157356} recorded answers differ" in page
    for deviation in DEVIATIONS:
        assert deviation["because"], deviation
        assert deviation["case"] in page


def test_the_page_lists_every_row_that_differs_from_torch():
    """Faults, what only the operator needs, what only torch's selector asks; math it never refuses.

    It knows nothing of chunked, flex and other packages.
    """
    differing = {
        row.id
        for row in TABLES.all_rows()
        if (row.rule.kind != "limit" or row.rule.scope != "call")
        and not row.id.split("/")[1].startswith(NOT_OF_TORCH)
    }
    listed = re.findall(r"^\| `([^`]+)` \|", DEVIATIONS_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(differing)
