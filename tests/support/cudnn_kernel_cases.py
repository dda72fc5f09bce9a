"""Cases of rows about faults of cuDNN's kernels that cudnn_fe and te share, or torch's cudnn as well."""

from __future__ import annotations

from support.row_sides import THD, TRAINING, Case, causal, dims, lengths, window

GQA = {"num_heads_q": 8, "num_heads_kv": 2}
DETERMINISTIC = TRAINING | {"deterministic": True}
GRAPH = TRAINING | {"context": {"cuda_graph": True}}


def cudnn(release):
    return {"versions": {"cudnn": release}}


KERNELS = "shared/cudnn_fe_kernels"
KERNELS_90 = "shared/cudnn_fe_kernels_sm_90"
KERNEL_CASES = [
    Case(f"{KERNELS}/known-bad-9-10", "sm_90", cudnn("9.10.1"), cudnn("9.10.2")),
    Case(f"{KERNELS}/known-bad-9-13-0", "sm_90", cudnn("9.13.0"), cudnn("9.13.1")),
    Case(f"{KERNELS}/known-bad-9-13-0", "sm_120", TRAINING | cudnn("9.13.0"), cudnn("9.12.0")),
    Case(
        f"{KERNELS}/window-9-14-0",
        "sm_90",
        window(64, 64) | lengths(1088, 1088) | cudnn("9.14.0"),
        lengths(1024, 1024),
    ),
    Case(
        f"{KERNELS}/window-9-14-0",
        "sm_90",
        window(64, 64) | lengths(1088, 1088) | cudnn("9.14.0"),
        window(64, 0),
    ),
    Case(
        f"{KERNELS}/window-9-14-0",
        "sm_80",
        window(64, 64) | lengths(1088, 1088) | cudnn("9.14.0"),
        cudnn("9.14.1"),
    ),
    Case(
        f"{KERNELS}/cuda-graph-backward-length-not-multiple-of-128",
        "sm_90",
        GRAPH | lengths(200, 200) | cudnn("9.15.0"),
        lengths(256, 256),
    ),
    Case(
        f"{KERNELS}/cuda-graph-backward-length-not-multiple-of-128",
        "sm_90",
        GRAPH | lengths(200, 200) | cudnn("9.15.0"),
        cudnn("9.15.1"),
    ),
    Case(
        f"{KERNELS}/ragged-log-sum-exp-of-shared-heads",
        "sm_90",
        THD | GQA | lengths(8, 64) | {"return_lse": True},
        {"num_heads_kv": 8},
    ),
    Case(
        f"{KERNELS}/ragged-log-sum-exp-of-shared-heads",
        "sm_80",
        THD | GQA | lengths(8, 64) | {"return_lse": True},
        {"return_lse": False},
    ),
    Case(
        f"{KERNELS}/backward-ragged-log-sum-exp-of-shared-heads",
        "sm_90",
        THD | GQA | TRAINING | lengths(8, 64),
        lengths(64, 64),
    ),
    Case(
        f"{KERNELS}/backward-ragged-log-sum-exp-of-shared-heads",
        "sm_90",
        THD | GQA | TRAINING | lengths(8, 64),
        {"num_heads_kv": 8},
    ),
    Case(f"{KERNELS}/scale-positive", "sm_90", {"scale": "zero"}, {"scale": "positive"}),
    Case(f"{KERNELS}/key-length-1", "sm_90", lengths(1, 1), lengths(1, 2)),
    Case(
        f"{KERNELS}/bottom-right-more-queries-than-keys",
        "sm_90",
        lengths(8, 5) | causal("bottom_right"),
        lengths(5, 8),
    ),
    Case(f"{KERNELS}/window-more-queries-than-keys", "sm_90", lengths(8, 5) | window(2, 2), lengths(8, 8)),
    Case(
        f"{KERNELS}/one-diagonal",
        "sm_90",
        lengths(5, 8) | {"mask": (*causal()["mask"], *window(2, 0, "bottom_right")["mask"])},
        {"mask": (*causal()["mask"], *window(2, 0)["mask"])},
    ),
    Case(
        f"{KERNELS}/query-length-1-at-the-top-left", "sm_90", lengths(1, 8) | causal(), causal("bottom_right")
    ),
    Case(f"{KERNELS}/queries-without-a-key", "sm_90", lengths(8, 5) | causal("bottom_right"), causal()),
]
KERNEL_CASES_90 = [
    Case(
        f"{KERNELS_90}/backward-nan-keys-64-mod-128",
        "sm_90",
        TRAINING | lengths(320, 320) | cudnn("9.25.1"),
        cudnn("9.26.0"),
    ),
    Case(
        f"{KERNELS_90}/backward-nan-keys-64-mod-128",
        "sm_90",
        TRAINING | lengths(320, 320) | cudnn("9.20.0"),
        lengths(320, 328),
    ),
    Case(
        f"{KERNELS_90}/backward-nan-keys-64-mod-128",
        "sm_90",
        TRAINING | lengths(320, 320) | cudnn("9.20.0"),
        causal(),
    ),
    Case(
        f"{KERNELS_90}/backward-nan-keys-64-mod-128",
        "sm_90",
        TRAINING | lengths(320, 320) | cudnn("9.20.0"),
        {"layout": "thd", "batch": 1},
    ),
    Case(
        f"{KERNELS_90}/backward-nan-keys-64-mod-128",
        "sm_90",
        TRAINING | causal() | lengths(384, 320) | cudnn("9.20.0"),
        lengths(320, 320),
    ),
    Case(f"{KERNELS_90}/backward-nan-query-length-1", "sm_90", TRAINING | lengths(1, 128), lengths(2, 128)),
    Case(
        f"{KERNELS_90}/backward-unequal-head-dims-9-11",
        "sm_90",
        TRAINING | dims(256, 128) | cudnn("9.12.0"),
        cudnn("9.13.0"),
    ),
    Case(
        f"{KERNELS_90}/backward-unequal-head-dims-9-11",
        "sm_90",
        TRAINING | dims(160, 128) | cudnn("9.11.0"),
        dims(192, 128),
    ),
    *(
        Case(
            f"{KERNELS_90}/backward-unequal-head-dims-9-11",
            "sm_90",
            TRAINING | dims(*refused) | cudnn("9.12.0"),
            dims(*taken),
        )
        for refused, taken in [
            ((136, 96), (128, 96)),
            ((160, 72), (160, 64)),
            ((192, 96), (200, 96)),
            ((128, 136), (120, 136)),
            ((256, 128), (256, 120)),
        ]
    ),
    Case(
        f"{KERNELS_90}/backward-ragged-workspace", "sm_90", TRAINING | THD | cudnn("9.17.1"), cudnn("9.18.0")
    ),
    Case(
        f"{KERNELS_90}/backward-ragged-workspace",
        "sm_90",
        TRAINING | THD | cudnn("9.10.2"),
        {"phase": "inference"},
    ),
    Case(
        f"{KERNELS_90}/deterministic-workspace",
        "sm_90",
        DETERMINISTIC | lengths(8192, 8192),
        lengths(8064, 8192),
    ),
    Case(
        f"{KERNELS_90}/deterministic-ragged-workspace",
        "sm_90",
        DETERMINISTIC | THD | lengths(1536, 1536),
        lengths(1408, 1408),
    ),
]
DECODE_CASES = [
    Case("shared/cudnn_fe_decode/wrong-query-length-1", arch, GQA | lengths(1, 4096) | cudnn(release), change)
    for arch in ("sm_100", "sm_103", "sm_110")
    for release, change in [
        ("9.19.0", cudnn("9.18.1")),
        ("9.24.0", cudnn("9.24.1")),
        ("9.25.0", cudnn("9.25.1")),
        ("9.20.0", lengths(2, 4096)),
    ]
] + [
    Case(
        "shared/cudnn_fe_decode/wrong-query-length-1-in-ragged-batches",
        "sm_100",
        THD | lengths(16, 4096) | cudnn("9.24.0"),
        lengths(4096, 4096),
    ),
    Case(
        "shared/cudnn_fe_deterministic/deterministic-before-9-18-1",
        "sm_100",
        DETERMINISTIC | cudnn("9.18.0"),
        cudnn("9.18.1"),
    ),
    Case(
        "shared/cudnn_fe_deterministic/deterministic-before-9-18-1",
        "sm_110",
        DETERMINISTIC | cudnn("9.12.0"),
        TRAINING | {"deterministic": False},
    ),
]
SM_103 = "shared/cudnn_fe_sm_103"
SM_103_CASES = [
    Case(f"{SM_103}/arch-before-9-11", "sm_103", cudnn("9.10.2"), cudnn("9.11.0")),
    Case(
        "shared/cudnn_cuda_12_9/cuda-before-12-9",
        "sm_103",
        {"versions": {"cuda": "12.8"}},
        {"versions": {"cuda": "12.9"}},
    ),
    Case(
        f"{SM_103}/hang-long-keys-bottom-right-9-21",
        "sm_103",
        lengths(512, 4096) | causal("bottom_right") | cudnn("9.21.0"),
        cudnn("9.22.0"),
    ),
    Case(
        f"{SM_103}/hang-long-keys-bottom-right-9-21",
        "sm_103",
        lengths(512, 4096) | window(2048, 0, "bottom_right") | cudnn("9.21.1"),
        lengths(4096, 4096),
    ),
    Case(
        f"{SM_103}/hang-long-keys-bottom-right-9-21",
        "sm_103",
        lengths(512, 4096) | causal("bottom_right") | cudnn("9.21.0"),
        causal("top_left"),
    ),
]
SLOW_CASES = [
    Case(
        "shared/cudnn_fe_slow_sm_10x/ragged-192-128",
        "sm_100",
        THD | dims(192, 128) | lengths(4096, 4096),
        cudnn("9.25.1"),
    ),
    Case(
        "shared/cudnn_fe_slow_sm_10x/ragged-192-128",
        "sm_103",
        THD | dims(192, 128) | lengths(4096, 4096),
        lengths(4095, 4095),
    ),
]


