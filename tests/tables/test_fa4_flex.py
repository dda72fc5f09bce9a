"""Rows of flex_fa4: what FlexAttention asks of FlashAttention-4's kernels, both sides of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import DETERMINISTIC, MHA, MQA, NEWEST, SINK, TORCH, fa4
from support.row_sides import (
    TRAINING,
    Case,
    causal,
    check_sides,
    dims,
    findings,
    lengths,
    rows_of,
    verdict,
    window,
)

HOPPER, BLACKWELL = "sm_90/flex_fa4", "shared/fa4_sm_10x_flex"
FUNCTION = {"bias": {"kind": "function"}}
MASKS = {
    "causal": {"kind": "causal"},
    "window": {"kind": "window", "left": 64, "right": 0},
    "documents": {"kind": "documents", "lengths": [200, 312]},
    "key_padding": {"kind": "key_padding", "lengths": [512, 300]},
    "prefix": {"kind": "prefix", "lengths": [10, 20]},
    "function": {"kind": "function"},
    "not": {"kind": "not", "part": [{"kind": "causal"}]},
}
LATENT = TRAINING | dims(192, 128)
ALIBI = {"bias": {"kind": "alibi"}}
CROSS = {"layout": "bshd", "batch": 1, "mask": ({"kind": "documents", "cross": True},)}


def torch(release):
    return {"versions": {**NEWEST, "torch": release}}


SHARED = TRAINING | {"num_heads_kv": 2}
DENSE = {"mask": ({"kind": "dense", "shape": (1, 8, 512, 512)},)}
HEADS = "any/flex_fa4/backward-shared-heads-read-the-head"
CASES = [
    *(Case(HEADS, "sm_90", SHARED | ALIBI, taken) for taken in ({"phase": "inference"}, {"num_heads_kv": 8})),
    Case(HEADS, "sm_100", SHARED | {"bias": {"kind": "function"}}, {"bias": None, "softcap": 9.0}),
    Case(HEADS, "sm_90", SHARED | DENSE, causal()),
    Case(
        "any/flex_fa4/log-sum-exp-before-torch-2-13",
        "sm_90",
        {"return_lse": True} | torch("2.12.0"),
        torch("2.13.0"),
    ),
    Case("any/flex_fa4/torch-before-2-11", "sm_90", torch("2.10.0"), torch("2.11.0")),
    Case("any/flex_fa4/release-before-b11", "sm_90", fa4(10), fa4(11)),
    Case("any/flex_fa4/sink-gradient-before-torch-2-14", "sm_90", TRAINING | SINK, torch("2.14.0")),
    Case("any/flex_fa4/sink-gradient-before-torch-2-14", "sm_90", TRAINING | SINK, {"phase": "inference"}),
    Case(
        "any/flex_fa4/lse-gradient-before-torch-2-14",
        "sm_90",
        TRAINING | {"return_lse": True} | torch("2.13.0"),
        torch("2.14.0"),
    ),
    Case("any/flex_fa4/query-not-empty", "sm_90", lengths(0, 8), lengths(1, 8)),
    Case("any/flex_fa4/keys-not-empty", "sm_90", lengths(8, 0), lengths(8, 1)),
    Case("any/flex_fa4/alibi-cross-documents", "sm_90", CROSS | ALIBI, {"bias": None}),
    Case(
        "any/flex_fa4/no-dispatch-mode",
        "sm_90",
        {"context": {"dispatch_mode": True}},
        {"context": {"dispatch_mode": False}},
    ),
    Case(f"{HOPPER}/blocks-forward", "sm_90", dims(256) | causal(), {"mask": ()}),
    Case(f"{HOPPER}/blocks-forward", "sm_90", dims(192) | causal(), dims(192, 128)),
    Case(f"{HOPPER}/blocks-backward", "sm_90", TRAINING | dims(192, 128) | causal(), {"mask": ()}),
    Case(f"{HOPPER}/blocks-backward", "sm_90", TRAINING | dims(136) | window(8, 0), dims(128)),
    Case(f"{HOPPER}/blocks-backward-before-b26", "sm_90", TRAINING | causal() | fa4(25), fa4(26)),
    Case(f"{HOPPER}/blocks-backward-before-b26", "sm_90", TRAINING | causal() | fa4(25), {"mask": ()}),
    Case(f"{BLACKWELL}/blocks-forward", "sm_100", dims(256) | causal(), {"mask": ()}),
    Case(f"{BLACKWELL}/blocks-forward", "sm_110", dims(192) | causal(), dims(192, 128)),
    Case(f"{BLACKWELL}/blocks-backward", "sm_100", TRAINING | dims(192, 128) | causal(), {"mask": ()}),
    Case(f"{BLACKWELL}/blocks-backward", "sm_103", TRAINING | dims(136) | window(8, 0), dims(128)),
    Case(f"{BLACKWELL}/head-dim-256-scores-before-b34", "sm_100", dims(256) | FUNCTION | fa4(33), fa4(34)),
    Case(f"{BLACKWELL}/head-dim-256-backward-scores", "sm_103", TRAINING | dims(256) | FUNCTION, dims(128)),
    Case(
        f"{BLACKWELL}/head-dim-256-backward-lse",
        "sm_110",
        TRAINING | dims(256) | SINK | torch("2.14.0"),
        dims(128),
    ),
    Case("sm_103/flex_fa4/arch-before-b15", "sm_103", fa4(14), fa4(15)),
    Case(f"{HOPPER}/blocks-b13", "sm_90", causal() | fa4(13), fa4(14)),
    Case(f"{HOPPER}/blocks-b13", "sm_90", causal() | fa4(13), fa4(12)),
    Case(f"{HOPPER}/blocks-b13", "sm_90", causal() | fa4(13), {"mask": ()}),
    *(
        Case(f"{BLACKWELL}/backward-192-scores-before-b17", arch, LATENT | scores | fa4(release), taken)
        for arch, release, scores, taken in (
            ("sm_100", 11, FUNCTION, fa4(17)),
            ("sm_103", 16, {"softcap": 30.0}, {"softcap": 0.0}),
            ("sm_110", 16, ALIBI, dims(128)),
            ("sm_100", 16, FUNCTION, {"phase": "inference"}),
        )
    ),
]
NO_OTHER_SIDE = {"sm_80/flex_fa4/arch", "sm_120/flex_fa4/arch", "sm_107/flex_fa4/arch-not-tried"}
"""Rows that refuse every call."""


def flex_fa4(fields, arch="sm_90", versions=NEWEST):
    return verdict("flex_fa4", versions, arch, fields)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_refuses_one_side_and_takes_the_other(case):
    check_sides("flex_fa4", NEWEST, case)


def test_every_row_that_fa4_has_not_has_a_case():
    own = set(rows_of("flex_fa4")) - set(rows_of("fa4"))
    assert {case.rule for case in CASES} | NO_OTHER_SIDE == own


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_107", "sm_120", "sm_121"])
def test_no_kernel_reads_lists_of_blocks_there(arch):
    assert flex_fa4({}, arch).status == "rejected"


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize(
    ("arch", "size"),
    [("sm_90", (128, 128)), ("sm_100", (256, 128)), ("sm_103", (256, 128)), ("sm_110", (256, 128))],
)
def test_masks_run_on_lists_of_blocks_of_the_kernels_size(name, phase, arch, size):
    found = flex_fa4(dims(128) | {"mask": (MASKS[name],), "phase": phase}, arch)
    assert found.status == "eligible", found.blocking
    stated = dict(found.options)
    assert (stated["SPARSE_Q_BLOCK_SIZE"], stated["SPARSE_KV_BLOCK_SIZE"]) == size


@pytest.mark.parametrize("changes", [{"softcap": 30.0}, ALIBI, FUNCTION], ids=str)
def test_changes_of_scores_run_on_hopper_and_blackwell(changes):
    for arch in ("sm_90", "sm_100", "sm_103", "sm_110"):
        assert flex_fa4(TRAINING | dims(128) | changes, arch).status == "eligible"


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout_p": 0.1},
        TRAINING | DETERMINISTIC,
        TRAINING | {"bias": {"kind": "function", "requires_grad": True}},
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused(changes):
    assert flex_fa4(changes).status == "rejected"


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": ({"kind": "dense", "shape": [512, 512]},)},
        {"bias": {"kind": "dense", "dtype": "bfloat16", "shape": [512, 512]}},
        {"context": {"distributed": "dtensor"}},
    ],
    ids=str,
)
def test_what_nobody_tried_is_unknown(changes):
    assert flex_fa4(changes).status == "unknown"


@given(st.integers(1, 16).map(lambda n: 8 * n))
def test_the_faults_of_fa4_are_those_of_flexattention_on_it(head_dim):
    fields = TRAINING | dims(head_dim) | causal()
    rule = "shared/fa4_sm_90/backward-dq-half-step"
    plain, flex = (findings(b, NEWEST, "sm_90", fields)[rule].outcome for b in ("fa4", "flex_fa4"))
    assert plain == flex == ("fail" if -(-head_dim // 16) * 16 % 32 else "pass")


def test_torch_is_asked_for_these_kernels():
    for arch, row in (("sm_90", f"{HOPPER}/blocks"), ("sm_100", f"{BLACKWELL}/blocks")):
        found = flex_fa4(dims(128), arch)
        assert dict(found.options)["BACKEND"] == "FLASH"
        assert set(found.option_rows) == {"any/flex_fa4/backend", row}


def test_heads_are_shared_without_a_copy():
    for heads in (MQA, MHA):
        assert flex_fa4(TRAINING | dims(128) | causal() | heads).repairs == ()


@pytest.mark.parametrize("missing", ["triton", "flash-attn-4", "nvidia-cutlass-dsl"])
def test_every_distribution_is_needed(missing):
    there = {name: version for name, version in {**TORCH, **NEWEST}.items() if name != missing}
    assert flex_fa4(dims(128), versions=there).status == "unavailable"
