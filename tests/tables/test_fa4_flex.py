"""Rows of flex_fa4: what FlexAttention asks of FlashAttention-4's kernels, both sides of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fa4_hosts import DETERMINISTIC, MHA, MQA, NEWEST, TORCH
from support.row_calls import TRAINING, causal, dims, findings, verdict

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
ALIBI = {"bias": {"kind": "alibi"}}


def flex_fa4(fields, arch="sm_90", versions=NEWEST):
    return verdict("flex_fa4", versions, arch, fields)


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
        {"context": {"distributed": "context_parallel"}},
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
