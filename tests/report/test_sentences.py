"""Each sentence says what the data says, and nothing else."""

from __future__ import annotations

import pytest
from support.report_examples import GIB, HOST, decision, finding, prediction, verdict

from attnroute.engine.decision import Hint
from attnroute.engine.stock import Stock
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report import sentences

SAID = "requires head_dim_qk <=64; got head_dim_qk = 128"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"because": "it stops"}, f"{SAID} (because it stops) [sm_90/alpha/head-dim-range]"),
        ({}, f"{SAID} [sm_90/alpha/head-dim-range]"),
        ({"kind": "wrong_result"}, f"wrong result: {SAID} [sm_90/alpha/head-dim-range]"),
        ({"outcome": "unknown", "kind": "slow"}, f"unknown, slow: {SAID} [sm_90/alpha/head-dim-range]"),
        ({"repaired_by": "expand_kv"}, f"{SAID} [sm_90/alpha/head-dim-range], lifted by expand_kv"),
    ],
)
def test_a_finding_is_requires_and_got(changes, said) -> None:
    assert sentences.finding(finding(**{"because": "", **changes})) == said


def test_only_findings_that_failed_or_are_unknown_are_said_and_blocking_ones_first() -> None:
    lifted = finding(rule="a/b/lifted", repaired_by="expand_kv")
    blocking, passed = finding(rule="a/b/blocking"), finding(rule="a/b/passed", outcome="pass")
    slow = finding(rule="a/b/slow", kind="slow")
    said = sentences.findings(verdict("alpha", "rejected", lifted, passed, slow, blocking))
    assert [f.rule for f in said] == ["a/b/blocking", "a/b/lifted", "a/b/slow"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (verdict("alpha"), "selected"),
        (verdict("beta"), "eligible"),
        (verdict("beta", predicted_ms=1.2345, prediction=prediction(1.2345)), "eligible, predicted 1.23 ms"),
        (
            verdict("beta", predicted_ms=0.8449, prediction=prediction(0.3112, 0.8449)),
            "eligible, predicted 0.845 ms of the host, 0.311 ms of the device",
        ),
        (
            verdict("beta", predicted_ms=0.3112, prediction=prediction(0.3112, 0.8449, kind="inferred")),
            "eligible, predicted 0.311 ms (inferred)",
        ),
        (verdict("beta", repairs=("recognize_mask",)), "eligible, after recognize_mask"),
        (
            verdict("beta", repairs=("materialize_mask", "cast_mask"), extra_bytes=3 * GIB),
            "eligible, after materialize_mask and cast_mask (3 GiB more)",
        ),
        (verdict("beta", score_bytes=45 * GIB), "eligible, 45 GiB of scores"),
        (verdict("beta", "rejected", score_bytes=45 * GIB), "rejected"),
        (
            verdict("beta", "unavailable", missing=("flash-attn-4",)),
            "unavailable, needs flash-attn-4, which is not installed",
        ),
        (
            verdict("beta", excluded="banned", origin="ATTNROUTE_BACKENDS=-beta"),
            "eligible, banned by ATTNROUTE_BACKENDS=-beta",
        ),
        (verdict("beta", excluded="not_allowed"), "eligible, not among those that somebody allows"),
        (verdict("beta", excluded="not_required"), "eligible, not the one that somebody requires"),
        (verdict("beta", excluded="strict"), "eligible, kept out by strict, set by somebody"),
        (
            verdict("beta", "unknown", excluded="unknown"),
            "unknown, not chosen without allow_unknown (somebody)",
        ),
    ],
)
def test_a_status_says_everything_about_a_verdict(given, said) -> None:
    assert sentences.status(given, decision(given, order=("alpha",))) == said


def test_a_provider_that_cannot_be_imported_is_said_with_its_error() -> None:
    host = HOST.model_copy(update={"broken": {"flash-attn": "undefined symbol"}})
    given = verdict("beta", "unavailable", missing=("flash-attn",))
    assert "needs flash-attn, which cannot be used (undefined symbol)" in sentences.status(
        given, decision(given, host=host)
    )


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({}, "needs flash-attn-3 or xformers, none of which is installed"),
        (
            {"xformers": "c"},
            "needs flash-attn-3 or xformers: flash-attn-3 is not installed and xformers cannot be used (c)",
        ),
        (
            {"xformers": "b", "flash-attn-3": "a"},
            "needs flash-attn-3 or xformers: flash-attn-3 cannot be used (a) and xformers cannot be used (b)",
        ),
    ],
)
def test_alternatives_are_said_with_what_is_wrong_with_each(broken, said) -> None:
    host = HOST.model_copy(update={"broken": broken})
    given = verdict("beta", "unavailable", missing=("flash-attn-3 | xformers",))
    assert sentences.status(given, decision(given, host=host)) == f"unavailable, {said}"
    assert sentences.needed("flash-attn-3 | xformers") == "flash-attn-3 or xformers"


