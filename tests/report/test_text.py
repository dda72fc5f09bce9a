"""The layout of explanations, exceptions and warnings."""

from __future__ import annotations

import pytest
from support.report_examples import CALL, GIB, HOST, decision, finding, prediction, verdict

from attnroute.engine.decision import Hint
from attnroute.engine.stock import Stock
from attnroute.question.line import parse, render
from attnroute.question.policy import Policy
from attnroute.report.layout import WIDTH, wrapped
from attnroute.report.text import render_decision, render_failure, render_quadratic

REQUIRES = "requires head_dim_qk <=64; got head_dim_qk = 128"
LIFTED = finding(rule="any/beta/equal-heads", repaired_by="expand_kv", because="")


def test_an_explanation_has_every_part_in_its_place() -> None:
    given = decision(
        verdict("alpha"),
        verdict("beta", "eligible", LIFTED, repairs=("expand_kv",), extra_bytes=GIB),
        order=("beta", "alpha"),
        policy=Policy(prefer=("beta",), origin={"prefer": "attention()"}),
        stock=Stock(backend="alpha"),
        hints=(Hint(kind="dropout", change="dropout_p = 0", selects="alpha"),),
    )
    assert render_decision(given, verbose=True).splitlines() == [
        "selected   beta, after expand_kv (1 GiB more): preferred by attention()",
        f"call       {CALL}",
        "host       sm_90, some card, torch 2.11.0, cudnn 9.19.0, triton 3.5",
        "policy     prefer beta (attention())",
        "order      beta, alpha (by [any/arch/default]; their times are unmeasured)",
        "",
        "beta       selected, after expand_kv (1 GiB more)",
        f"           - {REQUIRES}",
        "             [any/beta/equal-heads], lifted by expand_kv",
        "alpha      eligible",
        "",
        "stock      would run alpha",
        "hint       dropout_p = 0 would select alpha",
    ]


def test_str_of_a_decision_is_the_explanation() -> None:
    given = decision(verdict("alpha"), order=("alpha",))
    assert str(given) == given.text() == render_decision(given)
    assert given.text(verbose=True, width=60) == render_decision(given, verbose=True, width=60)


def test_predicted_times_are_said_with_their_source() -> None:
    times = {"predicted_ms": 2.0, "prediction": prediction(2.0)}
    given = decision(
        verdict("alpha", **times),
        verdict("beta", **times, quadratic_bytes=2**20, first_call_seconds=(1.0, 3.0)),
        order=("alpha", "beta"),
        why_this_order="predicted times, measured on NVIDIA H200, 2026-11-29",
    )
    lines = render_decision(given, verbose=True).splitlines()
    assert lines[:1] + lines[3:] == [
        "selected   alpha, predicted 2 ms: first of 2 that may run, by predicted time",
        "order      alpha, beta (by predicted times, measured on NVIDIA H200, 2026-11-29)",
        "",
        "alpha      selected, predicted 2 ms",
        "beta       eligible, predicted 2 ms",
        "           - builds 1 MiB of mask, an entry for every query and key",
        "           - the first call of each structure compiles (1 to 3 s), shared by",
        "             1,000,000 calls",
    ]


