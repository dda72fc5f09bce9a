"""A backend whose kernel was refused in this process: kept out, visibly, and nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policy_inputs import CALL, CPU

from attnroute.engine.decide import decide
from attnroute.question.policy import Policy, merge
from attnroute.report.json import decision_from_json, decision_json
from attnroute.tables.load import load

BACKENDS = sorted(load().backends)
FAILED = st.lists(st.sampled_from(BACKENDS), unique=True).map(
    lambda names: tuple((name, f"{name} said {{no}}") for name in names)
)


@given(failed=FAILED, strict=st.booleans())
def test_what_failed_never_runs_and_every_other_verdict_stays(failed, strict):
    plain = decide(CALL, CPU, policy=Policy(strict=strict))
    decision = decide(CALL, CPU, policy=Policy(strict=strict, failed=failed))
    names = dict(failed)
    assert decision.order == tuple(b for b in plain.order if b not in names)
    assert decision.selected == (decision.order[0] if decision.order else None)
    for verdict in decision.verdicts:
        before = plain.verdict(verdict.backend)
        if verdict.backend in names and before.excluded is None:
            assert (verdict.excluded.reason, verdict.excluded.origin) == ("failed", names[verdict.backend])
            assert verdict.model_copy(update={"excluded": None}) == before
        elif verdict.backend not in names:
            assert verdict == before
    assert decision_from_json(decision_json(decision, verbose=True)) == decision


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"ban": ("flash",)}, "banned"),
        ({"require": "math"}, "not_required"),
        ({"allow": ("math",)}, "not_allowed"),
        ({}, "failed"),
        ({"allow_unknown": True}, "failed"),
        ({"require": "flash"}, "failed"),
    ],
)
def test_a_wish_is_said_before_a_failure(wish, reason):
    decision = decide(CALL, CPU, policy=Policy(failed=(("flash", "it broke"),), **wish))
    assert decision.verdict("flash").excluded.reason == reason


def test_a_failure_is_said_before_what_is_not_known():
    host = CPU.with_versions({"torch": "99.0"})
    assert decide(CALL, host).verdict("flash").excluded.reason == "unknown"
    decision = decide(CALL, host, policy=Policy(failed=(("flash", "it broke"),)))
    assert decision.verdict("flash").excluded.reason == "failed"


def test_failures_are_part_of_what_a_policy_is_remembered_under():
    plain, failed = Policy(), Policy(failed=(("flash", "it broke"),))
    assert plain.key != failed.key
    assert hash(plain) != hash(failed)
    assert merge(Policy(ban=("math",)), failed).key == Policy(ban=("math",), failed=failed.failed).key


def test_hints_are_given_without_what_failed():
    decision = decide(CALL, CPU, policy=Policy(failed=(("flash", "it broke"),)), advise=True)
    assert "flash" not in {hint.selects for hint in decision.hints}
