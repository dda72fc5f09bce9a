"""Rows of cudnn_fe, both sides of each, by versions of cuDNN and of its frontend and by architecture."""

from __future__ import annotations

from itertools import product

import pytest
from support.row_calls import (
    DETERMINISTIC,
    FINITE,
    NAMED_ARCHS,
    THD,
    TRAINING,
    archs_with,
    causal,
    cudnn,
    dims,
    lengths,
    rows_of,
    takes,
    verdict,
    window,
)

HOST = {
    "torch": "2.11.0+cu130",
    "nvidia-cudnn-frontend": "1.32.0",
    "cudnn": "9.27.0",
    "nvidia-cutlass-dsl": "4.8.1",
}
SINK = {"sink": True}
GQA = {"num_heads_q": 8, "num_heads_kv": 2}


SM_10X = "shared/cudnn_fe_sm_10x"
NARROW = "shared/cudnn_fe_backward_128"


def test_where_shared_rows_hold():
    assert archs_with("cudnn_fe", "shared/cudnn_fe_kernels/known-bad-9-10") == NAMED_ARCHS
    assert archs_with("cudnn_fe", f"{NARROW}/backward-head-dim") == {
        "sm_80",
        "sm_86",
        "sm_87",
        "sm_89",
        "sm_110",
        "sm_120",
        "sm_121",
    }
    assert archs_with("cudnn_fe", f"{SM_10X}/backward-head-dim") == {"sm_100", "sm_103", "sm_107"}
    assert archs_with("cudnn_fe", "shared/cudnn_fe_decode/wrong-query-length-1") == {
        "sm_100",
        "sm_103",
        "sm_107",
        "sm_110",
    }


def trains(arch, qk, v, cudnn_release):
    """The frontend's check of a backward's head dims, and that of its engine for wide heads of sm_100."""
    if arch == "sm_90":
        return max(qk, v) <= 256
    fits = max(qk, v) <= 128
    if arch not in ("sm_100", "sm_103") or cudnn_release < (9, 11):
        return fits
    square = (qk, v) == (256, 256) and cudnn_release >= (9, 23)
    return fits or (qk, v) == (192, 128) or square or qk == v > 256


@pytest.mark.parametrize(
    "arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"]
)
def test_head_dims_of_the_backward(arch):
    sizes = (64, 96, 128, 136, 192, 256, 264, 512)
    rules = [
        r
        for r, row in rows_of("cudnn_fe").items()
        if row.rule.phase == "training" and "head" in r and row.rule.kind == "limit"
    ]
    rules = [r for r in rules if arch in archs_with("cudnn_fe", r) and "deterministic" not in r]
    for release, (qk, v) in product([(9, 10, 2), (9, 20, 0), (9, 26, 0)], product(sizes, sizes)):
        fields = TRAINING | dims(qk, v) | cudnn(".".join(map(str, release)))
        taken = takes("cudnn_fe", HOST, arch, fields, rules)
        assert taken == trains(arch, qk, v, release), (release, qk, v)


@pytest.mark.parametrize("size", [264, 320, 512])
def test_wide_heads_train_with_a_backward_from_elsewhere(size):
    for fields in (dims(size), dims(size) | GQA | causal(), dims(size) | {"deterministic": True}):
        found = verdict("cudnn_fe", HOST, "sm_90", TRAINING | fields)
        assert found.status == "eligible"
        assert found.repairs == ("backward_from_chunked",)
    own = verdict("cudnn_fe", HOST, "sm_100", TRAINING | dims(size))
    assert (own.status, own.repairs) == ("eligible", ())
    without = {name: version for name, version in HOST.items() if name != "nvidia-cutlass-dsl"}
    assert verdict("cudnn_fe", without, "sm_100", TRAINING | dims(size)).repairs == ("backward_from_chunked",)


