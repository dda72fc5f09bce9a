"""What is said about refused kernels, on hand-made decisions."""

from __future__ import annotations

import pytest
from support.report_examples import CALL, decision, finding, verdict

from attnroute.question.policy import Policy
from attnroute.report import sentences
from attnroute.report.refusal import render_kept, render_replaced, render_reroute
from attnroute.report.text import render_failure, render_quadratic

SAID = "ValueError: no"
HELD = (finding(outcome="pass"), finding(outcome="pass"), finding(outcome="not_applicable"))
MISSING = (
    "None of the 2 rows for alpha that this call meets foresaw that, so a row sm_90/alpha/... is missing:"
    f" please report sm_90/alpha with this text, for {CALL} on sm_90, some card, torch 2.11.0, cudnn 9.19.0,"
    " triton 3.5."
)
BAN = 'To keep alpha away, set ATTNROUTE_BACKENDS=-alpha or use override(ban="alpha").'


def chosen(*order):
    return decision(verdict("alpha", "eligible", *HELD), verdict("beta"), order=order)


def test_a_reroute_is_told_with_who_what_where_to_report_and_how_to_ban():
    assert render_reroute(chosen("alpha", "beta"), chosen("beta"), SAID) == (
        "backend alpha refused a call before its kernel was launched (ValueError: no); beta runs it and every"
        f" call like it in this process. {MISSING} {BAN}"
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_a_replaced_kernel_is_told_with_its_call_where_that_is_known(is_known):
    head = (
        "backend alpha refused a kernel before it was launched, in a backward or a compiled graph, where no"
        " other backend can be chosen any more (ValueError: no); beta ran in its place."
    )
    later = f" Later calls like it go to another backend from the start. {MISSING}" if is_known else ""
    given = chosen("alpha") if is_known else None
    assert render_replaced("alpha", SAID, "beta", given) == f"{head}{later} {BAN}"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"require": "alpha"}, "alpha is required by me"),
        ({"strict": True}, "strict is set by me"),
        ({"strict": True, "require": "alpha"}, "alpha is required by me"),
    ],
)
def test_who_lets_no_other_backend_run_is_named(policy, reason):
    wishes = Policy(**policy, origin=dict.fromkeys(policy, "me"))
    said = f"No other backend runs in its place, because {reason}."
    assert render_kept(wishes, "alpha") == said


def test_a_failed_backend_is_said_with_its_words():
    given = verdict("beta", excluded="failed", origin="KeyError: '{x}'")
    said = sentences.status(given, decision(given, order=("alpha",)))
    assert said == "eligible, kept out because it failed in this process: KeyError: '{x}'"


def test_no_hint_asks_to_do_without_a_failure():
    failed, banned = verdict("alpha", excluded="failed"), verdict("beta", excluded="banned")
    assert "hint" not in render_failure(decision(failed))
    assert render_failure(decision(failed, banned)).endswith(
        "hint       without the ban by somebody, beta could run it"
    )


def test_the_slow_tier_says_that_the_faster_one_failed():
    slow = verdict("math", score_bytes=2**30)
    given = decision(verdict("alpha", excluded="failed", origin=SAID), slow, order=("math",))
    assert render_quadratic(given).endswith(
        "alpha would not, and is kept out because it failed in this process: ValueError: no."
    )
