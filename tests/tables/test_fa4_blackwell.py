"""Rows of fa4 on Blackwell in the data centre and on Thor: both sides of each."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import DETERMINISTIC, MHA, MQA, NEWEST, RELEASES, SINK, fa4
from support.row_sides import (
    THD,
    TRAINING,
    Case,
    archs_with,
    causal,
    check_sides,
    dims,
    findings,
    lengths,
    rows_of,
    strides,
    verdict,
    window,
)

DSL_4_6 = "shared/fa4_sm_103/backward-cutlass-dsl-4-6-0"
COMMON, FEATURES = "shared/fa4_sm_10x", "shared/fa4_sm_10x_features"
SOFTCAP = {"softcap": 30.0}
BSHD = {"layout": "bshd"}
WIDE = dims(256)
LATENT = TRAINING | dims(192, 128)
CUDA_12 = {"torch": "2.11.0+cu128"}

COMMON_CASES = [
    Case(f"{COMMON}/head-dim-multiple-of-8-before-b5", "sm_100", dims(68) | fa4(4), dims(72)),
    Case(f"{COMMON}/head-dims-before-b5", "sm_100", dims(192) | fa4(4), dims(192, 128)),
    Case(f"{COMMON}/head-dims-before-b5", "sm_100", WIDE | fa4(4), fa4(5)),
    Case(f"{COMMON}/absorbed-64-512", "sm_100", dims(64, 512), dims(64, 128)),
    Case(f"{COMMON}/absorbed-64-512", "sm_110", dims(64, 512), dims(512, 512)),
    Case(f"{COMMON}/symmetric-512", "sm_100", dims(512), WIDE),
    Case(f"{COMMON}/symmetric-512", "sm_103", dims(512) | fa4(16), fa4(15)),
    Case(f"{COMMON}/launch-below-32-before-b16", "sm_100", dims(16) | fa4(15), fa4(16)),
    Case(f"{COMMON}/launch-below-32-before-b16", "sm_100", dims(64, 8) | fa4(14), dims(64, 32)),
    Case(f"{COMMON}/values-wider-before-b26", "sm_100", dims(64, 128) | fa4(25), fa4(26)),
    Case(f"{COMMON}/values-wider-before-b26", "sm_100", dims(64, 128) | fa4(25), dims(128, 64)),
    Case(f"{COMMON}/backward-multiple-of-32-before-b30", "sm_100", TRAINING | dims(72) | fa4(29), fa4(30)),
    Case(f"{COMMON}/backward-multiple-of-32-before-b30", "sm_100", TRAINING | dims(72) | fa4(29), dims(96)),
    Case(f"{COMMON}/backward-dv-store-16", "sm_100", TRAINING | dims(128, 40) | fa4(29), fa4(30)),
    Case(f"{COMMON}/backward-dv-store-16", "sm_100", TRAINING | dims(128, 96) | fa4(29), dims(128, 64)),
    Case(f"{COMMON}/backward-dv-store-32", "sm_103", TRAINING | dims(128, 96), {"phase": "inference"}),
    Case(f"{COMMON}/backward-dv-store-32", "sm_110", TRAINING | dims(64, 96), dims(64, 128)),
    Case(f"{COMMON}/backward-192-cuda-12", "sm_100", LATENT | fa4(10, **CUDA_12), fa4(10)),
    Case(f"{COMMON}/backward-192-cuda-12", "sm_110", LATENT | fa4(12, **CUDA_12), fa4(13, **CUDA_12)),
    Case(f"{COMMON}/head-dim-256-layout-before-b20", "sm_100", WIDE | fa4(19), BSHD),
    Case(f"{COMMON}/head-dim-256-layout-before-b20", "sm_100", WIDE | fa4(19), fa4(20)),
    Case(
        f"{COMMON}/head-dim-256-layout-before-b20",
        "sm_100",
        WIDE | BSHD | strides(packed=False) | fa4(18),
        strides(),
    ),
    Case(f"{COMMON}/head-dim-256-backward-before-b13", "sm_100", TRAINING | BSHD | WIDE | fa4(12), fa4(13)),
    Case(
        f"{COMMON}/head-dim-256-backward-before-b13",
        "sm_100",
        TRAINING | BSHD | WIDE | fa4(11),
        {"phase": "inference"},
    ),
    Case(f"{COMMON}/head-dim-256-cross-b11", "sm_100", WIDE | BSHD | lengths(8, 512) | fa4(11), fa4(12)),
    Case(
        f"{COMMON}/head-dim-256-cross-b11", "sm_100", WIDE | BSHD | lengths(8, 512) | fa4(11), lengths(8, 8)
    ),
    Case(f"{COMMON}/head-dim-256-ragged-before-b14", "sm_100", WIDE | THD | fa4(13), fa4(14)),
    Case(f"{COMMON}/head-dim-256-ragged-before-b14", "sm_100", WIDE | THD | fa4(13), BSHD),
]
FEATURE_CASES = [
    Case(
        f"{FEATURES}/backward-window-192-before-b7",
        "sm_100",
        TRAINING | dims(192, 128) | window(64, 0) | fa4(4),
        fa4(5),
    ),
    Case(f"{FEATURES}/head-dim-256-window-before-b34", "sm_100", WIDE | window(64, 0) | fa4(33), fa4(34)),
    Case(f"{FEATURES}/head-dim-256-window-before-b34", "sm_100", WIDE | window(64, 0) | fa4(33), dims(128)),
    Case(f"{FEATURES}/head-dim-256-softcap-before-b34", "sm_100", WIDE | SOFTCAP | fa4(33), fa4(34)),
    Case(f"{FEATURES}/head-dim-256-sink-before-b34", "sm_110", WIDE | SINK | fa4(33), fa4(34)),
    Case(
        f"{FEATURES}/head-dim-256-single-query-before-b31",
        "sm_100",
        WIDE | THD | lengths(1, 64) | fa4(30),
        fa4(31),
    ),
    Case(
        f"{FEATURES}/head-dim-256-single-query-before-b31",
        "sm_100",
        WIDE | THD | lengths(1, 64) | fa4(30),
        lengths(2, 64),
    ),
    Case(f"{FEATURES}/head-dim-256-backward-window", "sm_100", TRAINING | WIDE | window(64, 0), causal()),
    Case(
        f"{FEATURES}/head-dim-256-backward-window",
        "sm_103",
        TRAINING | WIDE | window(64, 0),
        {"phase": "inference"},
    ),
    Case(f"{FEATURES}/head-dim-256-backward-softcap", "sm_100", TRAINING | WIDE | SOFTCAP, dims(128)),
    Case(f"{FEATURES}/head-dim-256-backward-sink", "sm_100", TRAINING | WIDE | SINK, {"phase": "inference"}),
    Case(
        f"{FEATURES}/head-dim-256-deterministic-before-b34",
        "sm_100",
        TRAINING | WIDE | DETERMINISTIC | fa4(33),
        fa4(34),
    ),
]
OTHER_CASES = [
    Case("sm_103/fa4/arch-before-b15", "sm_103", fa4(14), fa4(15)),
    Case(DSL_4_6, "sm_103", TRAINING | fa4(26, "4.6.0"), fa4(26)),
    Case(DSL_4_6, "sm_103", TRAINING | fa4(20, "4.6.1"), fa4(20, "4.6.2")),
    Case(DSL_4_6, "sm_103", TRAINING | THD | MQA | fa4(26, "4.6.0"), MHA),
    Case(DSL_4_6, "sm_103", TRAINING | fa4(26, "4.6.0"), {"phase": "inference"}),
    Case("shared/fa4_sm_110/cutlass-dsl-before-4-6", "sm_110", fa4(16, "4.5.2"), fa4(27, "4.8.1")),
    Case("shared/fa4_sm_110/head-dim-256-before-b15", "sm_110", WIDE | fa4(14), fa4(15)),
    Case("shared/fa4_sm_110/head-dim-256-before-b15", "sm_110", WIDE | fa4(14), dims(128)),
]
CASES = [*COMMON_CASES, *FEATURE_CASES, *OTHER_CASES]

NOT_WITH_128 = {
    16: {8, 16, 24, 32, 40, 48, 72, 80, 88, 96, 104, 112},
    32: {8, 16, 24, 32, 72, 80, 88, 96},
}
"""Values with keys of 128 whose gradient is wrong, by what head dims are rounded up to."""


def wrong_values(release, head_dim_qk=128):
    """The widths of values that a row about the store of dV refuses to train."""
    rule = f"{COMMON}/backward-dv-store-{16 if release < 30 else 32}"
    found = {
        v: findings("fa4", NEWEST, "sm_100", TRAINING | dims(head_dim_qk, v) | fa4(release))[rule]
        for v in range(8, 129, 8)
    }
    return {v for v, finding in found.items() if finding.outcome == "fail"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_refuses_one_side_and_takes_the_other(case):
    check_sides("fa4", NEWEST, case)


def test_every_row_but_the_recorded_ones_has_a_case():
    mine = {r for r in rows_of("fa4") if r.startswith(("shared/fa4_sm_1", "sm_103/"))}
    assert {case.rule for case in CASES} == {r for r in mine if "/validator-" not in r}


@pytest.mark.parametrize("release", RELEASES)
def test_values_whose_gradient_is_wrong_with_keys_of_128(release):
    assert wrong_values(release) == NOT_WITH_128[16 if release < 30 else 32]


def test_the_two_roundings_follow_each_other_without_a_gap():
    rules = [f"{COMMON}/backward-dv-store-{multiple}" for multiple in (16, 32)]
    for release in RELEASES:
        found = findings("fa4", NEWEST, "sm_100", TRAINING | dims(128, 96) | fa4(release))
        assert [found[rule].outcome == "fail" for rule in rules] == [release < 30, release >= 30]


@given(st.sampled_from(range(8, 129, 8)), st.sampled_from(range(8, 129, 8)), st.sampled_from([29, 36]))
def test_the_store_of_dv_is_refused_where_it_is_not_whole(qk, v, release):
    multiple = 16 if release < 30 else 32
    half_qk, half_v = (-(-n // multiple) * multiple // 2 for n in (qk, v))
    assert (v in wrong_values(release, qk)) is (half_v % gcd(32, half_qk) != 0)


@given(st.sampled_from(range(8, 129, 8)))
def test_equal_head_dims_store_dv_rightly(head_dim):
    assert head_dim not in wrong_values(36, head_dim) | wrong_values(29, head_dim)


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_110"])
def test_deepseek_shapes_train(arch):
    for changes in (MHA, MQA):
        found = verdict("fa4", NEWEST, arch, TRAINING | dims(192, 128) | causal() | changes)
        assert (found.status, found.repairs) == ("eligible", ())


@pytest.mark.parametrize(
    ("release", "phase", "may"),
    [
        (10, "inference", "rejected"),
        (11, "inference", "eligible"),
        (12, "training", "rejected"),
        (13, "training", "eligible"),
        (36, "training", "eligible"),
    ],
)
def test_head_dim_256_came_with_b11_and_trains_from_b13_on(release, phase, may):
    found = verdict("fa4", fa4(release)["versions"], "sm_100", BSHD | WIDE | {"phase": phase})
    assert found.status == may


@pytest.mark.parametrize(("phase", "native"), [("inference", True), ("training", False)])
def test_a_sink_at_256_is_native_forward_only(phase, native):
    """The forward takes it, and the backward would raise."""
    found = verdict("fa4", NEWEST, "sm_100", WIDE | SINK | {"phase": phase})
    assert found.status == "eligible"
    assert found.repairs == (() if native else ("sink_from_lse",))


def test_unequal_256_is_refused_everywhere():
    for arch, pair in product(("sm_100", "sm_103", "sm_110"), ((256, 128), (128, 256), (192, 192))):
        assert verdict("fa4", NEWEST, arch, dims(*pair)).status == "rejected"


def test_the_rows_hold_on_three_architectures_and_not_on_the_one_that_nobody_tried():
    assert archs_with("fa4", f"{COMMON}/symmetric-512") == {"sm_100", "sm_103", "sm_110"}
    assert verdict("fa4", NEWEST, "sm_107", dims(128)).status == "rejected"
