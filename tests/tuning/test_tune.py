"""`tune`: right backends are timed, wrong ones kept away, and nothing that was measured is lost."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import attnroute
from attnroute.api.recording import TracedCall
from attnroute.api.tuned import Times, TuningFile, identity_of, informed
from attnroute.memory import reset
from attnroute.probes.torch_host import host_of
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from attnroute.tuning import gate
from attnroute.tuning.tune import Tuner, tasks_of, timed

PLUGIN = Path(__file__).parents[1] / "plugin"
LINES = ("fp32 b2 hq4 sq64 d16 causal", "fp32 b2 hq4 sq96 d16", "bf16 b1 hq2 sq40 d16 train")


def recorded(*lines, count=10, **more):
    return tuple(TracedCall(line=line, device="cpu", backend="flash", count=count, **more) for line in lines)


def tuner(path, *, measure=timed, **options):
    lines = []
    # Others compile for seconds.
    options = {"backends": frozenset({"flash", "chunked", "toy"}), **options}
    made = Tuner(path, host_of("cpu", None, load().providers), say=lines.append, measure=measure, **options)
    return made, lines


def table(**milliseconds):
    """Return what "measures" these times, and a slow one for every other backend."""

    def measure(steps, device):
        assert device == "cpu"
        return {
            b: Times(device_ms=milliseconds.get(b, 100.0), host_ms=milliseconds.get(b, 100.0)) for b in steps
        }

    return measure


@pytest.fixture(autouse=True)
def forgotten():
    yield
    reset()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path with the plug-in of the tests."""
    folder = tmp_path / "site"
    shutil.copytree(PLUGIN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(folder)
    forget_plugin()
    yield folder
    monkeypatch.undo()
    forget_plugin()


def forget_plugin():
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_attention"]:
        del sys.modules[name]
    reset()


def test_every_backend_that_may_run_is_measured_on_real_calls(tmp_path):
    path = tmp_path / "tuning.json"
    made, lines = tuner(path)
    made.run(tasks_of(recorded(*LINES), "cpu"))
    found = TuningFile.read(path)
    assert len(found.calls) == len(LINES)
    for call in found.calls.values():
        assert set(call.times) == {"flash", "chunked"}
        assert min(t for times in call.times.values() for t in (times.device_ms, times.host_ms)) > 0
        assert (call.wrong, call.failed) == ({}, {})
    assert found.began == ()
    assert [line for line in lines if line.startswith("3/3 ")]


def test_calls_of_one_class_are_measured_once_the_most_frequent_one(tmp_path):
    calls = (
        *recorded("fp32 b1 hq2 sq1 skv1000 d16", count=3),
        *recorded("fp32 b1 hq2 sq1 skv1001 d16", count=5),
        *recorded("fp32 b1 hq2 sq1 skv1002 d16 compiled", count=None, how="compiled"),
    )
    (task,) = tasks_of(calls, "cpu")
    assert (task.count, task.traced.call.seqlen_kv) == (8, 1001)


def test_calls_on_dtensors_are_measured_as_what_a_process_computes(tmp_path):
    """Kernels get plain tensors of them, so the file serves both."""
    path = tmp_path / "tuning.json"
    made, lines = tuner(path, measure=table(chunked=1.0))
    made.run(tasks_of(recorded(LINES[0], f"{LINES[0]} dtensor"), "cpu"))
    assert len(TuningFile.read(path).calls) == 1, lines
    for word in ("", " dtensor"):
        call = parse(f"{LINES[0]}{word}")
        policy = informed(call, made.host, Policy(tuning=path))
        assert attnroute.decide(call, made.host, policy=policy).selected == "chunked"


def test_what_is_most_of_the_run_comes_first():
    calls = recorded("fp32 b1 hq2 sq1000 d16", count=2) + recorded("fp32 b1 hq2 sq10 d16", count=100)
    assert [task.traced.call.seqlen_q for task in tasks_of(calls, "cpu")] == [1000, 10]
    calls = recorded("fp32 b1 hq2 sq1000 d16", count=2) + recorded("fp32 b1 hq2 sq100 d16", count=300)
    assert [task.traced.call.seqlen_q for task in tasks_of(calls, "cpu")] == [100, 1000]


@pytest.mark.parametrize(("chunked", "after"), [(0.9, "chunked"), (0.98, "flash"), (2.0, "flash")])
def test_another_backend_must_win_by_the_margin(tmp_path, chunked, after):
    made, lines = tuner(tmp_path / "t.json", measure=table(flash=1.0, chunked=chunked), margin=0.05)
    made.run(tasks_of(recorded(LINES[0]), "cpu"))
    (call,) = made.file.calls.values()
    assert (call.before, call.after) == ("flash", after)
    assert ("chunked, not flash: " if after == "chunked" else "flash stays: ") in lines[-1]


def test_a_wrong_backend_is_never_entered_and_reported(site, tmp_path):
    source = site / "toy_attention" / "backend.py"
    text = source.read_text(encoding="utf-8")
    assert "torch.cat(parts, 2)" in text
    source.write_text(text.replace("torch.cat(parts, 2)", "torch.cat(parts, 2) * 1.1"), encoding="utf-8")
    made, lines = tuner(tmp_path / "t.json", measure=table(toy=0.001, flash=1.0))
    made.run(tasks_of(recorded(LINES[0]), "cpu"))
    (call,) = made.file.calls.values()
    assert "toy" not in call.times
    assert call.after == "flash"
    assert "the relative error of the output requires at most 0.002; got 0.1" in call.wrong["toy"]
    assert any("toy is wrong" in line for line in lines)


def test_a_right_plug_in_may_win(site, tmp_path):
    made, _ = tuner(tmp_path / "t.json", measure=table(toy=0.001, flash=1.0))
    made.run(tasks_of(recorded(LINES[0]), "cpu"))
    (call,) = made.file.calls.values()
    assert (call.before, call.after) == ("flash", "toy")


def test_a_backend_that_raises_is_left_out(site, tmp_path):
    source = site / "toy_attention" / "backend.py"
    text = source.read_text(encoding="utf-8")
    source.write_text(
        text.replace("    scale = inputs", "    raise RuntimeError('no such kernel')\n    scale = inputs", 1),
        encoding="utf-8",
    )
    made, _ = tuner(tmp_path / "t.json")
    made.run(tasks_of(recorded(LINES[0]), "cpu"))
    (call,) = made.file.calls.values()
    assert "no such kernel" in call.failed["toy"]
    assert "toy" not in call.times


def test_what_was_measured_before_an_interrupt_stays_and_the_next_run_goes_on(tmp_path, monkeypatch):
    path, tasks = tmp_path / "t.json", tasks_of(recorded(*LINES), "cpu")
    measured = []

    def interrupted(steps, device):
        if measured:
            raise KeyboardInterrupt
        measured.append(tuple(steps))
        return table()(steps, device)

    made, _ = tuner(path, measure=interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run(tasks)
    found = TuningFile.read(path)
    assert (list(found.calls), found.began) == ([tasks[0].key], ())
    made, lines = tuner(path, measure=table())
    made.run(tasks)
    assert lines[0] == f"1/3 measured before: {tasks[0].key}"
    assert list(TuningFile.read(path).calls) == [task.key for task in tasks]
    assert [other.name for other in tmp_path.iterdir()] == ["t.json"]


def test_a_backend_that_ended_the_process_is_not_tried_again(tmp_path, monkeypatch):
    path, tasks = tmp_path / "t.json", tasks_of(recorded(LINES[0]), "cpu")
    host = host_of("cpu", None, load().providers)
    TuningFile(host=host, began=((tasks[0].key, "chunked"),)).write(path)
    ran, run = [], gate.run

    def noting(problem, backend, *way):
        ran.append(backend)
        return run(problem, backend, *way)

    monkeypatch.setattr(gate, "run", noting)
    made, _ = tuner(path, measure=table())
    made.run(tasks)
    found = TuningFile.read(path)
    (call,) = found.calls.values()
    assert found.began == ()
    assert call.failed == {"chunked": "it ended the process, or was ended, in an earlier run"}
    assert "flash" in ran
    assert "chunked" not in ran


def test_after_its_time_no_call_is_begun(tmp_path):
    made, lines = tuner(tmp_path / "t.json", measure=table(), seconds=0.0)
    made.run(tasks_of(recorded(*LINES), "cpu"))
    assert made.file.calls == {}
    assert lines == ["the time is over; 3 kinds of calls are left for another run"]


def test_a_file_of_other_versions_begins_anew(tmp_path):
    path, tasks = tmp_path / "t.json", tasks_of(recorded(LINES[0]), "cpu")
    host = host_of("cpu", None, load().providers)
    TuningFile(host=host.with_versions({"torch": "2.1.0"}), began=(("a", "b"),)).write(path)
    made, lines = tuner(path, measure=table())
    assert "begins anew: it was written with torch 2.1.0 and not" in lines[0]
    made.run(tasks)
    assert TuningFile.read(path).differences(identity_of(host)) == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fp32 b1 hq2 sq8 d16 vmap", "made again, it is another call"),
        ("fp32 b1 hq2 sq8 d16 dense=3x7", "ArgumentError"),
    ],
)
def test_what_cannot_be_made_again_is_said(tmp_path, line, said):
    made, lines = tuner(tmp_path / "t.json", measure=table())
    made.run(tasks_of(recorded(line, "fp32 b1 hq2 sq8 d16"), "cpu"))
    assert any(said in text for text in lines if "not measured" in text)
    assert len(made.file.calls) == 1


def test_what_is_measured_does_not_depend_on_what_was(tmp_path, monkeypatch, environment):
    path, tasks = tmp_path / "t.json", tasks_of(recorded(LINES[0]), "cpu")
    made, _ = tuner(path, measure=table(chunked=0.1, flash=1.0))
    made.run(tasks)
    environment(TUNING=str(path))
    query = torch.randn(2, 4, 64, 16)
    assert attnroute.explain(query, query, query, is_causal=True).selected == "chunked"
    again, _ = tuner(tmp_path / "again.json", measure=table(chunked=0.1, flash=1.0))
    again.run(tasks)
    (call,) = again.file.calls.values()
    assert (call.before, call.after) == ("flash", "chunked")
