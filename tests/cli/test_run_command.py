"""`attnroute run`: a script or module runs as Python runs it, with its calls routed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnroute.cli import main

SCRIPT = """
import sys
import torch
import attnroute
from torch.nn.functional import scaled_dot_product_attention

query = torch.randn(1, 2, 33, 16)
with attnroute.trace() as trace:
    scaled_dot_product_attention(query, query, query)
print(__name__, sys.argv[1:], [call.count for call in trace.calls])
if sys.argv[2:]:
    raise ValueError("mine")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("routed.py").write_text(SCRIPT, encoding="utf-8")


@pytest.mark.parametrize("command", [["routed.py"], ["-m", "routed"], ["--", "python", "routed.py"]])
def test_calls_of_a_script_are_routed(capsys, command, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["run", *command, "4"]) == 0
    assert capsys.readouterr().out == "__main__ ['4'] [1]\n"


def test_an_error_is_shown_and_sets_the_exit_code(capsys):
    assert main(["run", "routed.py", "4", "fail"]) == 1
    assert "ValueError: mine" in capsys.readouterr().err


def test_an_exit_code_is_the_scripts():
    Path("ends.py").write_text("raise SystemExit(7)", encoding="utf-8")
    command = [sys.executable, "-m", "attnroute", "run", "ends.py"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "got no command; write it behind run."), (["nowhere.py"], 'got "nowhere.py"; name a file or')],
)
def test_what_it_cannot_run_is_one_sentence(capsys, words, said):
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_says_what_is_not_routed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    assert "Threads and processes that it starts are not routed." in capsys.readouterr().out
