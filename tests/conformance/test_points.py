"""Calls on both sides of rows: the row alone decides between them."""

from __future__ import annotations

import pytest

from attnroute.conformance.changes import changed
from attnroute.conformance.points import points_of
from attnroute.engine.decide import judge
from attnroute.engine.evaluate import evaluate
from attnroute.question.facts import FACTS, facts_of
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.policy import Policy
from attnroute.tables.load import load

TABLES = load()
HOSTS = {
    "cpu": {"torch": "2.13.0", "c++": "12", "avx2": "present"},
    "sm_90": {
        "torch": "2.11.0",
        "cuda": "13.0",
        "cudnn": "9.19.0",
        "triton": "3.6.0",
        "flash-attn-4": "4.0.0b36",
        "nvidia-cudnn-frontend": "1.32.0",
        "xformers": "0.0.34",
        "nvidia-cutlass-dsl": "4.7.0",
    },
}
FOUND = {
    arch: [
        p
        for backend in TABLES.backends
        for p in points_of(TABLES, Host(arch=arch, versions=versions), backend)
    ]
    for arch, versions in HOSTS.items()
}


def test_nearly_every_row_that_applies_has_both_sides():
    for arch, found in FOUND.items():
        tried = [p for p in found if not p.reason]
        both = [p for p in tried if p.outside.trials and (p.inside.trials or not p.has_inside)]
        assert len(tried) > (20 if arch == "cpu" else 150)
        assert len(both) >= 0.95 * len(tried), [p.row.id for p in tried if p not in both]
        assert all(p.reason or p.inside.reason or p.inside.trials for p in found)


@pytest.mark.parametrize("arch", HOSTS)
def test_what_is_inside_is_taken_and_what_is_outside_is_rejected_by_the_row(arch):
    host = Host(arch=arch, versions=HOSTS[arch])
    for points in FOUND[arch]:
        for trial in points.inside.trials:
            verdict = judge(parse(trial.line), host, TABLES, points.backend, Policy())
            assert verdict.status == "eligible", trial
        for trial in points.outside.trials:
            outcomes = {f.rule: f.outcome for f in evaluate(parse(trial.line), host, TABLES, points.backend)}
            assert outcomes[points.row.id] == "fail", trial
            assert trial.past[0] == points.row.id


def test_inside_is_tried_in_every_memory_layout_that_is_admitted():
    (points,) = [p for p in FOUND["cpu"] if p.row.id == "any/flash/head-dims-equal"]
    first = parse(points.inside.trials[0].line)
    alike = [t for t in points.inside.trials if parse(t.line).changed(strides=first.strides) == first]
    assert {t.memory for t in alike} == {(), ("bhsd",) * 3, ("bshd",) * 3}
    forms = [parse(t.line).strides for t in alike]
    assert {f.packed for f in forms} == {f.kv_heads_expanded for f in forms} == {True, False}
    assert {t.values for t in alike} == {"usual", "sharp", "low", "equal", "zeros"}


def test_outside_of_a_row_about_offsets_tokens_lie_as_far_apart_as_the_fact_says():
    """Elements of the whole batch are between two tokens only where the tokens are outermost."""
    (found,) = (p for p in FOUND["sm_90"] if p.row.id == "shared/flex_triton/key-offset-32-bit")
    orders = {(t.line, t.memory) for t in found.outside.trials}
    apart = [line for line, _ in orders if "unpacked" in line and parse(line).batch > 1]
    assert apart
    assert all((line, ("sbhd",) * 3) in orders for line in apart)
    assert all(memory != ("sbhd",) * 3 for line, memory in orders if "unpacked" not in line)


def test_a_row_about_large_calls_is_tried_with_small_ones():
    (points,) = [p for p in FOUND["sm_90"] if p.row.id == "shared/flash_cuda/grid-batch-unchecked"]
    call = parse(points.outside.trials[0].line)
    assert call.batch > 65535
    assert call.seqlen_q <= 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim_qk", 72),
        ("seqlen_kv_mod_128", 64),
        ("is_gqa", True),
        ("alignment", "bottom_right"),
        ("window_looks_ahead", True),
        ("key_padding", True),
        ("left_out_finite", False),
        ("dense_bias", True),
        ("qkv_aligned_16", False),
        ("kv_heads_expanded", True),
        ("compiled", True),
        ("combined_mask", True),
    ],
)
def test_a_change_makes_the_fact_so(field, value):
    call = parse("bf16 b2 hq8 sq512 d64")
    made = [facts_of(other)[field] for other in changed(call, field, value)]
    assert value in made


def test_masks_are_cut_to_the_sizes_of_the_call():
    call = parse("bf16 b2 hq8 sq512 d64 dense=2x1x512x512 bias=bf16:1x8x512x512")
    (first, *_) = changed(call, "seqlen_q", 100)
    assert render(first) == "bf16 b2 hq8 hkv8 sq100 skv100 d64 dense=2x1x100x100 bias=bf16:1x8x100x100"


def test_an_unknown_field_is_left_alone():
    assert not list(changed(parse("bf16 b2 hq8 sq512 d64"), "score_elements", 3))
    assert "score_elements" in FACTS
