"""Rows of fa2 and fa3, both sides of each, by release and architecture."""

from __future__ import annotations

from itertools import product

import pytest
from support.row_sides import (
    FINITE,
    LEFT_OUT_CASE,
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
    strides,
    takes,
    verdict,
    window,
)

FA2_HOST = {"torch": "2.11.0+cu130", "flash-attn": "2.8.3"}
FA3_HOST = {"torch": "2.11.0+cu130", "flash-attn-3": "3.0.0"}
XFORMERS_HOST = {"torch": "2.11.0+cu130", "xformers": "0.0.34"}
DROPOUT = {"dropout_p": 0.1}


def fa2(release):
    return {"versions": {"flash-attn": release}}


def xformers(release):
    return {"versions": {"xformers": release}}


def at(seqlen_q, head_dim):
    """Return 1,600 heads of a length, a few keys each."""
    return dims(head_dim) | lengths(seqlen_q, 128) | {"batch": 400, "num_heads_q": 4, "num_heads_kv": 4}


def built(xformers_release, torch):
    return {"versions": {"xformers": xformers_release, "torch": torch}}


GQA = {"num_heads_kv": 2}
TABPFN = TRAINING | dims(72) | lengths(15, 15) | {"batch": 28800, "num_heads_q": 16, "num_heads_kv": 16}
OLD = "shared/fa2_backward_before_2_7_3"
FA2_CASES = [
    Case("any/fa2/dtype", "sm_80", {"dtype": "float32"}, {"dtype": "float16"}),
    Case("any/fa2/head-dims-equal", "sm_90", dims(64, 128), dims(64)),
    Case("any/fa2/head-dim-max", "sm_90", dims(264), dims(256)),
    Case("any/fa2/head-dim-multiple-of-8", "sm_80", dims(68), dims(72)),
    Case("any/fa2/last-dim-contiguous", "sm_80", strides(last_dim_contiguous=False), strides()),
    Case("any/fa2/query-not-empty", "sm_80", lengths(0, 8), lengths(1, 8)),
    Case("any/fa2/keys-not-empty", "sm_80", lengths(8, 0), lengths(8, 1)),
    Case("any/fa2/batch-and-heads-not-empty", "sm_80", {"batch": 0}, {"batch": 1}),
    Case(
        "any/fa2/batch-and-heads-not-empty",
        "sm_80",
        {"num_heads_q": 0, "num_heads_kv": 0},
        {"num_heads_q": 8, "num_heads_kv": 8},
    ),
    Case("any/fa2/grid-batch", "sm_80", {"batch": 65536}, {"batch": 65535}),
    Case(
        "any/fa2/grid-heads",
        "sm_80",
        {"num_heads_q": 65536, "num_heads_kv": 32768},
        {"num_heads_q": 65535, "num_heads_kv": 65535},
    ),
    Case("any/fa2/diagonal-at-bottom-right", "sm_90", lengths(5, 8) | causal(), causal("bottom_right")),
    Case("any/fa2/diagonal-at-bottom-right", "sm_90", lengths(5, 8) | window(2, 2), lengths(8, 8)),
    Case("any/fa2/softcap-before-2-6", "sm_80", {"softcap": 30.0} | fa2("2.5.9.post1"), fa2("2.6.0")),
    Case("any/fa2/softcap-with-dropout", "sm_80", {"softcap": 30.0} | DROPOUT, {"dropout_p": 0.0}),
    Case("any/fa2/single-query-with-unused-keys", "sm_80", THD | lengths(1, 64) | fa2("2.6.1"), fa2("2.6.2")),
    Case(
        "any/fa2/single-query-with-unused-keys", "sm_80", THD | lengths(1, 64) | fa2("2.6.1"), lengths(2, 64)
    ),
    Case("any/fa2/aligned", "sm_80", strides(aligned_16=False), strides()),
    Case("any/fa2/scale-positive", "sm_80", {"scale": "zero"}, {"scale": "positive"}),
    Case(
        "any/fa2/ragged-backward-offsets-32-bit",
        "sm_90",
        THD | TRAINING | dims(128) | lengths(488320, 488320) | {"num_heads_q": 32},
        lengths(488192, 488192),
    ),
    # Both sides of 2^31 elements, with the head dim as each release rounds it.
    *(
        Case(f"any/fa2/backward-offsets-32-bit{row}", "sm_90", TRAINING | at(long, dim) | fa2(release), taken)
        for row, release, dim, long, taken in (
            ("", "2.8.3.post1", 128, 10496, at(10368, 128)),
            ("", "2.8.0", 136, 7040, at(6912, 136)),
            ("", "2.8.3", 128, 10369, {"phase": "inference"}),
            ("-before-2-8", "2.7.4", 136, 8448, at(8320, 136)),
            ("-before-2-8", "2.6.2", 224, 5248, at(5120, 224)),
            ("-before-2-8", "2.7.4.post1", 72, 14080, {"layout": "bshd", "batch": 390}),
            ("-before-2-8", "2.6.1", 224, 5248, at(5120, 224)),
            ("-before-2-8", "2.5.0", 72, 14080, at(13952, 72)),
        )
    ),
    Case("any/fa2/backward-offsets-32-bit", "sm_80", TABPFN | fa2("2.8.3"), {"batch": 1024}),
    Case(
        "any/fa2/softcap-backward-before-2-6-2",
        "sm_80",
        TRAINING | {"softcap": 30.0} | fa2("2.6.1"),
        fa2("2.6.2"),
    ),
    Case(
        "any/fa2/softcap-backward-before-2-6-2",
        "sm_90",
        TRAINING | {"softcap": 30.0} | fa2("2.6.0"),
        {"phase": "inference"},
    ),
    Case("any/fa2/split-keys-before-2-6-2", "sm_80", lengths(1, 4096) | fa2("2.6.1"), fa2("2.6.2")),
    Case("any/fa2/split-keys-before-2-6-2", "sm_80", lengths(64, 65) | fa2("2.5.0"), lengths(65, 65)),
    Case("any/fa2/split-keys-before-2-6-2", "sm_80", lengths(64, 65) | fa2("2.5.0"), DROPOUT),
    *(
        Case("any/fa2/single-query-log-sum-exp", "sm_90", THD | lengths(1, 64) | GQA | asked, taken)
        for asked, taken in (
            ({"return_lse": True}, {"return_lse": False}),
            ({"sink": True}, {"num_heads_kv": 8}),
            ({"sink": True}, lengths(2, 64)),
        )
    ),
    Case(f"{OLD}/backward-head-dim-before-2-5-5", "sm_86", TRAINING | dims(200) | fa2("2.5.4"), dims(192)),
    Case(f"{OLD}/backward-head-dim-before-2-5-5", "sm_89", TRAINING | dims(256) | fa2("2.5.4"), fa2("2.5.5")),
    Case(
        f"{OLD}/backward-head-dim-224-before-2-6-2", "sm_87", TRAINING | dims(224) | fa2("2.6.1"), dims(232)
    ),
    Case(
        f"{OLD}/backward-head-dim-224-before-2-6-2",
        "sm_86",
        TRAINING | dims(200) | fa2("2.5.5"),
        fa2("2.6.2"),
    ),
    Case(
        f"{OLD}/backward-dropout-above-192-before-2-7-3",
        "sm_86",
        TRAINING | DROPOUT | dims(200) | fa2("2.7.2"),
        dims(192),
    ),
    Case(
        f"{OLD}/backward-dropout-above-192-before-2-7-3",
        "sm_87",
        TRAINING | DROPOUT | dims(256) | fa2("2.5.5"),
        fa2("2.7.3"),
    ),
    Case("shared/fa2_99_kib/backward-dropout-above-192", "sm_86", TRAINING | DROPOUT | dims(200), dims(192)),
    Case(
        "shared/fa2_99_kib/backward-dropout-above-192",
        "sm_120",
        TRAINING | DROPOUT | dims(256),
        {"dropout_p": 0.0},
    ),
    Case(
        "shared/fa2_99_kib/backward-dropout-above-192",
        "sm_121",
        TRAINING | DROPOUT | dims(256),
        {"phase": "inference"},
    ),
    Case("shared/fa2_blackwell/arch-before-2-7-3", "sm_100", fa2("2.7.2.post1"), fa2("2.7.3")),
    Case("shared/fa2_blackwell/arch-before-2-7-3", "sm_121", fa2("2.6.3"), fa2("2.7.3")),
    Case("sm_110/fa2/arch-not-built", "sm_110", fa2("2.8.3"), fa2("2.9.0")),
]
FA3_CASES = [
    LEFT_OUT_CASE,
    Case("any/fa3/dtype", "sm_90", {"dtype": "float8_e4m3fn"}, {"dtype": "float16"}),
    Case("any/fa3/head-dims", "sm_90", dims(264), dims(256)),
    Case("any/fa3/head-dims", "sm_90", dims(192, 96), dims(192, 104)),
    Case("any/fa3/head-dims", "sm_90", dims(72, 512), dims(64, 512)),
    Case("any/fa3/backward-head-dim-max", "sm_90", TRAINING | dims(64, 512), dims(64, 256)),
    Case("any/fa3/backward-head-dim-max", "sm_90", TRAINING | dims(64, 264), {"phase": "inference"}),
    Case(
        "any/fa3/backward-deterministic-above-192",
        "sm_90",
        TRAINING | dims(256) | {"deterministic": True},
        dims(192),
    ),
    Case("any/fa3/head-dim-multiple-of-8", "sm_90", dims(100), dims(104)),
    Case("any/fa3/last-dim-contiguous", "sm_90", strides(last_dim_contiguous=False), strides()),
    Case("any/fa3/query-not-empty", "sm_90", lengths(0, 8), lengths(1, 8)),
    Case("any/fa3/keys-not-empty", "sm_90", lengths(8, 0), lengths(8, 1)),
    Case("any/fa3/batch-and-heads-not-empty", "sm_90", {"batch": 0}, {"batch": 1}),
    Case("any/fa3/diagonal-at-bottom-right", "sm_90", lengths(5, 8) | causal(), causal("bottom_right")),
    Case("any/fa3/softcap-in-xformers", "sm_90", {"softcap": 30.0} | xformers("0.0.34"), {"softcap": 0.0}),
    Case(
        "any/fa3/backward-unequal-head-dims-in-older-xformers",
        "sm_90",
        TRAINING | dims(192, 128) | xformers("0.0.33"),
        xformers("0.0.34"),
    ),
    Case(
        "any/fa3/backward-unequal-head-dims-in-older-xformers",
        "sm_90",
        TRAINING | dims(192, 128) | xformers("0.0.33"),
        dims(192),
    ),
    Case(
        "any/fa3/backward-offsets-32-bit",
        "sm_90",
        TRAINING | dims(128) | lengths(524416, 1024) | {"num_heads_q": 32},
        lengths(524160, 1024),
    ),
    Case(
        "any/fa3/backward-offsets-32-bit",
        "sm_90",
        TRAINING | dims(200) | lengths(262272, 1024) | {"num_heads_q": 32},
        {"batch": 1},
    ),
    Case("any/fa3/backward-tokens-32-bit", "sm_90", TRAINING | lengths(8000001, 8), lengths(8000000, 8)),
    Case("any/fa3/backward-tokens-32-bit", "sm_90", TRAINING | lengths(8, 8000001), {"phase": "inference"}),
    Case(
        "any/fa3/long-keys-in-older-xformers",
        "sm_90",
        lengths(8, 2000001) | built("0.0.32.post2", "2.8.0"),
        built("0.0.33", "2.9.0"),
    ),
    Case(
        "any/fa3/long-keys-in-older-xformers",
        "sm_90",
        lengths(1000001, 8) | built("0.0.31", "2.7.1"),
        lengths(1000000, 2000000),
    ),
    Case(
        "any/fa3/backward-deterministic-in-older-xformers",
        "sm_90",
        TRAINING | {"deterministic": True} | built("0.0.32", "2.8.0"),
        built("0.0.33", "2.9.0"),
    ),
    *(
        Case(f"any/fa3/{row}", "sm_90", built(release, wrong), built(release, right))
        for row, release, wrong, right in (
            ("torch-of-xformers-0-0-31", "0.0.31", "2.8.0", "2.7.1+cu128"),
            ("torch-of-xformers-0-0-31", "0.0.31.post1", "2.7.0", "2.7.1"),
            ("torch-of-xformers-0-0-32", "0.0.32.post1", "2.9.0+cu128", "2.8.0"),
            ("torch-of-xformers-0-0-32", "0.0.32.post2", "2.11.0", "2.8.0+cu129"),
            ("torch-of-xformers-0-0-33", "0.0.33", "2.9.1", "2.9.0"),
            ("torch-of-xformers-0-0-33", "0.0.33.post1", "2.10.0", "2.9.0+cu128"),
            ("torch-of-xformers-0-0-33-post2", "0.0.33.post2", "2.9.0", "2.9.1"),
            ("torch-before-xformers-0-0-34", "0.0.34", "2.9.1", "2.10.0"),
            ("torch-before-xformers-0-0-34", "0.0.34", "2.9.1", "2.13.0+cu130"),
        )
    ),
    Case("any/fa3/aligned", "sm_90", strides(aligned_16=False), strides()),
    Case("any/fa3/scale-positive", "sm_90", {"scale": "negative"}, {"scale": "positive"}),
]


