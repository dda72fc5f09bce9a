"""`attnroute trace`: a script or module runs as Python runs it, and its calls are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnroute.api.trace import Recording
from attnroute.cli import main

SCRIPT = """
import sys
import torch
import attnroute
import neighbour

query = torch.randn(1, 2, neighbour.SEQLEN, 16)
for _ in range(int(sys.argv[1])):
    attnroute.attention(query, query, query, is_causal=True)
print(__name__, sys.argv[1:], file=sys.stderr)
if sys.argv[2:]:
    raise {error}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    Path("neighbour.py").write_text("SEQLEN = 33\n", encoding="utf-8")
    Path("script.py").write_text(SCRIPT.format(error="ValueError('mine')"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("command", [["python", "script.py"], ["script.py"], ["python", "-m", "script"]])
def test_a_script_runs_and_its_calls_are_written(folder, capsys, command, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["trace", "--out", "found.json", "--", *command, "4"]) == 0
    (call,) = Recording.from_file(folder / "found.json").calls
    assert (call.call.seqlen_q, call.count) == (33, 4)
    told = capsys.readouterr().err
    assert "__main__ ['4']" in told
    assert "4 calls of 1 kinds are in found.json" in told


def test_a_script_that_fails_shows_its_error_and_leaves_its_calls(folder, capsys):
    assert main(["trace", "--", "script.py", "2", "fail"]) == 1
    assert "ValueError: mine" in capsys.readouterr().err
    assert [c.count for c in Recording.from_file(folder / "attnroute-calls.json").calls] == [2]


def test_a_script_that_ends_itself_keeps_its_exit_code(folder):
    Path("script.py").write_text(SCRIPT.format(error="SystemExit(7)"), encoding="utf-8")
    command = [sys.executable, "-m", "attnroute", "trace", "--", "script.py", "1", "end"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 7
    assert [c.count for c in Recording.from_file(folder / "attnroute-calls.json").calls] == [1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace"], "got no command; write it behind --."),
        (["trace", "--", "nowhere.py"], 'got "nowhere.py"; name a file or a module.'),
        (["trace", "--", sys.executable, "-c", "pass"], 'got "-c pass"'),
        (["trace", "--", "python9", "script.py"], 'got "python9"'),
    ],
)
def test_what_it_cannot_run_is_one_sentence(folder, capsys, words, said):
    assert main(words) == 2
    assert said in capsys.readouterr().err
