"""Rows of fa4 that hold everywhere, and those of Hopper, sm_8x and sm_12x: both sides of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import DETERMINISTIC, MHA, MQA, NEWEST, RELEASES, SINK, dsl_of, fa4
from support.row_calls import (
    THD,
    TRAINING,
    archs_with,
    causal,
    dims,
    findings,
    lengths,
    verdict,
)

PACKAGE, HOPPER, OLD, WORK = "shared/fa4_package", "shared/fa4_sm_90", "shared/fa4_sm_8x", "sm_120/fa4"
BOTTOM_RIGHT = lengths(8, 512) | causal("bottom_right")


def status(arch, fields=None, versions=NEWEST):
    return verdict("fa4", versions, arch, fields or {}).status


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110"])
def test_a_plain_call_may_run_with_the_newest_release(arch):
    assert status(arch, dims(128) | causal()) == "eligible"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"])
def test_a_plain_training_call_may_run_with_the_newest_release(arch):
    assert status(arch, TRAINING | dims(128) | causal()) == "eligible"


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_with_the_compiler_that_it_asks_for_serves_hopper(release):
    """But for those whose backward reads a gradient that is not written yet."""
    versions, fields = fa4(release)["versions"], dims(128) | causal()
    assert status("sm_90", fields, versions) == "eligible"
    assert status("sm_90", TRAINING | fields, versions) == ("rejected" if 5 <= release < 10 else "eligible")


@pytest.mark.parametrize(("release", "known"), [(2, False), (3, True), (36, True), (99, False)])
def test_nothing_is_said_of_releases_that_nobody_read(release, known):
    versions = {**NEWEST, "flash-attn-4": f"4.0.0b{release}"}
    found = findings("fa4", versions, "sm_90", {})
    assert (found["any/fa4/versions-known"].outcome == "pass") is known


def test_nothing_is_said_of_a_compiler_that_nobody_tried():
    assert status("sm_90", versions={**NEWEST, "nvidia-cutlass-dsl": "4.99.0"}) == "unknown"


@pytest.mark.parametrize("missing", ["flash-attn-4", "nvidia-cutlass-dsl"])
def test_both_distributions_are_needed(missing):
    there = {name: version for name, version in NEWEST.items() if name != missing}
    assert verdict("fa4", there, "sm_90", dims(128)).status == "unavailable"


HALF_STEPS = {d for d in range(8, 129, 8) if -(-d // 16) * 16 % 32 == 16}


def test_dq_is_wrong_where_it_was_measured():
    """The dims that benchmarks/results/h100-fa4b36-gradients.json has, and no other that it found right."""
    assert {16, 40, 48, 72, 80, 104, 112} <= HALF_STEPS
    assert not {24, 32, 64, 96, 128} & HALF_STEPS


@given(st.integers(1, 32).map(lambda n: 8 * n), st.sampled_from([5, 29, 30, 36]))
def test_training_with_a_half_step_of_head_dim_is_refused(head_dim, release):
    found = findings("fa4", NEWEST, "sm_90", TRAINING | dims(head_dim) | fa4(release))
    assert (found[f"{HOPPER}/backward-dq-half-step"].outcome == "fail") is (head_dim in HALF_STEPS)
    assert found[f"{HOPPER}/backward-dq-half-step"].kind == "wrong_result"


@given(st.integers(1, 256))
def test_hopper_runs_every_head_dim_forward(head_dim):
    """Those that are no multiples of 8 are padded."""
    found = verdict("fa4", NEWEST, "sm_90", dims(head_dim))
    assert found.status == "eligible"
    assert found.repairs == (() if head_dim % 8 == 0 else ("pad_head_dim",))


@pytest.mark.parametrize(
    ("changes", "repair"),
    [
        (MQA | dims(192, 128), "expand_kv"),
        (MQA | dims(192) | fa4(30), "expand_kv"),
        (MQA | DETERMINISTIC | fa4(11), "expand_kv"),
        (SINK | dims(128) | fa4(25), "sink_from_lse"),
    ],
)
def test_a_preparation_makes_hopper_train(changes, repair):
    versions = changes.get("versions", NEWEST)
    fields = {name: value for name, value in changes.items() if name != "versions"}
    found = verdict("fa4", versions, "sm_90", TRAINING | dims(128) | fields)
    assert (found.status, found.repairs) == ("eligible", (repair,))


@pytest.mark.parametrize(
    ("arch", "release", "native"),
    [
        ("sm_90", 25, False),
        ("sm_90", 26, True),
        ("sm_100", 26, True),
        ("sm_103", 36, True),
        ("sm_110", 36, True),
        ("sm_120", 36, False),
        ("sm_121", 36, False),
        ("sm_80", 36, False),
        ("sm_89", 36, False),
    ],
)
def test_sinks_are_native_by_release_and_architecture(arch, release, native):
    """sm_110 asks for CuTe DSL 4.6, which only later releases do."""
    found = verdict("fa4", fa4(release)["versions"], arch, SINK | dims(128))
    assert found.status == "eligible"
    assert ("sink_from_lse" not in found.repairs) is native


def test_deterministic_training_is_not_for_sm_12x():
    found = {
        a
        for a in ("sm_90", "sm_100", "sm_120", "sm_121")
        if status(a, TRAINING | DETERMINISTIC | dims(128)) == "eligible"
    }
    assert found == {"sm_90", "sm_100"}
    assert status("sm_120", DETERMINISTIC | dims(128)) == "eligible"


@pytest.mark.parametrize(
    ("mask", "repairs"),
    [
        ({"kind": "documents", "lengths": [200, 312]}, ("to_varlen",)),
        ({"kind": "key_padding", "side": "left"}, ("clear_left_out", "to_varlen")),
        ({"kind": "key_padding", "side": "left", "finite": True}, ("to_varlen",)),
    ],
)
def test_documents_and_padding_become_sequences(mask, repairs):
    found = verdict("fa4", NEWEST, "sm_90", TRAINING | dims(128) | {"mask": (mask,)})
    assert (found.status, found.repairs) == ("eligible", repairs)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout_p": 0.1},
        {"bias": {"kind": "alibi"}},
        {"bias": {"kind": "function"}},
        {"bias": {"kind": "dense", "dtype": "bfloat16", "shape": [512, 512]}},
        {"mask": ({"kind": "function"},)},
        {"mask": ({"kind": "prefix", "lengths": [10, 20]},)},
        {"mask": ({"kind": "dense", "shape": [512, 512]},)},
    ],
    ids=str,
)
def test_what_the_executor_does_not_pass_is_refused(changes):
    assert status("sm_90", changes) == "rejected"


def test_a_diagonal_at_the_bottom_right_is_native():
    assert verdict("fa4", NEWEST, "sm_90", BOTTOM_RIGHT).repairs == ()
    assert status("sm_90", BOTTOM_RIGHT) == "eligible"


@pytest.mark.parametrize(("release", "given"), [(20, True), (21, False)])
def test_shared_heads_are_not_packed_on_ampere_before_b21(release, given):
    found = verdict("fa4", fa4(release)["versions"], "sm_80", MQA)
    assert dict(found.options) == ({"pack_gqa": False} if given else {})
    assert verdict("fa4", fa4(release)["versions"], "sm_80", MHA).options == ()


ODD, LARGE = {"num_heads_q": 24, "num_heads_kv": 8}, {"num_heads_q": 128, "num_heads_kv": 1}


@pytest.mark.parametrize(
    ("arch", "fields", "unpacked"),
    [
        ("sm_90", ODD | dims(104), True),
        ("sm_90", ODD | dims(112), False),
        ("sm_90", MQA | dims(104), False),
        ("sm_90", MHA | dims(104), False),
        ("sm_90", LARGE | dims(72), True),
        ("sm_100", ODD | dims(80, 72), True),
        ("sm_100", ODD | dims(80), False),
        ("sm_100", LARGE | dims(72), False),
        ("sm_100", MQA | THD | dims(72), True),
        ("sm_100", MQA | THD | dims(80), False),
        ("sm_100", MHA | THD | dims(72), False),
        ("sm_80", MQA | dims(72), True),
        ("sm_80", MQA | dims(80), False),
        ("sm_120", MQA | dims(72, 80), True),
        ("sm_120", MHA | dims(72), False),
    ],
)
def test_shared_heads_of_partial_width_are_not_packed_before_b31(arch, fields, unpacked):
    """Of them 4.0.0b31 is the first release that compiles what loads and stores a packed tile."""
    for release, expected in ((30, unpacked), (31, False)):
        found = verdict("fa4", fa4(release)["versions"], arch, fields)
        assert (found.status, found.repairs) == ("eligible", ())
        assert dict(found.options) == ({"pack_gqa": False} if expected else {})


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_110"])
def test_shared_heads_are_expanded_where_sums_of_narrow_values_find_no_room(arch):
    """Compiled with 4.0.0b36: (128, 64) fails, (96, 64) and heads of their own do not."""
    for heads, size, repairs in (
        (MQA, dims(128, 64), ("expand_kv",)),
        (MQA, dims(128), ()),
        (MQA, dims(96, 64), ()),
        (MHA, dims(128, 64), ()),
    ):
        found = verdict("fa4", fa4(36)["versions"], arch, TRAINING | heads | size)
        assert (found.status, found.repairs) == ("eligible", repairs), size


def test_the_compiler_of_a_release_is_one_that_it_asks_for():
    """The pairs of these tests are pairs that the rows let pass."""
    for release in RELEASES:
        found = findings("fa4", fa4(release, dsl_of(release))["versions"], "sm_90", {})
        assert [rule for rule, f in found.items() if "cutlass-dsl" in rule and f.outcome == "fail"] == []


def test_small_cards_share_their_rows():
    assert archs_with("fa4", "shared/fa4_99_kib/head-dim-max") == {"sm_86", "sm_89", "sm_120", "sm_121"}
    assert archs_with("fa4", "shared/fa4_163_kib/head-dim-max") == {"sm_80", "sm_87"}
