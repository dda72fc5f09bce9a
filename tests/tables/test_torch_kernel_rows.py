"""Rows of torch's own kernels that no release's check states, both sides of each."""

from __future__ import annotations

import pytest
from support.cudnn_kernel_cases import cases_of_every_path
from support.row_sides import THD, TRAINING, Case, causal, check_sides, dims, lengths, strides

COMPILED = {"context": {"compiled": True}}
EAGER = {"context": {"compiled": False}}
LOOSE = strides(packed=False)


def torch(release):
    return {"versions": {"torch": release}}


def heads(q, kv=None):
    return {"num_heads_q": q, "num_heads_kv": q if kv is None else kv}


def cudnn(release):
    return {"versions": {"cudnn": release}}


def cuda(release):
    return {"versions": {"cuda": release}}


def triton(release):
    return {"versions": {"triton": release}}


FLEX = "shared/flex_triton"
UNEQUAL = "sm_90/cudnn/backward-unequal-head-dims-9-11"
CASES = {
    "flash": [
        Case(
            "shared/flash_cuda/backward-offsets-32-bit",
            "sm_120",
            TRAINING | dims(128) | heads(4) | {"batch": 400} | lengths(10496, 128),
            lengths(10368, 128),
        ),
        # 200 columns are accumulated in 256.
        Case(
            "shared/flash_cuda/backward-offsets-32-bit",
            "sm_90",
            TRAINING | dims(200) | heads(16) | {"batch": 16} | lengths(32896, 128),
            dims(192),
        ),
        Case(
            "shared/flash_cuda/ragged-backward-offsets-32-bit",
            "sm_90",
            TRAINING | THD | dims(128) | heads(16) | lengths(1_000_000, 1_000_000),
            lengths(900_000, 900_000),
        ),
    ],
    "cudnn": [
        *cases_of_every_path("cudnn"),
        Case(
            "any/cudnn/backward-mask-offset-32-bit",
            "sm_90",
            TRAINING | {"mask": ({"kind": "dense", "shape": (46341, 46341)},)} | lengths(46341, 46341),
            {"phase": "inference"},
        ),
        Case(
            "any/cudnn/backward-mask-offset-32-bit",
            "sm_100",
            TRAINING
            | {"batch": 2, "bias": {"kind": "dense", "dtype": "bfloat16", "shape": (2, 1, 33280, 33280)}}
            | lengths(33280, 33280),
            {"bias": {"kind": "dense", "dtype": "bfloat16", "shape": (1, 1, 33280, 33280)}},
        ),
        Case("sm_107/cudnn/arch-before-9-25", "sm_107", cudnn("9.24.1"), cudnn("9.25.0")),
        Case("sm_103/cudnn/arch-before-9-11", "sm_103", cudnn("9.10.2"), cudnn("9.11.0")),
        Case("shared/cudnn_cuda_12_9/cuda-before-12-9", "sm_103", cuda("12.8"), cuda("12.9")),
        Case(
            "sm_90/cudnn/backward-nan-keys-64-mod-128-more-queries",
            "sm_90",
            TRAINING | causal() | lengths(384, 320) | torch("2.15.0"),
            lengths(320, 320),
        ),
        Case(
            "sm_90/cudnn/backward-nan-keys-64-mod-128-more-queries",
            "sm_90",
            TRAINING | causal() | lengths(384, 320),
            cudnn("9.26.0"),
        ),
        Case("any/cudnn/known-bad-9-13-0", "sm_80", cudnn("9.13.0"), cudnn("9.13.1")),
        Case("any/cudnn/backward-gradient-strides", "sm_90", TRAINING | cudnn("9.4.0"), cudnn("9.5.1")),
        Case(
            "any/cudnn/backward-gradient-strides",
            "sm_80",
            TRAINING | {"versions": {"cudnn": "9.5.0", "torch": "2.7.1"}},
            {"versions": {"cudnn": "9.5.0", "torch": "2.6.0"}},
        ),
        Case("any/cudnn/compiled-output-strides", "sm_90", COMPILED | torch("2.7.1"), torch("2.8.0")),
        Case("any/cudnn/compiled-output-strides", "sm_80", COMPILED | torch("2.6.0"), EAGER),
        Case(
            "any/cudnn/kv-heads-expanded",
            "sm_90",
            strides(kv_heads_expanded=True),
            strides(kv_heads_expanded=False),
        ),
        Case(
            "any/cudnn/kv-heads-expanded",
            "sm_100",
            strides(kv_heads_expanded=True) | torch("2.10.0"),
            torch("2.12.0"),
        ),
        *(
            Case("sm_90/cudnn/backward-head-dim-inverted-check", "sm_90", TRAINING | refused, taken)
            for refused, taken in [
                (dims(256) | torch("2.9.0"), torch("2.9.1")),
                (dims(192, 128) | torch("2.8.0"), dims(128)),
                (dims(256) | torch("2.8.0"), {"phase": "inference"}),
            ]
        ),
        Case(UNEQUAL, "sm_90", TRAINING | dims(256, 128) | cudnn("9.12.0"), cudnn("9.13.0")),
        Case(UNEQUAL, "sm_90", TRAINING | dims(160, 96) | cudnn("9.11.0"), {"phase": "inference"}),
        Case(UNEQUAL, "sm_90", TRAINING | dims(192, 96) | cudnn("9.11.0"), dims(192, 128)),
        Case(UNEQUAL, "sm_90", TRAINING | dims(128, 256) | cudnn("9.12.0"), dims(128, 120)),
    ],
    "efficient": [
        Case(
            "any/efficient/key-offset-32-bit",
            "sm_90",
            dims(128) | heads(32) | lengths(4096, 524416),
            lengths(4096, 524288),
        ),
        Case(
            "any/efficient/key-offset-32-bit",
            "sm_75",
            LOOSE | dims(64) | heads(4) | lengths(64, 65536) | {"batch": 64, "dtype": "float16"},
            strides(packed=True),
        ),
        Case(
            "any/efficient/head-offset-32-bit",
            "sm_120",
            dims(128) | heads(32, 1) | lengths(1_048_704, 4096),
            lengths(1_048_576, 4096),
        ),
        Case(
            "any/efficient/backward-query-offset-32-bit",
            "sm_90",
            TRAINING | dims(128) | heads(32, 1) | lengths(524416, 4096) | torch("2.8.0"),
            torch("2.9.0"),
        ),
        Case(
            "any/efficient/backward-query-offset-32-bit",
            "sm_90",
            TRAINING | dims(128) | heads(32, 1) | lengths(524416, 4096) | torch("2.7.1"),
            {"phase": "inference"},
        ),
        Case(
            "any/efficient/compiled-backward-grid-batch",
            "sm_90",
            TRAINING | COMPILED | torch("2.8.0") | {"batch": 65536},
            {"batch": 65535},
        ),
        Case(
            "any/efficient/compiled-backward-grid-batch",
            "sm_80",
            TRAINING | COMPILED | torch("2.12.1") | {"batch": 65536},
            torch("2.13.0"),
        ),
        Case(
            "any/efficient/compiled-backward-grid-batch",
            "sm_120",
            TRAINING | COMPILED | {"batch": 70000},
            EAGER,
        ),
        Case(
            "any/efficient/compiled-backward-torch-2-5",
            "sm_90",
            TRAINING | COMPILED | torch("2.5.1"),
            torch("2.6.0"),
        ),
        Case(
            "any/efficient/compiled-backward-torch-2-5", "sm_75", TRAINING | COMPILED | torch("2.5.1"), EAGER
        ),
    ],
    "flex": [
        Case("shared/triton_3_6/assembler-before-3-6", "sm_103", triton("3.5.1"), triton("3.6.0")),
        Case("shared/triton_3_6/assembler-before-3-6", "sm_121", triton("3.4.0"), triton("3.6.0")),
        Case("sm_110/flex/assembler-before-3-7", "sm_110", triton("3.6.0"), triton("3.7.0")),
        Case("sm_107/flex/assembler-before-3-9", "sm_107", triton("3.8.0"), triton("3.9.0")),
        # Tokens may be outermost, so that the heads of all lie between two of one head.
        Case(
            f"{FLEX}/key-offset-32-bit",
            "sm_90",
            dims(128) | heads(32) | lengths(524416, 524416) | {"batch": 1, "layout": "bshd"},
            lengths(524416, 524288),
        ),
        Case(
            f"{FLEX}/key-offset-32-bit",
            "sm_80",
            LOOSE | dims(128) | heads(1) | lengths(256, 24000) | {"batch": 700} | torch("2.9.1"),
            {"batch": 200},
        ),
        Case(
            f"{FLEX}/key-offset-32-bit",
            "sm_100",
            dims(512) | heads(64, 16) | lengths(1, 300_000) | torch("2.13.0"),
            torch("2.14.0"),
        ),
        Case(
            f"{FLEX}/backward-query-offset-32-bit",
            "sm_90",
            TRAINING | dims(128) | heads(32, 1) | lengths(524416, 4096),
            {"phase": "inference"},
        ),
        Case(
            f"{FLEX}/tensor-elements-32-bit",
            "sm_90",
            dims(128) | heads(32, 4) | lengths(524288, 4096) | {"batch": 1} | torch("2.8.0"),
            lengths(524160, 4096),
        ),
        Case(
            f"{FLEX}/tensor-elements-32-bit",
            "sm_89",
            dims(64) | heads(8) | lengths(128, 65536) | {"batch": 64} | torch("2.5.1"),
            {"batch": 63},
        ),
        Case(
            f"{FLEX}/backward-strides-of-slices",
            "sm_90",
            TRAINING | LOOSE | torch("2.6.0"),
            torch("2.7.0"),
        ),
        Case(
            f"{FLEX}/backward-strides-of-slices",
            "sm_90",
            TRAINING | LOOSE | torch("2.5.1") | {"dtype": "float32"},
            strides(packed=True),
        ),
        # As reported: a bias for each of 16 batches and 32 heads, whose single heads are far from the limit.
        Case(
            f"{FLEX}/tensor-offset-32-bit",
            "sm_80",
            {"batch": 16, "bias": {"kind": "dense", "dtype": "float32", "shape": (16, 32, 4096, 4096)}}
            | {"dtype": "float32"}
            | heads(32)
            | lengths(4096, 4096),
            {"bias": {"kind": "dense", "dtype": "float32", "shape": (1, 32, 4096, 4096)}},
        ),
        Case(
            f"{FLEX}/tensor-offset-32-bit",
            "sm_100",
            {"mask": ({"kind": "not", "part": ({"kind": "dense", "shape": (46341, 46341)},)},)}
            | lengths(46341, 46341),
            {"mask": ({"kind": "not", "part": ({"kind": "dense", "shape": (46341,)},)},)},
        ),
        Case(
            f"{FLEX}/tensor-offset-32-bit",
            "sm_90",
            {"mask": ({"kind": "dense", "shape": (46341, 46341)},)} | lengths(46341, 46341) | torch("2.13.0"),
            torch("2.14.0"),
        ),
    ],
}


@pytest.mark.parametrize(
    ("backend", "case"),
    [pytest.param(backend, case, id=str(case)) for backend, cases in CASES.items() for case in cases],
)
def test_both_sides(backend, case):
    check_sides(backend, {"torch": "2.11.0+cu130", "triton": "3.6.0", "cudnn": "9.19.0"}, case)