@pytest.mark.parametrize("case", FA2_CASES, ids=str)
def test_both_sides_of_fa2(case):
    check_sides("fa2", FA2_HOST, case)


@pytest.mark.parametrize("case", FA3_CASES, ids=str)
def test_both_sides_of_fa3(case):
    check_sides("fa3", FA3_HOST, case)


def test_every_row_is_tried():
    check_every_row_has_a_case("fa2", FA2_CASES)
    check_every_row_has_a_case("fa3", FA3_CASES)


@pytest.mark.parametrize(
    ("rule", "archs"),
    [
        (f"{OLD}/backward-head-dim-before-2-5-5", {"sm_86", "sm_87", "sm_89"}),
        ("shared/fa2_99_kib/backward-dropout-above-192", {"sm_86", "sm_89", "sm_120", "sm_121"}),
        ("shared/fa2_blackwell/arch-before-2-7-3", {"sm_100", "sm_103", "sm_107", "sm_120", "sm_121"}),
    ],
)
def test_where_rows_of_fa2_hold(rule, archs):
    assert archs_with("fa2", rule) == archs


def test_where_the_packages_are_described():
    described = {b: {a for a in TABLES.arch_names if TABLES.rules(a, b) is not None} for b in ("fa2", "fa3")}
    assert described["fa3"] - {"cpu"} == {"sm_90"}
    assert described["fa2"] - {"cpu"} == set(TABLES.arch_names) - {"cpu", "sm_75"}


