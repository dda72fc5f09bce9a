"""Rows of fa4 on Blackwell in the data centre and on Thor: both sides of each."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import MHA, MQA, NEWEST, RELEASES, SINK, fa4
from support.row_calls import (
    TRAINING,
    archs_with,
    causal,
    dims,
    findings,
    verdict,
)

COMMON, FEATURES = "shared/fa4_sm_10x", "shared/fa4_sm_10x_features"
BSHD = {"layout": "bshd"}
WIDE = dims(256)


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
