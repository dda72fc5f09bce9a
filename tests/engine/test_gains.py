"""Hints where times are predicted: each says both, and one that saves less than a tenth is none."""

from __future__ import annotations

import pytest
from support.costs import predicting

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse

H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
CALL = parse("bf16 b2 hq32 hkv8 sq4096 d128 causal")
DENSE = parse("bf16 b1 hq16 hkv16 sq4096 d128 dense=1x1x4096x4096")


def hints(times, call, kind="measured"):
    with predicting(times, kind) as tables:
        decision = decide(call, H100, tables, advise=True)
    return decision, {hint.change: hint for hint in decision.hints}


def installed(fa3, kind="measured"):
    """Return the hint to install fa3 where it takes so long, and cudnn 1 ms."""
    times = {"cudnn": (1.0, 0.0), "fa3": (fa3, 0.0)}
    return hints(lambda backend, *_: times.get(backend), CALL, kind)[1].get("flash-attn-3")


@pytest.mark.parametrize(("fa3", "is_hint"), [(0.5, True), (0.9, True), (0.91, False), (0.99, False)])
def test_a_hint_saves_a_tenth_and_says_both_times(fa3, is_hint):
    hint = installed(fa3)
    assert (hint is not None) is is_hint
    if hint is not None:
        assert (hint.selects, hint.now_ms, hint.then_ms) == ("fa3", 1.0, fa3)


def test_times_of_another_card_keep_no_hint_away_and_are_not_said():
    hint = installed(0.99, "inferred")
    assert hint is None or hint.then_ms is None
    assert installed(5.0, "inferred") == hint


def with_a_tensor(longer):
    """Return decision and hints where a mask tensor makes cudnn take so many times as long."""
    times = {"cudnn": 1.0, "flash": 2.0}

    def took(backend, final, *_):
        dense = any(node.kind == "dense" for node in final.mask) or final.bias is not None
        return (times[backend] * (longer if dense else 1.0), 0.0) if backend in times else None

    return hints(took, DENSE)


def test_the_same_kernel_with_less_to_do_is_a_hint():
    decision, found = with_a_tensor(1.5)
    assert decision.selected == found["causal"].selects == "cudnn"
    assert (found["causal"].now_ms, found["causal"].then_ms) == (1.5, 1.0)
    assert "would keep cudnn, predicted 1 ms in place of 1.5 ms" in " ".join(str(decision).split())


def test_the_same_kernel_that_saves_little_is_none():
    assert "causal" not in with_a_tensor(1.05)[1]
