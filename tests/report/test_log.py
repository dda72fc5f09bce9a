"""Each mode of ATTNROUTE_EXPLAIN prints what it says, and nothing more."""

from __future__ import annotations

import pytest
from support.report_examples import CALL, GIB, decision, verdict

from attnroute.memory import reset
from attnroute.report import log
from attnroute.report.log import announce
from attnroute.report.text import render_decision


@pytest.fixture(autouse=True)
def _nothing_announced():
    reset()
    yield
    reset()


def select(backend):
    return decision(verdict("alpha"), verdict("beta"), verdict("gamma"), order=(backend, "gamma"))


def announced(mode, backends, capsys):
    """Return the backends of the lines that a row of decisions printed."""
    for backend in backends:
        announce(select(backend), mode)
    out, err = capsys.readouterr()
    assert out == ""
    return [line.split()[1] for line in err.splitlines()]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("off", []),
        ("once", ["alpha", "beta"]),
        ("changes", ["alpha", "beta", "alpha"]),
    ],
)
def test_modes_choose_which_decisions_are_said(mode, expected, capsys) -> None:
    assert announced(mode, ["alpha", "alpha", "beta", "alpha"], capsys) == expected


def test_all_prints_every_explanation_whole(capsys) -> None:
    given = select("alpha")
    announce(given, "all")
    announce(given, "all")
    assert capsys.readouterr().err == f"{render_decision(given, verbose=True)}\n" * 2


def test_a_line_names_backend_preparations_call_machine_and_reason() -> None:
    prepared = verdict("alpha", repairs=("expand_kv",), extra_bytes=GIB)
    given = decision(prepared, order=("alpha",))
    asked = f"alpha, after expand_kv (1 GiB more), for {CALL} on sm_90"
    assert log.log_line(given) == f"attnroute: {asked}: the only one that may run this call"
    assert log.log_line(select("beta")).startswith(f"attnroute: beta for {CALL} on sm_90: first of those")
