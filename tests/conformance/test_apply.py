"""A report becomes evidence of the rows that hold, and the rest of their files stays."""

from __future__ import annotations

import re
import shutil
from difflib import unified_diff

import pytest

from attnroute.cli import main
from attnroute.conformance.apply import apply
from attnroute.conformance.report import Entry, Report, Result
from attnroute.conformance.trials import Outcome, Trial
from attnroute.errors import ArgumentError
from attnroute.question.host import Host
from attnroute.tables.folders import Tables
from attnroute.tables.read import shipped_folder

RIGHT = Result.of(Trial(line="bf16 b1 hq1 sq8 d8", device="cpu", backend="flash"), Outcome(status="right"))


def entry(rule, backend, verdict="holds", tried=True):
    return Entry(rule=rule, backend=backend, verdict=verdict, inside=(RIGHT,) if tried else ())


def report(*entries):
    return Report(date="2026-11-29", host=Host(arch="sm_90"), entries=entries)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(shipped_folder(), tmp_path / "tables")


def changes(folder):
    """The lines that were added, and those that were taken away, of all files."""
    found = []
    for path in sorted(shipped_folder().rglob("*.toml")):
        old = path.read_text(encoding="utf-8").splitlines()
        new = (folder / path.relative_to(shipped_folder())).read_text(encoding="utf-8").splitlines()
        found += [
            line for line in unified_diff(old, new, n=0) if line[:3] not in ("---", "+++") and line[0] in "+-"
        ]
    return found


def test_each_kind_of_file_gets_its_evidence_and_changes_in_nothing_else(folder):
    rows = {row.id: row for row in Tables((folder,)).all_rows()}
    own, several = "cpu/flash/causal-nan-scale", "any/fa2/diagonal-at-bottom-right"
    assert rows[several].file.stem == "several"
    applied = apply(report(entry(own, "flash"), entry(several, "fa2")), "card", Tables((folder,)))
    assert sorted(applied.written) == sorted([own, several])
    plus = [line for line in changes(folder) if line[0] == "+"]
    assert len(plus) == 2
    assert any(line.endswith(', { kind = "measured", ref = "card", date = 2026-11-29 }]') for line in plus)
    assert '+    { file = "any/fa2", kind = "measured", ref = "card", date = 2026-11-29 },' in plus
    after = {row.id: row.rule for row in Tables((shutil.copytree(folder, folder / "again"),)).all_rows()}
    for rule in (own, several):
        assert after[rule].evidence[-1].ref == "card"
        assert len(after[rule].evidence) == len(rows[rule].rule.evidence) + 1


def test_every_row_can_get_evidence(folder):
    rows = [row.id for row in Tables((folder,)).all_rows()]
    applied = apply(report(*(entry(rule, "flash") for rule in rows)), "card", Tables((folder,)))
    assert applied.written
    assert len(applied.written) == len(rows)
    item = r'\{ (?:file = "[\w/]+", )?kind = "measured", ref = "card", date = 2026-11-29 \}'
    for path in folder.rglob("*.toml"):
        text = re.sub(rf", {item}|    {item},\n", "", path.read_text(encoding="utf-8"))
        assert text == (shipped_folder() / path.relative_to(folder)).read_text(encoding="utf-8"), path
    again = apply(
        report(entry(rows[0], "flash")), "card", Tables((shutil.copytree(folder, folder / "again"),))
    )
    assert (again.written, again.known) == ([], [rows[0]])


def test_a_row_that_fails_for_one_backend_gets_none(folder):
    shared = "shared/left_out_finite/zero-times-nan"
    entries = [
        entry(shared, "flash"),
        entry(shared, "cudnn", "too loose"),
        entry("cpu/flash/dtype", "flash", "too strict"),
    ]
    applied = apply(report(*entries), "card", Tables((folder,)))
    assert applied.written == []
    assert len(applied.others) == 3
    assert changes(folder) == []


def test_a_backend_that_was_not_tried_says_nothing_against_a_row(folder):
    shared = "shared/left_out_finite/zero-times-nan"
    entries = [entry(shared, "flash"), entry(shared, "te", "not testable here", tried=False)]
    assert apply(report(*entries), "card", Tables((folder,))).written == [shared]


def test_what_a_measurement_leaves_open_stands_beside_it(folder):
    rows = {row.id: row.rule for row in Tables((folder,)).all_rows()}
    argued, one_side = "cpu/flash/causal-nan-scale", "cpu/flash/dtype"
    entries = [
        entry(argued, "flash", "argued"),
        entry(one_side, "flash").changed(reason="no call was found that the row rejects"),
    ]
    assert (
        set(apply(report(*entries), "card", Tables((folder,))).written) == {argued, one_side} <= rows.keys()
    )
    after = {r.id: r.rule for r in Tables((shutil.copytree(folder, folder / "again"),)).all_rows()}
    notes = {rule: after[rule].evidence[-1].note for rule in (argued, one_side)}
    assert notes == {argued: "what it takes; what it refuses is right too", one_side: "what it takes alone"}


def test_the_share_counts_rows_that_apply_and_nothing_is_written_without_leave(folder):
    tables = Tables((folder,))
    measured = next(
        row.id for row in tables.all_rows() if any(e.kind == "measured" for e in row.rule.evidence)
    )
    bare = next(row.id for row in tables.all_rows() if all(e.kind != "measured" for e in row.rule.evidence))
    entries = [
        entry(measured, "flash", "too strict"),
        entry("cpu/flash/dtype", "flash"),
        entry(bare, "flash", "not testable here", tried=False),
        entry("any/te/dtype", "te", "not installed", tried=False),
    ]
    applied = apply(report(*entries), "card", tables, write=False)
    assert (sorted(applied.measured), applied.unmeasured) == (sorted([measured, "cpu/flash/dtype"]), [bare])
    assert applied.written == ["cpu/flash/dtype"]
    assert changes(folder) == []


def test_evidence_in_another_form_is_left_alone(folder):
    path = folder / "cpu" / "flash.toml"
    text = path.read_text(encoding="utf-8").replace("evidence = [{ kind", "evidence=[ { kind")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match="add it by hand"):
        apply(report(entry("cpu/flash/dtype", "flash")), "card", Tables((folder,)))
    assert path.read_text(encoding="utf-8") == text


def test_a_report_that_evidence_cannot_name_is_refused(tmp_path, capsys):
    report().write(tmp_path / "card.json")
    assert main(["conformance", "--apply", str(tmp_path / "card.json")]) == 2
    assert "requires a report in" in capsys.readouterr().err


def test_a_report_is_read_as_it_was_written(tmp_path):
    wrong = Result.of(RIGHT.trial, Outcome(status="wrong", said="by a half"))
    made = report(
        entry("cpu/flash/dtype", "flash"), Entry(rule="a/b/c", backend="d", verdict="holds", outside=(wrong,))
    )
    made.write(tmp_path / "r.json")
    assert Report.read(tmp_path / "r.json") == made
    assert wrong.command.startswith("attnroute conformance --call")
    assert RIGHT.command == ""