def test_what_is_no_distribution_is_said_in_words() -> None:
    given = verdict("beta", "unavailable", missing=("c++", "avx2"))
    said = sentences.status(given, decision(given))
    assert said == "unavailable, needs a C++ compiler, which is not there, needs AVX2, which is not there"
    assert sentences.hint(Hint(kind="install", change="c++", selects="beta")) == (
        "installing a C++ compiler would select beta"
    )


def test_an_unknown_backend_that_was_allowed_is_said_to_be_unknown() -> None:
    policy = Policy(allow_unknown=True, origin={"allow_unknown": "override()"})
    given = verdict("alpha", "unknown")
    said = sentences.status(given, decision(given, order=("alpha",), policy=policy))
    assert said == "selected, unknown, allowed by override()"


@pytest.mark.parametrize(
    ("policy", "order", "said"),
    [
        ({}, ("alpha",), "the only one that may run this call"),
        (
            {},
            ("alpha", "beta"),
            "first of those that may run, because alpha is the fastest [any/arch/default]",
        ),
        ({"require": "alpha"}, ("alpha",), "required by me"),
        ({"prefer": ("alpha",)}, ("alpha", "beta"), "preferred by me"),
        (
            {"prefer": ("gamma",)},
            ("alpha", "beta"),
            "first of those that may run, because alpha is the fastest [any/arch/default]",
        ),
        ({"allow": ("alpha", "beta")}, ("alpha", "beta"), "first of those that me allows"),
    ],
)
def test_what_put_the_selected_backend_first_is_said(policy, order, said) -> None:
    wishes = Policy(**policy, origin=dict.fromkeys(policy, "me"))
    assert sentences.why_selected(decision(order=order, policy=wishes)) == said


def timed(*backends, **fields):
    """Return a decision among alpha, beta and gamma; those that are named have predicted times."""
    known = {"predicted_ms": 1.0, "prediction": prediction()}
    verdicts = [verdict(name, **(known if name in backends else {})) for name in ("alpha", "beta", "gamma")]
    return decision(*verdicts, order=("alpha", "beta", "gamma"), **fields)


TIMES = "predicted times, measured on NVIDIA H200, 2026-11-29"
REASON = "any/arch/default: gamma is what beta is"


@pytest.mark.parametrize(
    ("given", "selected", "order"),
    [
        (
            timed("alpha", "beta", "gamma", why_this_order=TIMES),
            "first of 3 that may run, by predicted time",
            f"by {TIMES}",
        ),
        (
            timed("alpha", "beta", why_this_order=f"{TIMES}; for the rest {REASON}"),
            "first of 3 that may run, by predicted time",
            f"by {TIMES}; the others by [any/arch/default]",
        ),
        (
            timed("beta", "gamma", why_this_order=f"{TIMES}; for the rest {REASON}"),
            "first of those that may run, because gamma is what beta is [any/arch/default]",
            f"by {TIMES}; the others by [any/arch/default]",
        ),
        (
            timed("alpha", why_this_order=REASON),
            "first of those that may run, because gamma is what beta is [any/arch/default]",
            "by [any/arch/default]; their times are unmeasured",
        ),
    ],
)
def test_it_is_said_whether_times_or_preferences_made_the_order(given, selected, order) -> None:
    assert sentences.why_selected(given) == selected
    assert sentences.order_by(given) == order


def test_a_candidate_without_a_time_among_some_with_one_was_not_measured() -> None:
    given = timed("alpha", "beta", why_this_order=f"{TIMES}; for the rest {REASON}")
    assert sentences.status(given.verdict("gamma"), given) == "eligible, no measurement"
    assert sentences.status(given.verdict("alpha"), given) == "selected, predicted 1 ms"


def test_without_a_preference_the_names_decide() -> None:
    given = decision(order=("alpha", "beta"), why_this_order="no preference applies")
    assert sentences.why_selected(given) == "first by name, because no preference applies"


def test_a_host_is_said_with_torch_cuda_and_cudnn_first() -> None:
    assert sentences.host_line(HOST) == "sm_90, some card, torch 2.11.0, cudnn 9.19.0, triton 3.5"


def test_settings_are_said_with_their_origin_and_defaults_are_not() -> None:
    policy = Policy(
        ban=("alpha", "beta"),
        recognize=False,
        expected_calls=20_000,
        origin={
            "ban": "ATTNROUTE_BACKENDS",
            "recognize": "override()",
            "expected_calls": "ATTNROUTE_EXPECTED_CALLS=20000",
        },
    )
    assert sentences.settings(policy) == [
        "ban alpha and beta (ATTNROUTE_BACKENDS)",
        "recognize off (override())",
        "expected calls 20,000 (ATTNROUTE_EXPECTED_CALLS=20000)",
    ]
    assert sentences.settings(Policy()) == []