OPEN_FROM_THE_END = lengths(512, 1024) | window(64, None, "bottom_right")


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_what_the_engine_for_wide_heads_trains(arch):
    own, borrowed = ("eligible", ()), ("eligible", ("backward_from_chunked",))
    packed = [THD, THD | GQA | causal()]
    for fields in (*packed, OPEN_FROM_THE_END, {"deterministic": True}, lengths(1, 64)):
        for size in (dims(264), dims(512)):
            found = verdict("cudnn_fe", HOST, arch, TRAINING | size | fields)
            assert (found.status, found.repairs) == borrowed, fields
    for fields in ({}, GQA | causal(), lengths(512, 1024) | window(64, 32, "bottom_right")):
        found = verdict("cudnn_fe", HOST, arch, TRAINING | dims(512) | fields)
        assert (found.status, found.repairs) == own, fields
    unequal = verdict("cudnn_fe", HOST, arch, TRAINING | dims(512, 264))
    assert (unequal.status, unequal.repairs) == borrowed
    # Padded rows become ragged first.
    padded = verdict("cudnn_fe", HOST, arch, TRAINING | dims(512) | FINITE)
    assert (padded.status, padded.repairs) == ("eligible", ("to_varlen", "backward_from_chunked"))
    assert verdict("cudnn_fe", HOST, arch, TRAINING | dims(256) | THD).repairs == ()


def test_narrow_heads_never_borrow_a_backward():
    for arch, fields in product(("sm_80", "sm_100", "sm_120"), (dims(136), dims(192), dims(256, 128))):
        assert verdict("cudnn_fe", HOST, arch, TRAINING | fields).status == "rejected"


def test_wide_heads_without_cute_dsl_are_slow_and_not_refused():
    without = {name: version for name, version in HOST.items() if name != "nvidia-cutlass-dsl"}
    found = verdict("cudnn_fe", without, "sm_90", dims(512))
    assert found.status == "eligible"
    assert {f.rule for f in found.findings if f.outcome == "unknown"} == {
        "sm_90/cudnn_fe/wide-heads-without-cute-dsl"
    }
    narrow = verdict("cudnn_fe", without, "sm_90", dims(256))
    assert not [f for f in narrow.findings if f.outcome in ("fail", "unknown")]


@pytest.mark.parametrize("missing", ["torch", "nvidia-cudnn-frontend", "cudnn"])
def test_what_is_needed(missing):
    versions = {name: version for name, version in HOST.items() if name != missing}
    found = verdict("cudnn_fe", versions, "sm_90", causal())
    assert (found.status, found.missing) == ("unavailable", (missing,))


@pytest.mark.parametrize(
    ("release", "status"),
    [("1.28.0", "unknown"), ("1.29.0", "eligible"), ("1.32.0", "eligible"), ("1.33.0", "unknown")],
)
def test_releases_of_the_frontend(release, status):
    assert verdict("cudnn_fe", HOST | {"nvidia-cudnn-frontend": release}, "sm_90", causal()).status == status


@pytest.mark.parametrize(
    ("fields", "status", "repairs"),
    [
        (lengths(5, 8) | causal(), "eligible", ()),
        (lengths(5, 8) | causal("bottom_right"), "eligible", ()),
        (lengths(8, 5) | causal(), "eligible", ()),
        (window(128, 0), "eligible", ()),
        (SINK, "eligible", ()),
        (SINK | TRAINING, "eligible", ()),
        (SINK | lengths(1, 64), "eligible", ("sink_from_lse",)),
        (
            {"batch": 1, "mask": ({"kind": "documents", "lengths": (200, 312)},)} | TRAINING,
            "eligible",
            ("to_varlen",),
        ),
        ({"mask": ({"kind": "key_padding", "lengths": (100, 512)},)}, "eligible", ("to_varlen",)),
        (
            {"mask": ({"kind": "key_padding", "lengths": (100, 512)},)} | lengths(1, 512) | GQA,
            "eligible",
            ("to_varlen",),
        ),
        ({"mask": ({"kind": "prefix", "lengths": (100, 512)},)}, "rejected", ()),
        ({"mask": ({"kind": "dense", "shape": (1, 1, 512, 512)},)}, "rejected", ()),
        ({"bias": {"kind": "dense", "dtype": "bfloat16", "shape": (1, 1, 512, 512)}}, "rejected", ()),
        ({"bias": {"kind": "alibi"}}, "rejected", ()),
        ({"softcap": 30.0}, "rejected", ()),
        ({"dropout_p": 0.5}, "rejected", ()),
        (DETERMINISTIC, "eligible", ()),
        (dims(100), "eligible", ("pad_head_dim",)),
    ],
)
def test_whole_verdicts_on_hopper(fields, status, repairs):
    found = verdict("cudnn_fe", HOST, "sm_90", fields)
    assert (found.status, found.repairs) == (status, repairs), [f for f in found.findings if f.blocks]
