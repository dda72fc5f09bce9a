"""`attnroute matrix`: every cell is what `decide` says, in text, Markdown and JSON."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from attnroute.cli import main
from attnroute.cli.matrix import CALLS
from attnroute.engine.decide import decide
from attnroute.question.line import parse
from attnroute.report.json import SCHEMA_VERSION
from attnroute.report.matrix import SIGNS, word_of
from attnroute.tables.load import load
from attnroute.tables.machines import machine

WORDS = ["matrix", "--arch", "h100", "--with", "torch=2.11"]
BACKENDS = list(load().backends)


@pytest.fixture(scope="module")
def decisions():
    host = machine("h100", load(), argument="--arch", given={"torch": "2.11"})
    return {name: decide(parse(line), host) for name, line in CALLS.items()}


def table_of(out):
    """Return the symbols of each call's row."""
    rows = {name: line for line in out.splitlines() for name in CALLS if line.startswith(f"{name} ")}
    return {name: line.removeprefix(name).split() for name, line in rows.items()}


@pytest.mark.parametrize("width", ["80", "120"])
def test_each_symbol_is_the_verdict_of_its_call_and_backend(width, decisions, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(WORDS) == 0
    out = capsys.readouterr().out
    told = {name: [SIGNS[word_of(v, d)].symbol for v in d.verdicts] for name, d in decisions.items()}
    assert table_of(out) == told
    assert max(map(len, out.splitlines())) <= int(width)
    assert {symbol for row in told.values() for symbol in row} <= set(out.partition("bias gradient")[2])


def test_the_column_of_a_backend_stands_below_its_name(decisions, monkeypatch, capsys) -> None:
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        main(WORDS)
        lines = capsys.readouterr().out.splitlines()
        row = next(line for line in lines if line.startswith("training"))
        head = next(line for line in lines if "flex_fa4" in line)
        at = row.index(SIGNS[word_of(decisions["training"].verdict("cudnn"), decisions["training"])].symbol)
        assert "cudnn" in next(line for line in lines if "cudnn" in line[at - 2 : at + 5])
        assert head.index("flex_fa4") <= len(row)


def test_the_signs_say_what_stands_between_a_backend_and_a_call(decisions) -> None:
    found = {word_of(v, d): (v, d) for d in decisions.values() for v in d.verdicts}
    assert found.keys() >= {"selected", "eligible", "prepared", "slow", "absent", "unknown", "rejected"}
    for word, (verdict, _) in found.items():
        assert (word in ("rejected", "fault")) is (verdict.status == "rejected")
        assert (word == "absent") is (verdict.status == "unavailable")
    verdict, decision = found["prepared"]
    assert (verdict.status, bool(verdict.repairs)) == ("eligible", True)
    broken = decisions["softcap"].verdict("flash")
    faults = tuple(f.model_copy(update={"kind": "crash"}) for f in broken.findings)
    assert word_of(broken.model_copy(update={"findings": faults}), decision) == "fault"


def test_a_short_word_for_each_cell_and_the_calls_are_told_where_that_is_asked_for(decisions, capsys) -> None:
    main([*WORDS, "-v"])
    out = capsys.readouterr().out
    assert all(f"{line}\n" in out for line in CALLS.values())
    assert "    efficient  eligible + materialize_mask + cast_mask\n" in out
    assert "    flash      rejected: feature-softcap\n" in out


def test_json_has_what_each_call_gets(decisions, capsys) -> None:
    assert main([*WORDS, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema_version"], data["calls"]) == (SCHEMA_VERSION, CALLS)
    (one,) = data["machines"]
    assert one["selected"] == {name: d.selected for name, d in decisions.items()}
    assert one["host"]["assumed"]["cudnn"] == "what its default wheel brings"
    cells = one["cells"]["training"]
    assert {name: cell["is"] for name, cell in cells.items()} == {
        v.backend: word_of(v, decisions["training"]) for v in decisions["training"].verdicts
    }
    main(["matrix", "--json"])
    machines = json.loads(capsys.readouterr().out)["machines"]
    assert [m["host"]["arch"] for m in machines] == list(load().arch_names)
    assert "cells" not in machines[0]


def test_markdown_is_a_table(decisions, capsys) -> None:
    assert main([*WORDS, "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| call | {' | '.join(BACKENDS)} |"
    cells = [SIGNS[word_of(v, decisions["prefill"])].symbol for v in decisions["prefill"].verdicts]
    assert lines[2] == f"| prefill | {' | '.join(cells)} |"
    main(["matrix", "--format", "markdown"])
    assert "sm_100<br>sm_103" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_matrix_of_every_architecture_fits_and_says_what_is_selected(width, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["matrix"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    names = {word for line in out.splitlines() for word in line.split()}
    assert names >= set(load().arch_names)
    told = [name for block in out.split("\n\n") for name in table_of(block).get("training", [])]
    hosts = [machine(arch, load(), argument="--arch") for arch in load().arch_names]
    expected = {decide(parse(CALLS["training"]), host).selected for host in hosts}
    assert set(told) == expected


def test_colours_change_no_letter_of_a_table(monkeypatch, capsys) -> None:
    main(WORDS)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(WORDS)
    painted = capsys.readouterr().out
    assert "\x1b[32m●\x1b[0m" in painted
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain


def test_letters_stand_where_the_output_has_no_symbols(monkeypatch) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    main(WORDS)
    plain.flush()
    out = plain.buffer.getvalue().decode("ascii")
    assert "\\u" not in out
    assert "* runs this call" in out
