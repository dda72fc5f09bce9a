"""Calls with dropout: what was dropped is read off the kernel, and another mask in a backward is found."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attnroute.api.recording import TracedCall
from attnroute.conformance import dropout, run
from attnroute.conformance.trials import Trial
from attnroute.tuning import gate
from attnroute.tuning.remake import remake

LINE = "fp32 b2 hq4 hkv2 sq96 skv80 d16 dropout=0.25 train"


def seeded(problem, seed, probability):
    torch.manual_seed(seed)
    return gate.run(problem, "math", dropout_p=probability)


def made(line=LINE):
    traced = TracedCall(line=line, device="cpu", backend="math")
    return remake(traced), traced.call


@pytest.fixture(params=["weights", "differences"])
def way(request, monkeypatch):
    """Both ways in which a call is told: small ones by their weights, large ones by differences."""
    if request.param == "differences":
        monkeypatch.setattr(dropout, "_MOST_WEIGHTS", 0)
    return request.param


@pytest.mark.parametrize("words", ["", "bshd", "causal=top_left"])
def test_a_right_kernel_is_right_and_its_tensors_stay(way, words):
    problem, call = made(f"{LINE} {words}")
    before = [t.clone() for t in problem.given[:3]]
    kernel = partial(seeded, problem, 0)
    assert dropout.wrong(problem, call, kernel, kernel(0.25)) == "", way
    assert all(map(torch.equal, before, problem.given[:3]))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_gradient_under_another_mask_is_wrong(way, name):
    problem, call = made()
    kernel = partial(seeded, problem, 0)
    got = kernel(0.25) | {name: seeded(problem, 1, 0.25)[name]}
    assert f"gradient of {name}" in dropout.wrong(problem, call, kernel, got), way


def test_another_probability_is_wrong():
    problem, call = made()
    kernel = lambda probability: seeded(problem, 0, probability and 0.3125)  # noqa: E731
    assert "share of dropped weights requires 0.25" in dropout.wrong(problem, call, kernel, kernel(0.25))


def test_a_trial_runs_with_dropout():
    outcome = run.run(Trial(line=LINE, device="cpu", backend="math"))
    assert (outcome.status, outcome.ran) == ("right", "math"), outcome
    compiled = run.run(Trial(line=f"{LINE} compiled", device="cpu", backend="math"))
    assert compiled.status == "untested"
