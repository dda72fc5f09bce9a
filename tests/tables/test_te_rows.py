"""Rows of te, both sides of each, and its limits against what TransformerEngine's own table says."""

from __future__ import annotations

from itertools import product

import pytest
from support.row_calls import (
    DETERMINISTIC,
    FINITE,
    PADDED,
    TABLES,
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
    "transformer-engine": "2.18.0",
    "transformer-engine-torch": "2.18.0",
    "cudnn": "9.27.0",
}


def te(release, torch_release=None):
    return {
        "versions": {
            "transformer-engine": release,
            "transformer-engine-torch": torch_release or release,
        }
    }


def both(te_release, cudnn_release):
    return {"versions": {**te(te_release)["versions"], "cudnn": cudnn_release}}


def test_where_te_is_described():
    described = {a for a in TABLES.arch_names if TABLES.rules(a, "te") is not None}
    assert described - {"cpu"} == set(TABLES.arch_names) - {"cpu"}
    assert archs_with("te", "sm_80/te/no-ragged-batches") == {"sm_80", "sm_86", "sm_87", "sm_89"}


CAPABILITY = {
    "sm_80": 80,
    "sm_86": 86,
    "sm_89": 89,
    "sm_90": 90,
    "sm_100": 100,
    "sm_103": 103,
    "sm_110": 110,
    "sm_120": 120,
}


def has_heads(sm, cudnn_release, te_release, qk, v, *, training):
    """What TransformerEngine's table says of head dims, for more than one query and without options."""
    if sm == 120 and cudnn_release < (9, 18, 1):
        return False
    if sm == 103 and cudnn_release < (9, 11):
        return False  # Not of the table: cuDNN came to this card later.
    if max(qk, v) <= 128:
        return True
    if not training:
        return cudnn_release >= (9, 10, 2) or (sm == 90 and max(qk, v) <= 256)
    if sm == 90:
        broken = cudnn_release >= (9, 11, 0) and min(qk, v) >= 128 and qk != v and (qk, v) != (192, 128)
        return max(qk, v) <= 256 and not broken
    square = (qk, v) == (256, 256) and sm < 110 and cudnn_release >= (9, 23, 0) and te_release >= (2, 18)
    latent = (qk, v) == (192, 128) and cudnn_release >= (9, 11, 0)
    return sm >= 100 and (square or latent)


def is_about_head_dims(name, row):
    return row.rule.kind == "limit" and ("head-dim" in name or "/arch-" in name)


@pytest.mark.parametrize("arch", CAPABILITY)
def test_head_dims_are_those_of_transformer_engines_table(arch):
    rules = [
        r for r, row in rows_of("te").items() if is_about_head_dims(r, row) and arch in archs_with("te", r)
    ]
    sizes = (64, 128, 136, 192, 256, 264, 512)
    releases = product([(9, 9, 0), (9, 10, 2), (9, 11, 0), (9, 22, 0), (9, 27, 0)], [(2, 12), (2, 18)])
    for (cudnn_release, te_release), (qk, v), training in product(
        releases, product(sizes, sizes), (False, True)
    ):
        words = both(".".join(map(str, (*te_release, 0))), ".".join(map(str, cudnn_release)))
        fields = dims(qk, v) | words | (TRAINING if training else {})
        expected = has_heads(CAPABILITY[arch], cudnn_release, te_release, qk, v, training=training)
        if training and CAPABILITY[arch] >= 110 and max(qk, v) > 128:
            # The frontend below has no such backward; TransformerEngine's table speaks of sm_100 and newer.
            expected = False
        assert takes("te", HOST, arch, fields, rules) == expected, (
            cudnn_release,
            te_release,
            qk,
            v,
            training,
        )


@pytest.mark.parametrize("missing", ["torch", "transformer-engine", "transformer-engine-torch", "cudnn"])
def test_what_is_needed(missing):
    versions = {name: version for name, version in HOST.items() if name != missing}
    found = verdict("te", versions, "sm_90", causal())
    assert (found.status, found.missing) == ("unavailable", (missing,))


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        (te("2.11.0"), "unknown"),
        (te("2.12.0"), "eligible"),
        (te("2.20.2"), "eligible"),
        (te("2.21.0"), "unknown"),
        (te("2.20.2", "2.19.0"), "unknown"),
        (cudnn("9.7.0"), "unknown"),
        (cudnn("9.7.1"), "eligible"),
        (cudnn("9.10.0"), "rejected"),
    ],
)
def test_releases(versions, status):
    assert verdict("te", HOST, "sm_90", causal() | versions).status == status


@pytest.mark.parametrize(
    ("fields", "status", "repairs"),
    [
        (lengths(5, 8) | causal(), "eligible", ()),
        (lengths(5, 8) | causal("bottom_right"), "eligible", ()),
        (window(128, 0) | TRAINING, "eligible", ()),
        ({"num_heads_kv": 2} | TRAINING, "eligible", ()),
        (DETERMINISTIC, "eligible", ()),
        ({"return_lse": True}, "eligible", ()),
        ({"sink": True}, "eligible", ("sink_from_lse",)),
        (
            {"batch": 1, "mask": ({"kind": "documents", "lengths": (200, 312)},)} | TRAINING,
            "eligible",
            ("to_varlen",),
        ),
        (PADDED, "eligible", ("clear_left_out", "to_varlen")),
        (FINITE, "eligible", ("to_varlen",)),
        (dims(320), "eligible", ()),
        (dims(320) | TRAINING, "rejected", ()),
        ({"dropout_p": 0.5}, "unknown", ()),
        ({"softcap": 30.0}, "rejected", ()),
        ({"bias": {"kind": "alibi"}}, "rejected", ()),
        ({"mask": ({"kind": "dense", "shape": (1, 1, 512, 512)},)}, "rejected", ()),
    ],
)
def test_whole_verdicts_on_hopper(fields, status, repairs):
    found = verdict("te", HOST, "sm_90", fields)
    assert (found.status, found.repairs) == (status, repairs), [f for f in found.findings if f.blocks]
