"""`attnroute run`: a script or module runs as Python runs it, with its calls routed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnroute.api.recording import Recording
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


STOCK = """
import sys
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Layer(nn.Module):
    def forward(self, query):
        return scaled_dot_product_attention(query, query, query, is_causal=True)

model = nn.Sequential(Layer(), Layer())
for _ in range(int(sys.argv[2])):
    model(torch.randn(1, 2, 33, 16))
print(sys.argv[1:])
if sys.argv[3:]:
    raise ValueError("mine")
"""


@pytest.mark.parametrize("routes", [True, False], ids=["routed", "as it is"])
def test_a_trace_says_which_kernel_ran_in_each_module(capsys, routes):
    Path("stock.py").write_text(STOCK, encoding="utf-8")
    options = ["--trace", "--out", "calls.json", *([] if routes else ["--no-route"])]
    assert main(["run", *options, "stock.py", "--trace", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "['--trace', '3']\n"
    assert "attention: 6 calls" in err
    assert ("0-1" in err, "torch's flash" in err) == (True, not routes)
    found = Recording.from_file(Path("calls.json"))
    (call,) = found.calls if routes else found.stock
    assert (call.backend, call.call.seqlen_q, call.count) == ("flash", 33, 6)
    assert [(p.model, p.module, p.count) for p in call.places] == [("Sequential", n, 3) for n in "01"]
    assert (found.stock if routes else found.calls) == ()


def test_a_script_that_fails_leaves_its_trace(capsys):
    Path("stock.py").write_text(STOCK, encoding="utf-8")
    assert main(["run", "--out", "calls.json", "stock.py", "x", "1", "fail"]) == 1
    err = capsys.readouterr().err
    assert "ValueError: mine" in err
    assert "attention: 2 calls" in err
    assert [call.count for call in Recording.from_file(Path("calls.json")).calls] == [2]


def test_a_script_that_ends_itself_keeps_its_exit_code_and_its_trace():
    Path("ends.py").write_text("raise SystemExit(7)", encoding="utf-8")
    command = [sys.executable, "-m", "attnroute", "run", "--trace", "ends.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 7
    assert "no attention call was seen" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "got no command; write it behind run."),
        (["nowhere.py"], 'got "nowhere.py"; name a script that exists'),
    ],
)
def test_what_it_cannot_run_is_one_sentence(capsys, words, said):
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_says_what_is_not_routed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    assert "Threads and processes that it starts are not routed." in capsys.readouterr().out
