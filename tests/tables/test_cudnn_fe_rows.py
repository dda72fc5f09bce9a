"""Rows of cudnn_fe, both sides of each, by versions of cuDNN and of its frontend and by architecture."""

from __future__ import annotations

from itertools import product

import pytest
from support.cudnn_kernel_cases import (
    AMPERE_CASES,
    DECODE_CASES,
    DETERMINISTIC,
    GQA,
    KERNEL_CASES,
    KERNEL_CASES_90,
    KERNELS,
    SLOW_CASES,
    SM_103_CASES,
    cases_of_every_path,
    cudnn,
)
from support.row_sides import (
    FINITE,
    PADDED,
    TABLES,
    THD,
    TRAINING,
    Case,
    archs_with,
    causal,
    check_every_row_has_a_case,
    check_sides,
    dims,
    lengths,
    rows_of,
    strides,
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


def frontend(release):
    return {"versions": {"nvidia-cudnn-frontend": release}}


SM_10X = "shared/cudnn_fe_sm_10x"
NARROW = "shared/cudnn_fe_backward_128"
CASES = [
    *KERNEL_CASES,
    *KERNEL_CASES_90,
    *DECODE_CASES,
    *AMPERE_CASES,
    *SLOW_CASES,
    *SM_103_CASES,
    *cases_of_every_path("cudnn_fe"),
    Case("any/cudnn_fe/dtype", "sm_90", {"dtype": "float32"}, {"dtype": "float16"}),
    Case(
        "any/cudnn_fe/ragged-backward-tokens-apart",
        "sm_90",
        THD | TRAINING | strides(tokens_contiguous=False),
        strides(),
    ),
    Case("any/cudnn_fe/query-not-empty", "sm_90", lengths(0, 8), lengths(2, 8)),
    Case("any/cudnn_fe/keys-not-empty", "sm_90", lengths(8, 0), lengths(8, 8)),
    Case("any/cudnn_fe/batch-and-heads-not-empty", "sm_90", {"batch": 0}, {"batch": 1}),
    Case("any/cudnn_fe/head-dim-multiple-of-8", "sm_90", dims(100), dims(104)),
    Case("any/cudnn_fe/head-dim-max", "sm_90", dims(520), dims(512)),
    Case("any/cudnn_fe/head-dim-max", "sm_90", dims(576, 512), dims(512, 320)),
    Case("any/cudnn_fe/last-dim-contiguous", "sm_90", strides(last_dim_contiguous=False), strides()),
    Case("any/cudnn_fe/aligned", "sm_90", strides(aligned_16=False), strides()),
    Case("any/cudnn_fe/misaligned", "sm_90", strides(aligned_16=False) | frontend("1.31.0"), strides()),
    Case(
        "any/cudnn_fe/misaligned", "sm_90", strides(aligned_16=False) | frontend("1.29.1"), frontend("1.32.0")
    ),
    Case("any/cudnn_fe/kv-heads-expanded", "sm_90", strides(kv_heads_expanded=True), strides()),
    Case("any/cudnn_fe/sink-query-length-1", "sm_90", SINK | lengths(1, 64), lengths(2, 64)),
    Case("any/cudnn_fe/sink-before-9-13-1", "sm_90", SINK | cudnn("9.13.0"), cudnn("9.13.1")),
    Case("any/cudnn_fe/sink-ragged-before-9-18", "sm_90", SINK | THD | cudnn("9.17.1"), cudnn("9.18.0")),
    Case("any/cudnn_fe/sink-ragged-before-9-18", "sm_90", SINK | THD | cudnn("9.17.1"), {"layout": "bhsd"}),
    Case("any/cudnn_fe/grid-batch", "sm_90", {"batch": 65536} | cudnn("9.18.1"), {"batch": 65535}),
    Case("any/cudnn_fe/grid-batch", "sm_90", {"batch": 65536} | cudnn("9.18.1"), cudnn("9.19.0")),
    Case(
        "any/cudnn_fe/grid-heads",
        "sm_90",
        {"num_heads_q": 65536, "num_heads_kv": 32768} | cudnn("9.18.1"),
        {"num_heads_q": 32768},
    ),
    Case(f"{NARROW}/backward-head-dim", "sm_80", TRAINING | dims(136), dims(128)),
    Case(f"{NARROW}/backward-head-dim", "sm_121", TRAINING | dims(192, 128), {"phase": "inference"}),
    Case(f"{NARROW}/backward-wide-heads", "sm_110", TRAINING | dims(264), {"phase": "inference"}),
    Case(
        "shared/cudnn_fe_ragged_from_9_18_1/ragged-before-9-18-1",
        "sm_80",
        THD | cudnn("9.18.0"),
        cudnn("9.18.1"),
    ),
    Case(
        f"{SM_10X}/backward-head-dim-before-9-11",
        "sm_100",
        TRAINING | dims(192, 128) | cudnn("9.10.2"),
        cudnn("9.11.0"),
    ),
    Case(
        f"{SM_10X}/backward-head-dim-before-9-23",
        "sm_103",
        TRAINING | dims(256) | cudnn("9.22.0"),
        cudnn("9.23.0"),
    ),
    Case(
        f"{SM_10X}/backward-head-dim-before-9-23",
        "sm_100",
        TRAINING | dims(192) | cudnn("9.22.0"),
        dims(192, 128),
    ),
    Case(f"{SM_10X}/backward-head-dim", "sm_100", TRAINING | dims(256, 128), dims(256)),
    Case(f"{SM_10X}/backward-head-dim", "sm_107", TRAINING | dims(256) | window(64, 64), {"mask": ()}),
    Case(f"{SM_10X}/backward-head-dim", "sm_100", TRAINING | dims(256) | window(None, 64), window(64, 0)),
    Case(
        f"{SM_10X}/backward-256-ragged-before-9-25",
        "sm_100",
        TRAINING | THD | dims(256) | cudnn("9.24.1"),
        cudnn("9.25.1"),
    ),
    Case("sm_90/cudnn_fe/backward-wide-heads", "sm_90", TRAINING | dims(264), dims(256)),
    Case(
        "sm_90/cudnn_fe/wide-heads-before-1-31", "sm_90", dims(512) | frontend("1.30.0"), frontend("1.31.0")
    ),
    Case(
        "sm_90/cudnn_fe/wide-heads-without-cute-dsl",
        "sm_90",
        dims(512) | {"versions": {"nvidia-cutlass-dsl": "4.6.2"}},
        {"versions": {"nvidia-cutlass-dsl": "4.7.0"}},
    ),
    Case("sm_90/cudnn_fe/wide-and-narrow-heads", "sm_90", dims(512, 256), dims(512, 264)),
    Case(
        "sm_100/cudnn_fe/backward-wide-and-narrow-heads", "sm_100", TRAINING | dims(512, 256), dims(512, 264)
    ),
    Case(
        "sm_100/cudnn_fe/backward-wide-heads-before-9-11",
        "sm_100",
        TRAINING | dims(512) | cudnn("9.10.2"),
        cudnn("9.11.0"),
    ),
    Case(
        "sm_100/cudnn_fe/backward-wide-heads-before-1-31",
        "sm_103",
        TRAINING | dims(512) | frontend("1.30.0"),
        frontend("1.31.0"),
    ),
    Case(
        "sm_100/cudnn_fe/backward-wide-heads-without-cute-dsl",
        "sm_100",
        TRAINING | dims(512) | {"versions": {"nvidia-cutlass-dsl": "4.6.2"}},
        {"versions": {"nvidia-cutlass-dsl": "4.7.0"}},
    ),
    Case(
        "sm_100/cudnn_fe/backward-wide-heads-deterministic",
        "sm_100",
        DETERMINISTIC | dims(512),
        {"deterministic": False},
    ),
    Case(
        "sm_100/cudnn_fe/backward-wide-heads-query-length-1",
        "sm_100",
        TRAINING | dims(512) | lengths(1, 64),
        lengths(2, 64),
    ),
    *(
        Case(f"{SM_10X}/zero-times-nan", arch, PADDED | change, FINITE)
        for arch, change in [("sm_100", {}), ("sm_103", TRAINING), ("sm_107", {})]
    ),
    Case(f"{SM_10X}/zero-times-nan", "sm_100", PADDED | frontend("1.30.0"), frontend("1.29.1")),
    Case("any/cudnn_fe/zero-times-nan-wide-heads", "sm_90", PADDED | dims(512), FINITE),
    Case("any/cudnn_fe/zero-times-nan-wide-heads", "sm_120", TRAINING | PADDED | dims(320, 64), dims(256)),
    Case("sm_107/cudnn_fe/arch-before-9-25", "sm_107", cudnn("9.24.1"), cudnn("9.25.1")),
    Case("sm_107/cudnn_fe/backward-wide-heads", "sm_107", TRAINING | dims(264), {"phase": "inference"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_sides(case):
    check_sides("cudnn_fe", HOST, case)


def test_every_row_is_tried():
    check_every_row_has_a_case("cudnn_fe", CASES)


def test_where_shared_rows_hold():
    assert archs_with("cudnn_fe", f"{KERNELS}/known-bad-9-10") == set(TABLES.arch_names) - {"cpu", "sm_75"}
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
    """The frontend's own check of a backward's head dims, with its engine for wide heads of sm_100."""
    if arch == "sm_90":
        return max(qk, v) <= 256
    fits = max(qk, v) <= 128
    if arch not in ("sm_100", "sm_103") or cudnn_release < (9, 11):
        return fits
    square = (qk, v) == (256, 256) and cudnn_release >= (9, 23)
    return fits or (qk, v) == (192, 128) or square or min(qk, v) > 256


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
