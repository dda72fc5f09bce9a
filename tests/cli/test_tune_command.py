"""`attnroute tune`: from a recorded run to another choice in a new process, and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnroute
from attnroute.api.recording import Recording, TracedCall
from attnroute.api.tuned import Times, TuningFile
from attnroute.cli import main
from attnroute.memory import reset
from attnroute.tuning import tune

SCRIPT = """
import torch
import attnroute

query = torch.randn(2, 4, 64, 16)
for _ in range(7):
    attnroute.attention(query, query, query, is_causal=True)
"""
FEW = ("--backends", "flash,chunked")
"""Others compile for seconds."""
ASK = """
import torch
import attnroute

query = torch.randn(2, 4, 66, 16)
decision = attnroute.explain(query, query, query, is_causal=True)
print(decision.selected)
print(decision)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recorded run, where the user's data lie too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name, **_: str(tmp_path / "data" / name))
    query = torch.randn(2, 4, 64, 16)
    with attnroute.trace("attnroute-calls.json"):
        for _ in range(7):
            attnroute.attention(query, query, query, is_causal=True)
    reset()
    yield tmp_path
    reset()


def pretend(monkeypatch, **milliseconds):
    """Measure these times, and a second for every other backend."""

    def measure(steps, _device):
        times = {backend: milliseconds.get(backend, 1000.0) for backend in steps}
        return {backend: Times(device_ms=t, host_ms=t) for backend, t in times.items()}

    monkeypatch.setattr(tune, "timed", measure)


def test_what_changed_and_what_it_gains_is_printed_and_counts_from_then_on(folder, capsys, monkeypatch):
    pretend(monkeypatch, flash=1.0, chunked=0.25)
    assert main(["tune", *FEW]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "causal" in line and "│" in line]
    assert rows[0][-13:] == ["│", "7", "│", "flash", "│", "chunked", "│", "1", "│", "0.25", "│", "5.25", "│"]
    assert "1 of 1 kinds of calls get another backend: 5.25 ms per run" in out
    reset()
    query = torch.randn(2, 4, 64, 16)
    assert attnroute.explain(query, query, query, is_causal=True).selected == "chunked"
    with attnroute.trace() as trace:
        attnroute.attention(query, query, query, is_causal=True)
    assert [call.backend for call in trace.calls] == ["chunked"]


def test_a_run_of_commands_in_processes_of_their_own(tmp_path):
    """Record a script, tune it, and ask a new process: with the file, without, and with another version."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    env = {name: text for name, text in os.environ.items() if not name.startswith("ATTNROUTE_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def ran(*words, **more):
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    ran("-m", "attnroute", "run", "--out", "attnroute-calls.json", "script.py")
    assert "chunked" in ran("-m", "attnroute", "tune", "--out", "t.json", "--backends", "chunked,flash")
    # Whichever of the two is faster here, the file now says that chunked is by far.
    path = tmp_path / "t.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    (call,) = data["calls"].values()
    assert set(call["times"]) == {"chunked", "flash"}
    call["times"]["chunked"]["device_ms"] = call["times"]["chunked"]["host_ms"] = 1e-4
    path.write_text(json.dumps(data), encoding="utf-8")
    selected, _, text = ran("-c", ASK, ATTNROUTE_TUNING="t.json").partition("\n")
    assert selected == "chunked"
    assert "measured 0.0001 ms here by attnroute tune" in " ".join(text.split())
    selected, _, text = ran("-c", ASK, ATTNROUTE_TUNING="off").partition("\n")
    assert selected == "flash"
    assert "by attnroute tune" not in text
    data["host"]["versions"]["torch"] = "2.0.0"
    path.write_text(json.dumps(data), encoding="utf-8")
    selected, _, text = ran("-c", ASK, ATTNROUTE_TUNING="t.json").partition("\n")
    assert selected == "flash"
    assert f"measured with torch 2.0.0 and not {torch.__version__}" in " ".join(text.split())


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(folder, capsys):
    assert main(["tune", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "fp32 b2 hq4 hkv4 sq64 skv64 d16 causal (7 times): flash, chunked" in out
    assert not Path("data").exists()


def test_an_interrupt_keeps_what_there_is(folder, capsys, monkeypatch):
    def measure(steps, _device):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "timed", measure)
    assert main(["tune", *FEW, "--out", "t.json"]) == 130
    assert "interrupted; t.json has what was measured" in capsys.readouterr().out
    assert TuningFile.read(Path("t.json")).began == ()


def test_a_wrong_backend_is_an_exit_code(folder, capsys, monkeypatch):
    pretend(monkeypatch, flash=1.0)
    run = tune.gate.run

    def spoiled(problem, backend, *way):
        found = run(problem, backend, *way)
        return {name: t * 1.2 if backend == "chunked" else t for name, t in found.items()}

    monkeypatch.setattr(tune.gate, "run", spoiled)
    assert main(["tune", *FEW, "--out", "t.json"]) == 1
    assert "chunked is wrong and will not run such calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--calls", "nowhere.json"], "attnroute run --out FILE script.py"),
        (["--margin", "1"], "share"),
        (["--seconds", "-1"], "number of at least 0"),
        (["--backends", "flush"], 'got "flush"; did you mean "flash"?'),
    ],
)
def test_a_wrong_word_is_one_sentence(folder, capsys, words, said):
    assert main(["tune", *words]) == 2
    assert said in capsys.readouterr().err


def test_calls_of_a_device_that_is_not_here_are_refused(folder, capsys):
    call = TracedCall(line="bf16 b1 hq2 sq8 d16", device="cuda:1", backend="flash", count=1)
    Recording(hosts={}, calls=(call,)).save(Path("other.json"))
    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a GPU")
    assert main(["tune", "--calls", "other.json"]) == 2
    assert "requires recorded calls of a device that is here; got 1 kinds of calls of cuda" in (
        capsys.readouterr().err
    )


def test_a_corrupt_file_is_an_error_of_every_call_until_something_is_done(folder, capsys, monkeypatch):
    pretend(monkeypatch, flash=1.0)
    assert main(["tune", *FEW]) == 0
    (path,) = Path("data").rglob("*.json")
    path.write_text("{", encoding="utf-8")
    reset()
    query = torch.randn(2, 4, 64, 16)
    for _ in range(2):
        with pytest.raises(attnroute.TableError, match="run `attnroute tune` again"):
            attnroute.attention(query, query, query, is_causal=True)
    assert main(["tune", *FEW]) == 5
    assert str(path) in capsys.readouterr().err