def test_a_short_explanation_has_the_answer_first_and_one_line_for_what_is_alike() -> None:
    times = {"predicted_ms": 2.0, "prediction": prediction(2.0)}
    fast = {"predicted_ms": 1.0, "prediction": prediction(1.0)}
    softcap = {"requires": "no softcap", "got": "softcap", "because": "x has no softcap"}
    given = decision(
        verdict("alpha", **times),
        verdict("beta", "eligible", LIFTED, **times, repairs=("expand_kv",)),
        verdict("absent", "unavailable", missing=("some-package",)),
        verdict("faster", "unavailable", missing=("some-package",), **fast),
        verdict("broken", "unavailable", missing=("other",)),
        verdict("gamma", "rejected", finding(), finding(rule="any/gamma/feature-softcap", **softcap)),
        verdict("delta", "rejected", finding(rule="any/delta/feature-softcap", **softcap)),
        verdict("epsilon", "rejected", finding(kind="wrong_result")),
        order=("alpha", "beta"),
        host=HOST.model_copy(update={"broken": {"other": "no such luck"}}),
        why_this_order="predicted times, measured on NVIDIA H200, 2026-11-29",
        hints=tuple(Hint(kind="dropout", change=f"{n} = 0", selects="beta") for n in "abcde"),
    )
    assert render_decision(given).splitlines() == [
        "selected   alpha, predicted 2 ms: first of 2 that may run, by predicted time",
        f"call       {CALL}",
        "host       sm_90, some card, torch 2.11.0, cudnn 9.19.0, triton 3.5",
        "times      measured on NVIDIA H200, 2026-11-29",
        "",
        "beta       eligible, after expand_kv, predicted 2 ms",
        "broken     unavailable, needs other, which cannot be used (no such luck)",
        "absent     faster 1 ms, absent: not installed",
        "rejected   delta, gamma: requires no softcap; got softcap",
        "           epsilon: wrong result: requires head_dim_qk <=64; got head_dim_qk =",
        "           128 (because the kernel stops at 64)",
        "",
        "hint       a = 0 would select beta",
        "hint       b = 0 would select beta",
        "hint       c = 0 would select beta",
        "           and 2 more",
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_lines_have_the_width_that_is_asked_for(width) -> None:
    given = decision(verdict("alpha", "rejected", finding(because="a reason of many words " * 20)))
    for verbose in (False, True):
        lengths = [len(row) for row in render_decision(given, verbose=verbose, width=width).splitlines()]
        assert max(lengths[3:]) in range(width - 10, width + 1)


def test_a_number_stays_with_its_unit() -> None:
    text = "\n".join(wrapped("in place of 2.11 ms " * 20, "", "", 33))
    assert "2.11 ms" in text
    assert "2.11\n" not in text


def test_lines_are_wrapped_but_for_the_call() -> None:
    lengths = ",".join(["128"] * 64)
    long = finding(because="a reason of many words " * 20)
    line = f"bf16 b64 hq1 hkv1 sq128 skv128 d64 keys={lengths}"
    text = render_decision(decision(verdict("alpha", "rejected", long), line=line))
    assert f"\ncall       {line}\n" in text
    assert all(len(row) <= WIDTH for row in text.splitlines() if line not in row)
    assert text.startswith("selected   none: no backend may run this call\n")


def test_a_failure_of_a_required_backend_says_its_reasons_and_what_could_run() -> None:
    given = decision(
        verdict("alpha", "rejected", finding(), finding(rule="any/alpha/other", because="")),
        verdict("beta", excluded="not_required", origin="attention()"),
        verdict(
            "gamma",
            "rejected",
            finding(rule="any/gamma/other"),
            excluded="not_required",
            origin="attention()",
        ),
        verdict("math", excluded="not_required", origin="attention()", score_bytes=GIB),
        policy=Policy(require="alpha", origin={"require": "attention()"}),
    )
    text = render_failure(given)
    assert text.startswith(
        f"alpha is required by attention() and may not run this call: {CALL}\non sm_90, some card"
    )
    assert "[sm_90/alpha/head-dim-range]" in text
    assert "[any/alpha/other]" in text
    assert "gamma" not in text
    assert text.endswith("\n\nhint       without the requirement of attention(), beta could run it")


def test_a_failure_names_the_slow_tier_only_where_nothing_else_is_left_and_with_its_bytes() -> None:
    given = decision(
        verdict("alpha", "rejected", finding()),
        verdict("math", excluded="strict", origin="ATTNROUTE_STRICT=1", score_bytes=3 * GIB),
        policy=Policy(strict=True, origin={"strict": "ATTNROUTE_STRICT=1"}),
    )
    text = render_failure(given)
    assert text.startswith(f"no backend may run this call: {CALL}\n")
    told = " ".join(text.split())
    assert "math eligible, 3 GiB of scores, kept out by strict, set by ATTNROUTE_STRICT=1" in told
    assert told.endswith("without strict, set by ATTNROUTE_STRICT=1, math (3 GiB of scores) could run it")


def test_a_failure_without_an_alternative_offers_none() -> None:
    text = render_failure(decision(verdict("alpha", "rejected", finding())))
    assert "hint" not in text
    assert "alpha      rejected" in text


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            (
                verdict("alpha", "rejected", finding(because=""), finding()),
                verdict("beta", "rejected", finding(because="")),
            ),
            f"beta would not, and is rejected: {REQUIRES} [sm_90/alpha/head-dim-range]",
        ),
        (
            (verdict("alpha", excluded="banned", origin="ATTNROUTE_BACKENDS=-alpha"),),
            "alpha would not, and is banned by ATTNROUTE_BACKENDS=-alpha",
        ),
        (
            (verdict("alpha", "unavailable", missing=("flash-attn-4",)),),
            "alpha would not, and is unavailable: needs flash-attn-4",
        ),
        ((verdict("alpha"),), "alpha would not, and is put behind it by the order"),
        ((), "no other backend is known"),
    ],
)
def test_the_warning_names_backend_bytes_call_and_what_would_avoid_it(others, said) -> None:
    given = decision(*others, verdict("math", score_bytes=45 * GIB), order=("math",))
    assert render_quadratic(given) == f"math holds 45 GiB of scores for {CALL}; {said}."


COMPILES = {
    "options": (("BLOCK_M", 32), ("FORCE", True), ("stages", 2)),
    "option_rows": ("sm_90/beta/tiles", "any/beta/whole", "sm_90/beta/tiles"),
    "first_call_seconds": (0.3, 3.0),
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "the first call of each structure compiles (0.3 to 3 s)"),
        ({"compiled_seconds": 1.234}, "compiled in 1.2 s, as each structure is at its first call"),
    ],
)
def test_a_candidate_says_its_options_by_row_and_what_compiling_takes(more, said) -> None:
    given = decision(verdict("alpha"), verdict("beta", **COMPILES, **more), order=("alpha", "beta"))
    assert render_decision(given, verbose=True).splitlines()[-4:] == [
        "beta       eligible",
        "           - kernel options BLOCK_M = 32, stages = 2 [sm_90/beta/tiles]",
        "           - kernel options FORCE = true [any/beta/whole]",
        f"           - {said}",
    ]


def test_what_is_no_candidate_says_nothing_about_compiling() -> None:
    given = decision(verdict("alpha"), verdict("beta", "unavailable", **COMPILES), order=("alpha",))
    assert render_decision(given, verbose=True).splitlines()[-1] == "beta       unavailable"


def test_the_call_of_an_explanation_can_be_pasted_back() -> None:
    text = render_decision(decision(verdict("alpha"), order=("alpha",)))
    (line,) = (row.removeprefix("call").strip() for row in text.splitlines() if row.startswith("call"))
    assert render(parse(line)) == CALL
