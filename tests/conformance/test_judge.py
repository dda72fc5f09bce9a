"""What a plain computation in the dtype makes of a call is right; what is off by more is wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attnroute.api.recording import TracedCall
from attnroute.conformance import judge, values
from attnroute.conformance.judge import wrong
from attnroute.tuning import gate
from attnroute.tuning.reference import attend
from attnroute.tuning.remake import remake

LINE = "bf16 b2 hq4 hkv2 sq400 skv16 d8 train"


RAGGED = "bf16 b1 hq4 hkv2 sq400 skv16 d8 thd documents:cross train"
CASES = {
    "all heads": LINE,
    "one head": LINE,
    "one head, tokens first": f"{LINE} bshd",
    "one head, ragged": RAGGED,
}


@pytest.fixture(params=CASES)
def rounded(request, monkeypatch):
    """A call with low scores, what is true of it, and what it gives where intermediates are rounded."""
    traced = TracedCall(line=CASES[request.param], device="cpu", backend="math")
    problem, call = remake(traced), traced.call
    values.fill(problem, "low")
    if request.param != "all heads":
        monkeypatch.setattr(judge, "_MOST_SCORES", {"cpu": 2 * 400 * 16})
    # Coarse enough that roundings alone are beyond the usual limit.
    monkeypatch.setitem(gate.TOLERANCE, "bfloat16", 1e-4)
    wide = gate.widened(problem, torch.float64)
    got = gate.run(wide, None, partial(attend, rounded=torch.bfloat16))
    return problem, call, got, gate.truth(problem, call)


def test_roundings_of_every_kernel_are_right(rounded):
    problem, call, got, want = rounded
    assert gate.wrong(got, want, call)
    assert wrong(problem, call, got, want) == ""


@pytest.mark.parametrize("name", ["output", "query", "key", "value"])
def test_what_is_off_by_more_is_wrong(rounded, name):
    problem, call, got, want = rounded
    assert wrong(problem, call, got | {name: got[name] * 1.2}, want)


def test_values_that_are_not_finite_excuse_nothing():
    traced = TracedCall(line=f"{LINE} keys=5,16", device="cpu", backend="math")
    problem, call = remake(traced), traced.call
    want = gate.truth(problem, call)
    values.spoil(problem, call)
    assert "gradient of key" in wrong(problem, call, want | {"key": want["key"] * 1.5}, want)


def test_gradients_of_an_output_that_was_rounded_otherwise_are_right():
    """The weights that a kernel multiplies were rounded before, so its output is not what truth rounds to."""
    traced = TracedCall(line="bf16 b1 hq1 hkv1 sq2 skv2 d80 train", device="cpu", backend="math")
    problem, call = remake(traced), traced.call
    values.fill(problem, "low")
    want = gate.truth(problem, call)
    query, key, value = (t.detach().double() for t in problem.given[:3])
    weights = torch.softmax(query @ key.mT / 80**0.5, -1)
    grad = problem.grad.double()
    # Two units in the last place that the gradient weighs all one way.
    out = want["output"] * (1 + 2**-7 * torch.sign(want["output"] * grad))
    scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    got = want | {"output": out, "query": scores @ key / 80**0.5, "key": scores.mT @ query / 80**0.5}
    assert gate.wrong(got, want, call)
    assert wrong(problem, call, got, want) == ""
    assert wrong(problem, call, got | {"output": want["output"]}, want)