def cases_of_every_path(backend):
    """Return the cases of the rows that every path to cuDNN's kernels has, torch's own as well."""
    alone = TRAINING | {"batch": 1, "num_heads_q": 1, "num_heads_kv": 1} | cudnn("9.27.0")
    segfault = f"any/{backend}/backward-of-one-query-and-one-head"
    single = f"sm_107/{backend}/query-length-1-before-9-28"
    launch = f"sm_107/{backend}/backward-launch-failure"
    return [
        Case(segfault, "sm_90", alone | lengths(1, 128), cudnn("9.25.1")),
        Case(segfault, "sm_100", alone | lengths(1, 300), {"num_heads_q": 2}),
        Case(segfault, "sm_120", alone | lengths(1, 128), {"batch": 2}),
        Case(segfault, "sm_80", alone | lengths(1, 128), lengths(2, 128)),
        Case(segfault, "sm_90", alone | lengths(1, 128), {"phase": "inference"}),
        Case(single, "sm_107", lengths(1, 512) | cudnn("9.27.0"), cudnn("9.28.0")),
        Case(single, "sm_107", lengths(1, 512) | cudnn("9.26.0"), lengths(2, 512)),
        Case(launch, "sm_107", TRAINING | cudnn("9.26.0"), cudnn("9.25.1")),
        Case(launch, "sm_107", TRAINING | cudnn("9.28.0"), {"phase": "inference"}),
    ]


AMPERE_CASES = [
    Case(
        "shared/cudnn_fe_ampere_class/deterministic-backward",
        "sm_86",
        DETERMINISTIC,
        {"deterministic": False},
    ),
    Case(
        "shared/cudnn_fe_ampere_class/deterministic-backward", "sm_120", DETERMINISTIC, {"phase": "inference"}
    ),
    Case("shared/cudnn_fe_ampere_class/decode-head-dim", "sm_120", lengths(1, 64) | dims(136), dims(128)),
    Case("shared/cudnn_fe_ampere_class/decode-head-dim", "sm_89", lengths(1, 64) | dims(256), lengths(2, 64)),
    Case("shared/cudnn_fe_before_9_18_1/arch-before-9-18-1", "sm_120", cudnn("9.18.0"), cudnn("9.18.1")),
    Case("shared/cudnn_fe_before_9_18_1/arch-before-9-18-1", "sm_121", cudnn("9.18.0"), cudnn("9.18.1")),
]
