"""Rows of fa2 and fa3, both sides of each, by release and architecture."""

from __future__ import annotations

from itertools import product

import pytest
from support.row_calls import (
    FINITE,
    PADDED,
    TABLES,
    TRAINING,
    archs_with,
    causal,
    dims,
    lengths,
    takes,
    verdict,
    window,
)

FA2_HOST = {"torch": "2.11.0+cu130", "flash-attn": "2.8.3"}
FA3_HOST = {"torch": "2.11.0+cu130", "flash-attn-3": "3.0.0"}
XFORMERS_HOST = {"torch": "2.11.0+cu130", "xformers": "0.0.34"}
DROPOUT = {"dropout_p": 0.1}


def built(xformers_release, torch):
    return {"versions": {"xformers": xformers_release, "torch": torch}}


OLD = "shared/fa2_backward_before_2_7_3"


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
    assert described["fa3"] - {"cpu"} == {"sm_75", "sm_90"}
    assert described["fa2"] - {"cpu"} == set(TABLES.arch_names) - {"cpu"}


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
