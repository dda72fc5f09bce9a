"""Widths and colours: on a terminal, in a pipe, and where variables ask for them or forbid them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from attnroute.cli._terminal import columns, has_colours, painted

EXPLAIN = ["explain", "bf16 b1 hq1 sq704 d64 dense=704x704 train", "--arch", "h100", "--with", "torch=2.13"]
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def on_a_terminal(words, **variables):
    """Return what a command prints on a terminal of its own."""
    ours, theirs = pty.openpty()
    settled = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI")}
    with subprocess.Popen(
        [sys.executable, "-m", "attnroute", *words],
        stdout=theirs,
        stderr=theirs,
        env={**settled, "TERM": "xterm", **variables},
    ) as process:
        os.close(theirs)
        read = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so where nobody writes any more.
                break
            if not part:
                break
            read += part
        os.close(ours)
    assert process.returncode == 0
    return read.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_has_colours_and_lines_that_fit(width) -> None:
    text = on_a_terminal(EXPLAIN, COLUMNS=str(width))
    assert "\x1b[1;32mefficient\x1b[0m" in text
    assert "\x1b[31mwrong result\x1b[0m" in text
    lines = [line for line in ESCAPE.sub("", text).splitlines() if not line.startswith("call ")]
    assert width - 12 <= max(map(len, lines)) <= width


@pytest.mark.parametrize(
    "variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}]
)
def test_a_terminal_has_no_colours_where_that_is_asked_for(variables) -> None:
    assert "\x1b" not in on_a_terminal(EXPLAIN, **variables)


def test_a_pipe_has_none_and_the_usual_width(capfd) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "attnroute", *EXPLAIN]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, env=clean).stdout
    forced = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**clean, "FORCE_COLOR": "1"}
    ).stdout
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" in forced
    assert ESCAPE.sub("", forced) == plain


def test_variables_are_read_in_their_usual_order() -> None:
    assert not has_colours({"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert has_colours({"NO_COLOR": "", "FORCE_COLOR": "1"})
    assert not has_colours({})  # pytest's stdout is no terminal.


def test_a_width_that_nobody_can_read_is_not_taken(monkeypatch) -> None:
    for stated, taken in (("7", 40), ("100", 100), ("900", 120)):
        monkeypatch.setenv("COLUMNS", stated)
        assert columns() == taken
    assert columns(most=1000) == 900


def test_colours_change_no_letter(monkeypatch) -> None:
    text = "selected   none: x\nfirst call of [any/a/b]\na-long-backend-name eligible\n\n           crash: y"
    assert painted(text) == text
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mnone\x1b[0m" in painted(text)
    assert ESCAPE.sub("", painted(text)) == text