def takes_fa3(qk, v, *, training):
    """What hopper/flash_api.cpp accepts on Hopper, told the other way round."""
    if max(qk, v) > 512 or qk > 256 or (training and v > 256):
        return False
    latent = 128 < qk <= 192 and 96 < v <= 128
    return qk == v or latent or qk <= 64


@pytest.mark.parametrize("training", [False, True])
def test_head_dims_of_fa3(training):
    sizes = (8, 32, 64, 72, 96, 104, 128, 136, 160, 192, 200, 256, 264, 512, 520)
    for qk, v in product(sizes, sizes):
        fields = dims(qk, v) | (TRAINING if training else {})
        taken = takes(
            "fa3", FA3_HOST, "sm_90", fields, ("any/fa3/head-dims", "any/fa3/backward-head-dim-max")
        )
        assert taken == takes_fa3(qk, v, training=training), (qk, v)


def test_fa3_is_one_of_two_packages():
    for versions in (FA3_HOST, XFORMERS_HOST, FA3_HOST | XFORMERS_HOST):
        assert verdict("fa3", versions, "sm_90", causal()).status == "eligible"
    alone = verdict("fa3", {"torch": "2.11.0"}, "sm_90", causal())
    assert alone.status == "unavailable"
    assert len(alone.missing) == 1