SEEN = "the bool tensor 1x1x64x64 was recognised as"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("", []),
        (":recognized=causal", [f"{SEEN} causal (top left)"]),
        (":recognized=full", [f"{SEEN} no mask at all"]),
        (":recognized=(causal+documents=3,61)", [f"{SEEN} causal (top left) and 2 documents"]),
        (
            ":recognized=(window=3,open+keys=60)",
            [f"{SEEN} window (left 3, right open, top left) and key padding on the right"],
        ),
        (":recognized=(documents+keys-any)", [f"{SEEN} documents and key padding"]),
        (":recognized=keys-left=3", [f"{SEEN} key padding on the left"]),
        (":recognized=keys=0", [f"{SEEN} no key at all"]),
        (":recognized=(prefix=7:bottom_right)", [f"{SEEN} causal behind a prefix (bottom right)"]),
    ],
)
def test_a_recognised_mask_is_said(option, said) -> None:
    assert sentences.recognized(parse(f"bf16 b1 hq1 sq64 d64 dense=1x1x64x64{option}")) == said


FAULT = finding(rule="sm_90/beta/nan", kind="wrong_result", repaired_by="expand_kv")
TENSOR = "given the mask as one bool tensor"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"backend": "none", "inexpressible": ("softcap", "function_mask")},
            "cannot say softcap or function mask",
        ),
        ({"backend": "none"}, "would raise, because none of its kernels takes this call"),
        ({"backend": "unknown"}, "not known for torch 2.11.0"),
        ({"backend": "alpha", "mask_form": "is_causal"}, "would run the same kernel, given is_causal"),
        ({"backend": "math", "score_bytes": 45 * GIB}, "would run math, 45 GiB of scores"),
        (
            {"backend": "beta", "mask_form": "dense_mask"},
            f"would run beta, {TENSOR}, in spite of a known wrong result [sm_90/beta/nan]",
        ),
    ],
)
def test_stock_is_said(given, said) -> None:
    verdicts = (verdict("alpha"), verdict("beta", "eligible", FAULT), verdict("math"))
    assert sentences.stock(Stock(**given), decision(*verdicts, order=("alpha",))) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"kind": "mask_object", "change": "causal"},
            "if the mask tensor is causal, masks.Causal() in its place would select beta",
        ),
        (
            {"kind": "install", "change": "flash-attn-4", "version": "4.0"},
            "installing flash-attn-4 >= 4.0 would select beta",
        ),
        (
            {"kind": "upgrade", "change": "torch", "version": "2.14.0"},
            "upgrading to torch >= 2.14.0 would select beta",
        ),
        (
            {"kind": "upgrade", "change": "flash-attn-4", "version": "4.0.0b12", "allows": "gamma"},
            "upgrading to flash-attn-4 >= 4.0.0b12 would make gamma eligible",
        ),
        (
            {"kind": "install", "change": "a", "version": "1", "below": "3", "also": (("b", None, "2"),)},
            "installing a >= 1, < 3 and b < 2 would select beta",
        ),
        (
            {"kind": "install", "change": "a", "also": (("b", "2", None), ("c++", None, None))},
            "installing a, b >= 2 and a C++ compiler would select beta",
        ),
        ({"kind": "dropout", "change": "dropout_p = 0"}, "dropout_p = 0 would select beta"),
        ({"kind": "pad_seqlen", "change": "seqlen = 768"}, "seqlen = 768 would select beta"),
    ],
)
def test_a_hint_is_said(given, said) -> None:
    assert sentences.hint(Hint(selects="beta", **given)) == said


def test_verdicts_are_arranged_by_order_then_by_how_near_they_are() -> None:
    verdicts = (
        verdict("math", excluded="strict"),
        verdict("alpha", "rejected"),
        verdict("beta"),
        verdict("gamma", "unavailable"),
        verdict("delta", excluded="banned"),
        verdict("epsilon"),
        verdict("zeta", "unknown"),
    )
    arranged = sentences.arranged(decision(*verdicts, order=("epsilon", "beta")))
    assert [v.backend for v in arranged] == ["epsilon", "beta", "delta", "math", "gamma", "zeta", "alpha"]


@pytest.mark.parametrize(
    ("items", "said"), [((), ""), (("a",), "a"), (("a", "b"), "a and b"), (("a", "b", "c"), "a, b and c")]
)
def test_lists_are_joined_as_in_a_sentence(items, said) -> None:
    assert sentences.listed(items) == said
