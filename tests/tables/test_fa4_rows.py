"""Rows of fa4 that hold everywhere, and those of Hopper, sm_8x and sm_12x: both sides of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import DETERMINISTIC, MHA, MQA, NEWEST, RELEASES, SINK, dsl_of, fa4
from support.row_sides import (
    LEFT_OUT_CASE,
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

PACKAGE, HOPPER, OLD, WORK = "shared/fa4_package", "shared/fa4_sm_90", "shared/fa4_sm_8x", "sm_120/fa4"
SOFTCAP = {"softcap": 30.0}
BOTTOM_RIGHT = lengths(8, 512) | causal("bottom_right")

PACKAGE_CASES = [
    Case(f"{PACKAGE}/dtype", "sm_90", {"dtype": "float32"}, {"dtype": "float16"}),
    Case(f"{PACKAGE}/dtype", "sm_100", {"dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}),
    Case(f"{PACKAGE}/cutlass-dsl-too-new-to-import", "sm_90", fa4(15, "4.6.0"), fa4(15, "4.5.3")),
    Case(f"{PACKAGE}/cutlass-dsl-too-new-to-import", "sm_100", fa4(5, "4.8.1"), fa4(36, "4.8.1")),
    Case(f"{PACKAGE}/cutlass-dsl-too-new-to-compile", "sm_90", fa4(16, "4.6.0"), fa4(16, "4.5.2")),
    Case(f"{PACKAGE}/cutlass-dsl-too-new-to-compile", "sm_90", fa4(19, "4.8.1"), fa4(20, "4.8.1")),
    Case(f"{PACKAGE}/cutlass-dsl-before-4-4-1", "sm_90", fa4(4, "4.4.0"), fa4(4, "4.4.1")),
    Case(f"{PACKAGE}/cutlass-dsl-before-4-4-2", "sm_90", fa4(5, "4.4.1"), fa4(5, "4.4.2")),
    Case(f"{PACKAGE}/cutlass-dsl-before-4-5-2", "sm_90", fa4(16, "4.5.1"), fa4(15, "4.5.1")),
    Case(f"{PACKAGE}/cutlass-dsl-before-4-6", "sm_90", fa4(26, "4.5.3"), fa4(26, "4.6.0.dev0")),
    Case(f"{PACKAGE}/cutlass-dsl-before-4-6-2", "sm_90", fa4(27, "4.6.1"), fa4(27, "4.6.2")),
    Case(f"{PACKAGE}/cutlass-dsl-4-7-before-b26", "sm_90", fa4(20, "4.7.0"), fa4(20)),
    Case(f"{PACKAGE}/cutlass-dsl-4-7-before-b26", "sm_100", fa4(25, "4.8.1"), fa4(26, "4.8.1")),
    Case(f"{PACKAGE}/last-dim-contiguous", "sm_90", strides(last_dim_contiguous=False), strides()),
    Case(f"{PACKAGE}/aligned-before-b26", "sm_90", strides(aligned_16=False) | fa4(25), fa4(26)),
    Case(f"{PACKAGE}/aligned-before-b26", "sm_100", strides(aligned_16=False) | fa4(25), strides()),
    Case(
        f"{PACKAGE}/expanded-heads-before-b26",
        "sm_90",
        MQA | strides(kv_heads_expanded=True) | fa4(25),
        fa4(26),
    ),
    Case(f"{PACKAGE}/odd-groups-before-b5", "sm_90", {"num_heads_q": 24} | fa4(4), fa4(5)),
    Case(f"{PACKAGE}/odd-groups-before-b5", "sm_90", {"num_heads_q": 24} | fa4(4), {"num_heads_q": 16}),
    Case(f"{PACKAGE}/batch-and-heads-not-empty", "sm_90", {"batch": 0}, {"batch": 1}),
    Case(f"{PACKAGE}/long-keys-before-b18", "sm_90", lengths(8, 2000001) | fa4(17), fa4(18)),
    Case(f"{PACKAGE}/long-keys-before-b18", "sm_90", lengths(8, 2000001) | fa4(17), lengths(8, 2000000)),
    Case(
        f"{PACKAGE}/long-queries-backward-before-b18",
        "sm_90",
        TRAINING | lengths(1000001, 8) | fa4(17),
        fa4(18),
    ),
    Case(
        f"{PACKAGE}/long-queries-backward-before-b18",
        "sm_100",
        TRAINING | lengths(1000001, 8) | fa4(17),
        lengths(1000000, 8),
    ),
    Case(f"{PACKAGE}/grid-batch", "sm_90", {"batch": 65536}, {"batch": 65535}),
    Case(
        f"{PACKAGE}/grid-heads",
        "sm_90",
        {"num_heads_q": 65536, "num_heads_kv": 32768},
        {"num_heads_q": 65535, "num_heads_kv": 65535},
    ),
    Case(f"{PACKAGE}/scale-positive", "sm_90", {"scale": "zero"}, {"scale": "positive"}),
    Case(
        f"{PACKAGE}/deterministic-causal-before-b13",
        "sm_90",
        TRAINING | DETERMINISTIC | causal() | fa4(12),
        fa4(13),
    ),
    Case(
        f"{PACKAGE}/deterministic-causal-before-b13",
        "sm_90",
        TRAINING | DETERMINISTIC | causal() | fa4(12),
        {"mask": ()},
    ),
    Case(
        f"{PACKAGE}/compiled-before-capture",
        "sm_90",
        {"context": {"cuda_graph": True}},
        {"context": {"cuda_graph": False}},
    ),
]

ANY_CASES = [
    LEFT_OUT_CASE,
    Case("any/fa4/diagonal-at-bottom-right", "sm_90", lengths(5, 8) | causal(), causal("bottom_right")),
    Case("any/fa4/diagonal-at-bottom-right", "sm_90", lengths(5, 8) | window(2, 2), lengths(8, 8)),
    Case("any/fa4/softcap-before-b9", "sm_100", SOFTCAP | fa4(8), fa4(9)),
    Case("any/fa4/softcap-before-b9", "sm_90", SOFTCAP | fa4(8), {"softcap": 0.0}),
    Case("any/fa4/softcap-backward-before-b9", "sm_100", TRAINING | SOFTCAP | fa4(8), fa4(9)),
    Case("any/fa4/softcap-backward-before-b9", "sm_100", TRAINING | SOFTCAP | fa4(8), {"phase": "inference"}),
    Case("any/fa4/softcap-ragged-backward-before-b24", "sm_90", TRAINING | THD | SOFTCAP | fa4(23), fa4(24)),
    Case(
        "any/fa4/softcap-ragged-backward-before-b24",
        "sm_90",
        TRAINING | THD | SOFTCAP | fa4(23),
        {"layout": "bshd"},
    ),
    Case("any/fa4/sink-gradient-before-b26", "sm_90", TRAINING | SINK | fa4(25), fa4(26)),
    Case("any/fa4/sink-gradient-before-b26", "sm_90", TRAINING | SINK | fa4(25), {"phase": "inference"}),
    Case("any/fa4/sink-dtype-before-b26", "sm_90", SINK | fa4(25), fa4(26)),
    *[
        Case(
            "any/fa4/sink-log-sum-exp-overflows",
            arch,
            SINK | {"return_lse": True} | fields,
            {"return_lse": False},
        )
        for arch in ("sm_90", "sm_100")
        for fields in ({}, TRAINING)
    ],
    Case("any/fa4/keys-not-empty-before-b10", "sm_100", lengths(128, 0) | fa4(9), fa4(10)),
    Case("any/fa4/ragged-keys-before-b10", "sm_90", THD | fa4(9), fa4(10)),
    Case("any/fa4/query-not-empty-before-b14", "sm_90", lengths(0, 8) | fa4(13), fa4(14)),
    Case("any/fa4/backward-not-empty-before-b31", "sm_90", TRAINING | lengths(0, 8) | fa4(30), fa4(31)),
    Case("any/fa4/backward-not-empty-before-b31", "sm_90", TRAINING | lengths(8, 0) | fa4(30), lengths(8, 1)),
    Case("any/fa4/backward-race-before-b10", "sm_90", TRAINING | fa4(5), fa4(4)),
    Case("any/fa4/backward-race-before-b10", "sm_100", TRAINING | MQA | fa4(9), fa4(10)),
    Case("any/fa4/backward-race-before-b10", "sm_110", TRAINING | fa4(7), {"phase": "inference"}),
    Case("any/fa4/ragged-backward-cutlass-dsl-4-5", "sm_90", TRAINING | THD | fa4(11, "4.5.0"), fa4(11)),
    Case(
        "any/fa4/ragged-backward-cutlass-dsl-4-5",
        "sm_100",
        TRAINING | THD | fa4(15, "4.5.1"),
        fa4(15, "4.5.2"),
    ),
    Case(
        "any/fa4/ragged-backward-cutlass-dsl-4-5",
        "sm_100",
        TRAINING | THD | fa4(15, "4.5.1"),
        {"layout": "bshd"},
    ),
    Case("sm_75/fa4/arch", "sm_75", {}, {}),
    Case("sm_107/fa4/arch-not-tried", "sm_107", {}, {}),
]
NO_OTHER_SIDE = {"sm_75/fa4/arch", "sm_107/fa4/arch-not-tried"}
"""Rows that refuse every call."""

HOPPER_CASES = [
    Case(f"{HOPPER}/head-dim-multiple-of-8-before-b5", "sm_90", dims(68) | fa4(4), dims(72)),
    Case(f"{HOPPER}/head-dims-before-b5", "sm_90", dims(192) | fa4(4), dims(128)),
    Case(f"{HOPPER}/head-dims-before-b5", "sm_90", dims(256) | fa4(4), fa4(5)),
    Case(f"{HOPPER}/backward-head-dims-before-b5", "sm_90", TRAINING | dims(96) | fa4(4), dims(128)),
    Case(f"{HOPPER}/backward-ragged-before-b5", "sm_90", TRAINING | THD | fa4(4), {"layout": "bshd"}),
    Case(f"{HOPPER}/backward-ragged-before-b5", "sm_90", TRAINING | window(8, 0) | fa4(4), fa4(5)),
    Case(f"{HOPPER}/backward-ragged-before-b5", "sm_90", TRAINING | DETERMINISTIC | fa4(4), fa4(5)),
    Case(f"{HOPPER}/narrow-heads-wide-values", "sm_90", dims(64, 256), dims(64, 192)),
    Case(f"{HOPPER}/narrow-heads-wide-values", "sm_90", dims(96, 200), dims(96, 192)),
    Case(f"{HOPPER}/output-beyond-shared-memory", "sm_90", dims(64, 152), dims(64, 144)),
    Case(f"{HOPPER}/output-beyond-shared-memory", "sm_90", dims(32, 80), dims(32, 64)),
    Case(f"{HOPPER}/output-beyond-shared-memory", "sm_90", dims(64, 192), dims(96, 192)),
    Case(f"{HOPPER}/narrow-heads-wide-values", "sm_90", dims(96, 256), dims(128, 256)),
    Case(f"{HOPPER}/backward-dq-half-step", "sm_90", TRAINING | dims(72), dims(64)),
    Case(f"{HOPPER}/backward-dq-half-step", "sm_90", TRAINING | dims(72) | fa4(29), {"phase": "inference"}),
    Case(f"{HOPPER}/backward-97-to-112-without-causal", "sm_90", TRAINING | dims(104), causal()),
    Case(f"{HOPPER}/backward-97-to-112-without-causal", "sm_90", TRAINING | dims(112), dims(120)),
    Case(f"{HOPPER}/backward-97-to-112-without-causal", "sm_90", TRAINING | dims(104), window(8, 0)),
    Case(f"{HOPPER}/backward-unequal-head-dims", "sm_90", TRAINING | dims(64, 128), dims(192, 128)),
    Case(f"{HOPPER}/backward-unequal-head-dims", "sm_90", TRAINING | dims(128, 96), {"phase": "inference"}),
    Case(f"{HOPPER}/backward-gqa-unequal-head-dims", "sm_90", TRAINING | MQA | dims(192, 128), MHA),
    Case(f"{HOPPER}/backward-gqa-unequal-head-dims", "sm_90", TRAINING | MQA | dims(192, 128), dims(128)),
    Case(f"{HOPPER}/backward-small-before-b30", "sm_90", TRAINING | dims(48) | fa4(29), dims(64)),
    Case(f"{HOPPER}/backward-small-before-b30", "sm_90", TRAINING | dims(112) | fa4(29), fa4(30)),
    Case(f"{HOPPER}/backward-129-to-191-before-b30", "sm_90", TRAINING | dims(136) | fa4(29), fa4(30)),
    Case(f"{HOPPER}/backward-129-to-191-before-b30", "sm_90", TRAINING | dims(184) | fa4(29), dims(192)),
    Case(
        f"{HOPPER}/backward-gqa-129-to-192-before-b31", "sm_90", TRAINING | MQA | dims(192) | fa4(30), fa4(31)
    ),
    Case(f"{HOPPER}/backward-gqa-129-to-192-before-b31", "sm_90", TRAINING | MQA | dims(192) | fa4(30), MHA),
    Case(f"{HOPPER}/backward-193-to-255-before-b31", "sm_90", TRAINING | dims(200) | fa4(30), fa4(31)),
    Case(f"{HOPPER}/backward-193-to-255-before-b31", "sm_90", TRAINING | dims(248) | fa4(30), dims(256)),
    Case(f"{HOPPER}/backward-256-before-b31", "sm_90", TRAINING | dims(256) | fa4(30), fa4(31)),
    Case(f"{HOPPER}/backward-cutlass-dsl-4-5", "sm_90", TRAINING | fa4(5, "4.5.2"), fa4(5, "4.4.2")),
    Case(f"{HOPPER}/backward-cutlass-dsl-4-5", "sm_90", TRAINING | fa4(10, "4.5.2"), fa4(11, "4.5.2")),
    Case(
        f"{HOPPER}/deterministic-gqa-before-b12", "sm_90", TRAINING | DETERMINISTIC | MQA | fa4(11), fa4(12)
    ),
    Case(f"{HOPPER}/deterministic-gqa-before-b12", "sm_90", TRAINING | DETERMINISTIC | MQA | fa4(11), MHA),
]

SMALL_CASES = [
    Case(f"{OLD}/arch-before-b5", "sm_80", fa4(4), fa4(5)),
    Case(f"{OLD}/no-backward", "sm_89", TRAINING, {"phase": "inference"}),
    Case(f"{OLD}/head-dim-multiple-of-8", "sm_86", dims(132), dims(136)),
    Case(f"{OLD}/ragged-before-b30", "sm_80", THD | fa4(29), fa4(30)),
    Case(f"{OLD}/ragged-before-b30", "sm_89", THD | fa4(29), {"layout": "bshd"}),
    Case(f"{OLD}/output-beyond-shared-memory", "sm_80", dims(64, 104), dims(64, 96)),
    Case(f"{OLD}/output-beyond-shared-memory", "sm_86", dims(64, 256), dims(64)),
    Case("shared/fa4_163_kib/head-dim-max", "sm_87", dims(264), dims(256)),
    Case("shared/fa4_163_kib/registers-above-128", "sm_80", dims(136), dims(128)),
    Case("shared/fa4_99_kib/head-dim-max", "sm_86", dims(200), dims(192)),
    Case("shared/fa4_99_kib/head-dim-max", "sm_121", dims(256), dims(192)),
    Case("shared/fa4_99_kib/head-dim-max", "sm_120", dims(200, 208), dims(192, 208)),
    Case("shared/fa4_99_kib/head-dim-max", "sm_89", dims(64, 264), dims(64, 256)),
    Case("shared/fa4_99_kib/head-dim-max", "sm_86", dims(240, 128), dims(208, 128)),
    Case(f"{WORK}/arch-before-b5", "sm_120", fa4(4), fa4(5)),
    Case(f"{WORK}/does-not-compile-before-b21", "sm_121", fa4(20), fa4(21)),
    Case(f"{WORK}/head-dim-multiple-of-8", "sm_120", dims(132), dims(136)),
    Case(f"{WORK}/backward-head-dim-max", "sm_120", TRAINING | dims(176), dims(160)),
    Case(f"{WORK}/backward-head-dim-max", "sm_120", TRAINING | dims(192), dims(192, 128)),
    Case(f"{WORK}/ragged-before-b30", "sm_120", THD | fa4(26), fa4(30)),
    Case(f"{WORK}/ragged-before-b30", "sm_121", THD | fa4(29), {"layout": "bshd"}),
    Case(f"{WORK}/output-beyond-shared-memory", "sm_120", dims(64, 136), dims(64, 128)),
    Case(f"{WORK}/output-beyond-shared-memory", "sm_121", dims(96, 192), dims(96, 144)),
    Case(f"{WORK}/backward-ragged", "sm_120", TRAINING | THD, {"layout": "bshd"}),
    Case(f"{WORK}/backward-ragged", "sm_120", TRAINING | THD, {"phase": "inference"}),
]
CASES = [*PACKAGE_CASES, *ANY_CASES, *HOPPER_CASES, *SMALL_CASES]


def status(arch, fields=None, versions=NEWEST):
    return verdict("fa4", versions, arch, fields or {}).status


@pytest.mark.parametrize("case", [c for c in CASES if c.rule not in NO_OTHER_SIDE], ids=str)
def test_a_row_refuses_one_side_and_takes_the_other(case):
    check_sides("fa4", NEWEST, case)


@pytest.mark.parametrize("rule", sorted(NO_OTHER_SIDE))
def test_an_architecture_without_kernels_refuses_every_call(rule):
    arch = rule.partition("/")[0]
    assert findings("fa4", NEWEST, arch, {})[rule].outcome == "fail"
    assert status(arch) == "rejected"


def test_every_row_but_the_recorded_ones_has_a_case():
    shared = {row for row in rows_of("fa4") if row.startswith(("shared/fa4_sm_1", "sm_103/"))}
    told = {row for row in rows_of("fa4") if "/validator-" in row}
    assert {case.rule for case in CASES} == set(rows_of("fa4")) - shared - told


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


@pytest.mark.parametrize(("release", "known"), [(2, False), (3, True), (36, True), (37, False)])
def test_nothing_is_said_of_releases_that_nobody_read(release, known):
    versions = {**NEWEST, "flash-attn-4": f"4.0.0b{release}"}
    found = findings("fa4", versions, "sm_90", {})
    assert (found["any/fa4/versions-known"].outcome == "pass") is known


def test_nothing_is_said_of_a_compiler_that_nobody_tried():
    assert status("sm_90", versions={**NEWEST, "nvidia-cutlass-dsl": "4.9.0"}) == "unknown"


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


def test_the_compiler_of_a_release_is_one_that_it_asks_for():
    """The pairs of these tests are pairs that the rows let pass."""
    for release in RELEASES:
        found = findings("fa4", fa4(release, dsl_of(release))["versions"], "sm_90", {})
        assert [rule for rule, f in found.items() if "cutlass-dsl" in rule and f.outcome == "fail"] == []


def test_small_cards_share_their_rows():
    assert archs_with("fa4", "shared/fa4_99_kib/head-dim-max") == {"sm_86", "sm_89", "sm_120", "sm_121"}
    assert archs_with("fa4", "shared/fa4_163_kib/head-dim-max") == {"sm_80", "sm_87"}
