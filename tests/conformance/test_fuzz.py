"""Drawn calls: the same for a seed, of all kinds, run for real on the CPU, and a planted bug made simple."""

from __future__ import annotations

import pytest

from attnroute.cli import main
from attnroute.conformance import draw, fuzz, run
from attnroute.conformance.pool import Job, Pool, Worker
from attnroute.conformance.report import Report
from attnroute.conformance.shrink import shrunk, simpler
from attnroute.conformance.trials import Outcome, Trial
from attnroute.executors import registry
from attnroute.memory import reset
from attnroute.question.facts import facts_of
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.tables.load import load

TABLES = load()
H200 = Host(
    arch="sm_90",
    versions={
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cudnn": "9.19.0",
        "triton": "3.6.0",
        "flash-attn-4": "4.0.0b36",
        "nvidia-cudnn-frontend": "1.32.0",
        "xformers": "0.0.34",
        "nvidia-cutlass-dsl": "4.7.0",
    },
)


def drawn(count=600, seed=0):
    return list(draw.jobs(TABLES, H200, tuple(TABLES.backends), count, seed))


def test_a_seed_draws_the_same_calls_and_another_one_others():
    assert drawn(50) == drawn(50)
    assert {t for job in drawn(50) for t in job.trials} != {
        t for job in drawn(50, seed=1) for t in job.trials
    }


def test_calls_are_of_all_kinds():
    trials = [trial for job in drawn() for trial in job.trials]
    assert len(trials) == 600
    facts = [facts_of(parse(trial.line)) for trial in trials]
    for name in ("causal", "window", "documents", "key_padding", "prefix", "combined_mask", "dense_mask"):
        assert any(f[name] is True for f in facts), name
    for name in ("function_mask", "dense_bias", "alibi", "sink", "return_lse", "is_gqa", "compiled"):
        assert any(f[name] is True for f in facts), name
    for name in ("qkv_packed", "seqlens_equal", "head_dims_equal", "qkv_aligned_16", "qkv_tokens_contiguous"):
        assert {True, False} <= {f[name] for f in facts}, name
    assert {f["layout"] for f in facts} == {"bhsd", "bshd", "thd"}
    assert {t.values for t in trials} == {"usual", "sharp", "low", "equal", "zeros", "garbage"}
    named = {t.backend for t in trials}
    assert named >= {
        None,
        "flash",
        "cudnn",
        "efficient",
        "chunked",
        "flex",
        "fa3",
        "fa4",
        "cudnn_fe",
        "flex_fa4",
    }
    assert not named & {"fa2", "te"}


def test_what_compiles_gets_few_structures():
    groups = {job.group for job in drawn() if job.group.startswith(("flex ", "fa4 "))}
    assert 2 < len(groups) <= 2 * draw.STRUCTURES["compiled"]


@pytest.fixture
def planted():
    """Beside padding, chunked is wrong where there are more than 20 keys."""
    honest = registry.executor("chunked", TABLES.backends["chunked"].module)

    def wrong(inputs, plan):
        out, lse = honest.run(inputs, plan)
        bad = inputs.mask.key_keep is not None and inputs.key.shape[2] > 20
        return (out * 1.5 if bad else out), lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnroute.executors.chunked.run.executor", type(honest)(wrong, honest.pair))
        reset()
        yield
    reset()


def test_a_planted_bug_is_found_and_made_simple(planted):
    line = "bf16 b3 hq8 hkv4 sq33 skv65 d40/16 bshd keys=60,3,65 causal=bottom_right sink train lse qkv_grad"
    trial = Trial(line=line, device="cpu", backend="chunked", memory=("bshd",) * 3, values="sharp")
    outcome = run.run(trial)
    assert outcome.status == "wrong"
    simple, found = shrunk(trial, outcome, lambda other: run.run(other, look=False))
    call = parse(simple.line)
    assert found.status == "wrong"
    assert (call.batch, call.num_heads_q, call.seqlen_q, call.seqlen_kv) == (1, 1, 1, 21)
    assert [node.kind for node in call.mask] == ["key_padding"]
    assert (call.phase, call.sink, call.return_lse, simple.values, simple.memory) == (
        "inference",
        False,
        False,
        "usual",
        (),
    )


def test_every_simpler_trial_differs():
    trial = Trial(line="bf16 b2 hq8 hkv2 sq33 skv65 d40/16 causal=top_left train", device="cpu", values="low")
    found = list(simpler(trial))
    assert len(found) > 10
    assert trial not in found


def test_failures_of_one_kind_are_shrunk_once(monkeypatch):
    trials = tuple(Trial(line=f"fp32 b1 hq1 sq{n} d8", device="cpu", backend="flash") for n in range(2, 30))

    class Told(Worker):
        def ask(self, trial, limit, *, look=True):
            length = parse(trial.line).seqlen_q
            said = f"the relative error requires at most 0.05; got {length / 7:g}"
            return Outcome(
                status="wrong" if length > 5 else "right", said=said if length > 5 else "", ran="flash"
            )

    monkeypatch.setattr("attnroute.conformance.pool.Worker", Told)
    monkeypatch.setattr(fuzz, "Worker", Told)
    said = []
    found = fuzz.fuzz([Job("flash", "flash", "drawn", trials)], len(trials), Pool(1), said.append)
    assert found.counts == {"right": 4, "wrong": 24}
    assert found.right == {"flash": 4}
    (failure,) = found.failures
    assert parse(failure.trial.line).seqlen_q == 6
    assert (
        failure.command
        == "attnroute conformance --call 'fp32 b1 hq1 hkv1 sq6 skv1 d8' --backend flash --device cpu"
    )
    assert len([line for line in said if line.startswith("wrong")]) == 1


def test_the_command_runs_calls_for_real(tmp_path, capsys):
    out = tmp_path / "report.json"
    words = ["--fuzz", "12", "--backend", "flash", "--processes", "1", "--out", str(out)]
    assert main(["conformance", *words]) == 0, capsys.readouterr().out
    found = Report.read(out).drawn
    assert found.counts["right"] >= 9
    assert sum(found.counts.values()) == 12
    assert not found.failures


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_the_number_of_calls_is_one(number, capsys):
    assert main(["conformance", "--fuzz", number]) == 2
    assert "at least 1" in capsys.readouterr().err
