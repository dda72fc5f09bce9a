"""Why a backend is not selected: each change that is named really selects it, or lets it run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import predicting
from support.strategies import calls, hosts

from attnroute.engine.advice import why_not
from attnroute.engine.decide import decide, explain_why_not
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.policy import Policy
from attnroute.report.why_not import render_why_not
from attnroute.tables.load import load

H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
LINE = "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train"


def asked(backend, line=LINE, host=H100, **policy):
    return explain_why_not(parse(line), host, load(), Policy(**policy), backend)


def said(answer):
    return [(hint.kind, hint.change, hint.selects, hint.allows) for hint in answer.changes]


def with_change(call, change):
    """Make a change of a call from its words."""
    come, _, gone = change.partition(" in place of ")
    if change.startswith("without "):
        come, gone = "", change.removeprefix("without ")
    words = [w for w in render(call).split() if w not in gone.split()]
    return parse(" ".join([*words, *come.removeprefix("with ").split()]))


@given(calls(), hosts(), st.sampled_from(sorted(load().backends)))
@settings(max_examples=60)
def test_a_change_does_what_it_says(call, host, backend):
    answer = explain_why_not(call, host, load(), Policy(), backend)
    before = answer.decision
    assert before == decide(call, host)
    assert (before.selected == backend) <= (answer.changes == ())
    assert (answer.behind is not None) is (backend in before.order[1:])
    for hint in answer.changes:
        assert backend in (hint.selects, hint.allows)
        if hint.kind == "call" and not hint.also:
            after = decide(with_change(before.call, hint.change), host)
            assert after.selected == hint.selects
            assert backend in after.order
    assert render_why_not(answer).count("\nchange ") <= max(1, len(answer.changes))


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("bf16 b1 hq8 hkv4 sq4096 d320 causal", "d256 in place of d320"),
        ("bf16 b1 hq8 sq4096 d128 softcap=30 causal", "without softcap=30"),
        ("bf16 b1 hq8 sq4096 d128 causal train double_backward", "without double_backward"),
        ("fp32 b1 hq8 sq4096 d128 causal", "bf16 in place of fp32"),
    ],
)
def test_the_change_of_a_call_is_said_in_words_of_its_line(line, change):
    assert ("call", change, "cudnn", None) in said(asked("cudnn", line))


def test_of_a_kind_of_change_the_smallest_is_named():
    def took(backend, final, *_):
        return {"cudnn": (1.0, 0.0), "flash": (final.seqlen_kv / 1500, 0.0)}.get(backend)

    with predicting(took) as tables:
        answer = explain_why_not(parse(LINE), H100, tables, Policy(), "flash")
    lengths = [hint.change for hint in answer.changes if hint.change.startswith("sq")]
    assert lengths == ["sq1024 skv1024 in place of sq4096 skv4096"]


def test_a_setting_that_keeps_it_out_is_named_with_its_origin():
    origin = {"ban": "ATTNROUTE_BACKENDS=-cudnn"}
    text = render_why_not(asked("cudnn", ban=("cudnn",), origin=origin))
    assert "change     lifting the ban by ATTNROUTE_BACKENDS=-cudnn would select cudnn" in text
    required = asked("chunked", require="flash", origin={"require": "attention()"})
    assert said(required) == [("policy", "backend = chunked", "chunked", None)]


def test_a_version_that_is_too_new_is_gone_back_from():
    newest = H100.with_versions({"torch": "2.99.0"})
    (hint,) = [h for h in asked("cudnn", host=newest).changes if h.change == "torch"]
    assert (hint.kind, hint.selects) == ("downgrade", "cudnn")
    assert "going back to torch >= " in render_why_not(asked("cudnn", host=newest))


def test_packages_and_a_change_of_the_call_are_named_together():
    (hint, *_) = asked("fa4", "bf16 b1 hq8 hkv4 sq16384 d512 causal train").changes
    assert (hint.kind, hint.change) == ("call", "d256 in place of d512")
    assert [name for name, *_ in hint.also] == ["flash-attn-4", "nvidia-cutlass-dsl"]


def test_for_another_device_nothing_is_found():
    answer = asked("cudnn", host=Host(arch="cpu", versions={"torch": "2.13.0"}))
    assert answer.changes == ()
    assert "change     none found" in render_why_not(answer)


@pytest.mark.parametrize(
    ("backend", "policy", "behind"),
    [
        ("flash", {}, "time"),
        ("math", {}, "quadratic"),
        ("cudnn", {"prefer": ("flash",)}, "policy"),
        ("cudnn", {}, None),
        ("fa3", {}, None),
    ],
)
def test_what_puts_it_behind_is_said(backend, policy, behind):
    answer = asked(backend, **policy)
    assert answer.behind == behind
    assert ("behind     " in render_why_not(answer)) is (behind is not None)


def test_a_bounded_number_of_questions_is_asked(monkeypatch):
    count = 0
    select = why_not.select

    def counted(*args):
        nonlocal count
        count += 1
        return select(*args)

    monkeypatch.setattr(why_not, "select", counted)
    for backend in load().backends:
        count = 0
        asked(
            backend, "fp32 b8 hq32 hkv8 sq4000 skv4000 d320 causal keys-any softcap=30 dropout=0.1 sink train"
        )
        assert count <= 150, backend
