"""Every backend of the CPU passes the gate on calls of all kinds, and a wrong one does not."""

from __future__ import annotations

import math

import pytest
import torch

import attnroute
from attnroute.api.recording import TracedCall
from attnroute.tuning import gate
from attnroute.tuning.remake import remake

LINES = [
    "bf16 b2 hq4 hkv2 sq64 d32/16 causal train lse",
    "fp16 b2 hq4 sq33 skv65 d32 keys=40,65 train",
    "bf16 b1 hq4 sq128 d32 window=20,0 train sink",
    "bf16 b1 hq4 sq128 d32 causal documents=100,28 train",
    "fp32 b2 hq4 sq64 d32 bias=fp32:1x4x64x64:grad train qkv_grad",
    "bf16 b2 hq4 sq64 d32 alibi:grad train qkv_grad",
    "fp32 b2 hq4 sq64 d32 dense=2x1x64x64:empty=some train",
    "fp32 b1 hq4 sq300 d32 thd documents causal train lse",
    "bf16 b2 hq4 sq64 d32 dropout=0.1",
    "bf16 b2 hq4 sq200 skv1 d32 train",
    "fp64 b2 hq4 sq64 d32 train",
    "fp16 b1 hq1 sq16 skv2 d16 function_bias:grad train qkv_grad",
    "fp32 b1 hq1 sq2 skv1 d16 alibi:grad train qkv_grad",
]


def made(line):
    traced = TracedCall(line=line, device="cpu", backend="math")
    return traced.call, remake(traced)


def candidates(problem):
    return [b for b in attnroute.explain(**problem.given._asdict()).order if b != "flex"]


@pytest.mark.parametrize("line", LINES)
def test_backends_that_are_right_pass(line):
    call, problem = made(line)
    want = gate.truth(problem, call)
    checked = candidates(problem)
    assert checked
    for backend in checked:
        assert gate.wrong(gate.run(problem, backend), want, call) == "", backend


@pytest.mark.parametrize("name", ["output", "query", "key", "value", "log-sum-exp"])
def test_one_row_that_is_wrong_is_found(name):
    call, problem = made(LINES[0])
    want = gate.truth(problem, call)
    got = gate.run(problem, candidates(problem)[0])
    got[name].view(-1)[: got[name].shape[-1]] += 1.5
    told = gate.wrong(got, want, call)
    assert "requires at most 0.05; got" in told
    assert name in told


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(value):
    call, problem = made(LINES[1])
    want, got = gate.truth(problem, call), gate.truth(problem, call)
    got["output"][0, 0, 0, 0] = value
    assert "output" in gate.wrong(got, want, call)


def test_many_scores_are_held_against_chunked_in_float32(monkeypatch):
    call, problem = made(LINES[3])
    exact = gate.truth(problem, call)
    monkeypatch.setitem(gate._FEW_SCORES, "cpu", 100)
    wide = gate.truth(problem, call)
    assert {t.dtype for t in exact.values()} == {torch.float64}
    assert {t.dtype for t in wide.values()} == {torch.float32}
    assert gate.wrong(wide, exact, call) == ""


def test_the_switch_for_deterministic_algorithms_is_put_back():
    call, _ = made("bf16 b2 hq4 sq64 d32 deterministic train")
    with gate.deterministic(call):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("line", LINES)
def test_the_definition_agrees_with_another_backend_in_float64(line):
    call, problem = made(line)
    wide = gate.widened(problem, torch.float64)
    want, got = gate.truth(problem, call), gate.run(wide, "chunked")
    assert gate.wrong(got, want, call.changed(dtype="float64")) == ""