def test_softcap_depends_on_whose_fa3_it_is():
    softcap = causal() | {"softcap": 50.0}
    assert verdict("fa3", FA3_HOST, "sm_90", softcap).status == "eligible"
    assert verdict("fa3", XFORMERS_HOST, "sm_90", softcap).status == "rejected"


@pytest.mark.parametrize("release", ["0.0.31", "0.0.31.post1", "0.0.32.post2", "0.0.33", "0.0.33.post2"])
def test_a_copy_of_fa3_runs_with_the_torch_that_it_is_built_for(release):
    torches = ("2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.14.0a0+git123")
    pinned = {"0.0.31": "2.7.1", "0.0.32": "2.8.0", "0.0.33": "2.9.0"}
    wanted = "2.9.1" if release == "0.0.33.post2" else pinned[release[:6]]
    taken = [
        t
        for t in torches
        if verdict("fa3", built(release, t)["versions"], "sm_90", causal()).status == "eligible"
    ]
    assert taken == [wanted]


def test_a_beta_of_fa3_is_not_described():
    beta = verdict("fa3", FA3_HOST | {"flash-attn-3": "3.0.0b1"}, "sm_90", causal())
    assert beta.status == "unknown"


def test_fa3_splits_the_keys_of_a_decode_only():
    def options(fields):
        return dict(verdict("fa3", FA3_HOST, "sm_90", fields).options)

    assert options(lengths(1, 8192)) == {"num_splits": 0}
    assert options(lengths(64, 1024)) == {"num_splits": 0}
    assert (
        options(lengths(65, 8192)) == options(lengths(1, 1023)) == options(TRAINING | lengths(1, 8192)) == {}
    )


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_padding_documents_and_sinks_are_repaired(backend):
    versions = FA2_HOST if backend == "fa2" else FA3_HOST
    documents = {"batch": 1, "mask": ({"kind": "documents", "lengths": (200, 312)},)}
    cleared = () if backend == "fa2" else ("clear_left_out",)
    for fields, repairs in (
        (documents, ("to_varlen",)),
        (PADDED, (*cleared, "to_varlen")),
        (FINITE, ("to_varlen",)),
        ({"sink": True}, ("sink_from_lse",)),
    ):
        for phase in ("inference", "training"):
            found = verdict(backend, versions, "sm_90", fields | {"phase": phase})
            assert (found.status, found.repairs) == ("eligible", repairs)


@pytest.mark.parametrize(
    ("fields", "fa2_takes", "fa3_takes"),
    [
        (DROPOUT, True, False),
        ({"bias": {"kind": "alibi"}}, True, False),
        ({"softcap": 30.0}, True, True),
        (window(128, 0), True, True),
        ({"num_heads_kv": 2}, True, True),
        (TRAINING | {"deterministic": True}, True, True),
        ({"mask": ({"kind": "dense", "shape": (1, 1, 512, 512)},)}, False, False),
        ({"bias": {"kind": "dense", "dtype": "bfloat16", "shape": (1, 1, 512, 512)}}, False, False),
    ],
)
def test_features(fields, fa2_takes, fa3_takes):
    assert (verdict("fa2", FA2_HOST, "sm_90", fields).status == "eligible") is fa2_takes
    assert (verdict("fa3", FA3_HOST, "sm_90", fields).status == "eligible") is fa3_takes
