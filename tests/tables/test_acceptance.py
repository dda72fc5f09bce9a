"""The limit rows and feature answers reproduce what torch's own checks accept, as its release binaries said.

Faults and repairs are set aside: torch's checks know neither. Where the tables differ on purpose, the answer
stands in `data/deviations.json` and in docs/deviations.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attnroute.audit.torch import BACKENDS, Judge, recorded
from attnroute.cli import main
from attnroute.tables.load import load

DATA = Path(__file__).parent / "data"
DEVIATIONS_PAGE = Path(__file__).parents[2] / "docs" / "deviations.md"
NOT_OF_TORCH = ("math", "chunked", "flex", "fa2", "fa3", "fa4", "cudnn_fe", "te", "triton")
"""Beginnings of the files about what torch's selector does not choose, or never refuses."""
TABLES = load()
RECORDS, CALLS = recorded(DATA)
DEVIATIONS = json.loads((DATA / "deviations.json").read_text(encoding="utf-8"))
RELEASES = sorted({record.torch for record in RECORDS})


def differences(records):
    """Every recorded answer that the tables do not give, as the keys of data/deviations.json."""
    judge = Judge(TABLES, CALLS)
    return [
        {
            "torch": record.torch,
            "cudnn": record.cudnn,
            "arch": record.arch,
            "case": answer.case,
            "backend": answer.backend,
            "recorded": "y" if answer.accepted else "n",
        }
        for record in records
        for answer in judge.answers(record)
        if answer.accepted == bool(answer.rows)
    ]


def test_the_recordings_are_all_here():
    answers = sum(len(record.cases) for record in RECORDS) * len(BACKENDS)
    assert (len(RECORDS), len(CALLS), answers) == (1440, 124, 255564)


@pytest.mark.parametrize("release", RELEASES)
def test_release_accepts_what_the_tables_say(release):
    """A deviation that is listed must be there, and none that is not."""
    listed = [{k: v for k, v in d.items() if k != "because"} for d in DEVIATIONS if d["torch"] == release]
    found = differences(record for record in RECORDS if record.torch == release)
    assert found == listed


def test_a_row_that_is_taken_away_is_missed(monkeypatch):
    """The comparison can fail: without FLASH's limit on head_dim, the tables accept more than torch."""
    rows = TABLES.rules

    def fewer(arch, backend):
        return tuple(row for row in rows(arch, backend) if row.rule.name != "head-dim-max")

    record = next(r for r in RECORDS if r.torch == "2.11.0+cu130" and r.arch == "sm_80")
    monkeypatch.setattr(type(TABLES), "rules", lambda _, arch, backend: fewer(arch, backend))
    cases = {d["case"] for d in differences([record]) if d["backend"] == "flash"}
    assert {"D264", "D320", "D512"} <= cases


def test_deviations_are_explained_on_the_page():
    page = DEVIATIONS_PAGE.read_text(encoding="utf-8")
    assert f"{len(DEVIATIONS)} of {255564} recorded answers differ" in page
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


def test_the_audit_says_how_many_answers_agree(capsys):
    assert main(["tables", "audit", "torch", "--version", "2.11.0+cu130"]) == 0
    assert re.search(
        r"^torch 2.11.0\+cu130: (\d+) answers, \1 judged alike, 0 too loose", capsys.readouterr().out
    )


def test_the_audit_names_calls_that_the_tables_accept_and_torch_refuses(monkeypatch, capsys):
    rows = type(TABLES).rules
    fewer = lambda self, *at: tuple(row for row in rows(self, *at) if row.rule.name != "head-dim-max")  # noqa: E731
    monkeypatch.setattr(type(TABLES), "rules", fewer)
    assert main(["tables", "audit", "torch", "--version", "2.11.0+cu130"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "too loose sm_80: fp16 b2 hq8 hkv8 sq128 skv128 d264: flash refuses D264 with cuDNN" in said


def test_the_audit_asks_for_a_release_that_was_recorded(capsys):
    assert main(["tables", "audit", "torch", "--version", "1.0"]) == 2
    assert "requires a release that was recorded (2.10.0+cu128" in capsys.readouterr().err
