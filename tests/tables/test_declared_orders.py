"""Declared orders: which row holds for which call, and which backend it puts first."""

from __future__ import annotations

import pytest
from support.fa4_hosts import NEWEST
from support.row_sides import TABLES, TRAINING, asked, causal, dims, lengths, window

from attnroute.engine.rank import declared_order

CUDA = [arch for arch in TABLES.arch_names if arch != "cpu"]
DATA_CENTRE = ["sm_100", "sm_103"]
LONG, LONGER, HEADS = lengths(8192, 8192), lengths(16384, 16384), {"batch": 1, "num_heads_q": 32}
PREFIX = {"mask": ({"kind": "prefix", "lengths": [10]},)}
DOCUMENTS = {"mask": ({"kind": "documents"},)}
PADDING = {"mask": ({"kind": "key_padding", "side": "right"},)}


def order_of(arch, fields):
    return declared_order(*asked(arch, NEWEST, HEADS | dims(128) | fields), TABLES)


HOPPER = [
    ("causal", LONG | causal(), "fa3"),
    ("causal", LONG | causal() | TRAINING, "fa3"),
    ("default", LONGER | causal() | TRAINING, "fa4"),
    ("default", LONG, "fa4"),
    ("default", LONG | dims(192, 128) | causal(), "fa4"),
    ("training-head-dim-256", LONG | dims(256) | causal() | TRAINING, "fa3"),
    ("causal", LONG | dims(256) | causal(), "fa3"),
    ("short", lengths(257, 257), "cudnn"),
    ("short", lengths(512, 512) | causal() | TRAINING, "cudnn"),
    ("short", lengths(512, 512) | {"batch": 512}, "cudnn"),
    ("default", lengths(513, 513) | {"batch": 512}, "fa4"),
    ("short", lengths(2048, 2048) | causal(), "cudnn"),
    ("causal", lengths(2048, 2048) | causal() | TRAINING, "fa3"),
    ("causal", lengths(2048, 2048) | causal() | {"batch": 2}, "fa3"),
    ("decode", lengths(1, 32768), "cudnn"),
    ("short", lengths(65, 32768), "cudnn"),
    ("default", lengths(65, 32768) | {"batch": 4}, "fa4"),
    ("decode-bottom-right", lengths(8, 32768) | causal("bottom_right"), "flash"),
    ("bottom-right-small", lengths(65, 8192) | causal("bottom_right"), "flash"),
    ("bottom-right", lengths(128, 32768) | causal("bottom_right"), "fa3"),
    ("window-large", LONGER | window(4095, 0), "fa3"),
    ("window", lengths(4096, 4096) | window(512, 0), "fa3"),
    ("window-small", lengths(2048, 2048) | window(512, 0), "flash"),
    ("documents-large-training", LONG | DOCUMENTS | TRAINING, "flex"),
    ("documents", LONG | DOCUMENTS, "fa3"),
    ("documents-small", lengths(4096, 4096) | DOCUMENTS, "flash"),
    ("documents-large", LONGER | DOCUMENTS | {"batch": 4}, "fa4"),
    ("padding", LONG | PADDING, "cudnn"),
    ("predicate-inference", LONG | PREFIX, "flex_fa4"),
    ("predicate", LONG | PREFIX | TRAINING, "flex"),
    ("predicate", LONG | {"mask": ({"kind": "function"},)}, "flex"),
    ("head-dim-512", lengths(4096, 4096) | dims(512) | causal(), "cudnn_fe"),
    ("head-dim-512", lengths(1024, 1024) | dims(512) | {"num_heads_q": 8}, "cudnn_fe"),
    ("wide-heads", lengths(512, 512) | dims(512) | {"num_heads_q": 8}, "efficient"),
    ("wide-heads", lengths(1024, 1024) | dims(512) | {"num_heads_q": 8} | TRAINING, "efficient"),
    ("wide-heads-long", LONGER | dims(320) | causal(), "chunked"),
    ("wide-heads", lengths(4096, 4096) | dims(320) | {"num_heads_q": 8}, "efficient"),
    ("training-head-dim-512", lengths(4096, 4096) | dims(512) | TRAINING, "cudnn_fe"),
    ("training-wide-heads", lengths(4096, 4096) | dims(320) | TRAINING, "cudnn_fe"),
    ("float32", LONG | {"dtype": "float32"}, "efficient"),
]


@pytest.mark.parametrize(("row", "fields", "first"), HOPPER, ids=lambda v: v if isinstance(v, str) else "")
def test_the_row_that_holds_on_hopper(row, fields, first):
    found = order_of("sm_90", fields)
    assert (found.name, found.order[0]) == (row, first)


@pytest.mark.parametrize("name", sorted({order.name for order in TABLES.arch("sm_90").order}))
def test_every_row_of_hopper_is_used_somewhere(name):
    """Two rows have no call above: a trained bias, and one query of wide shared heads before torch 2.14."""
    bias = {"bias": {"kind": "function", "requires_grad": True}} | TRAINING
    single = lengths(1, 4096) | dims(512) | {"num_heads_kv": 2}
    calls = [*(fields for _, fields, _ in HOPPER), LONG | bias, single]
    padded = LONG | {"mask": ({"kind": "key_padding", "side": "left"}, {"kind": "causal"})}
    assert name in {order_of("sm_90", fields).name for fields in (*calls, padded)}


@pytest.mark.parametrize("arch", CUDA)
def test_every_row_ranks_every_backend_that_is_described(arch):
    described = {b for b in TABLES.backends if TABLES.rules(arch, b) is not None}
    for row in TABLES.arch(arch).order:
        assert described <= set(row.order)
        assert len(row.order) == len(set(row.order))
        assert row.order[-1] == "math"


@pytest.mark.parametrize("arch", CUDA)
def test_transformer_engine_comes_after_the_frontend_of_the_same_cudnn(arch):
    for row in TABLES.arch(arch).order:
        if "te" in row.order:
            assert row.order.index("cudnn_fe") < row.order.index("te")


@pytest.mark.parametrize("arch", DATA_CENTRE)
@pytest.mark.parametrize(
    "fields", [LONG, LONG | causal() | TRAINING, LONG | window(64, 0), LONG | DOCUMENTS], ids=str
)
def test_fa4_is_first_on_blackwell_in_the_data_centre(arch, fields):
    assert order_of(arch, fields).order[0] == "fa4"


@pytest.mark.parametrize("arch", [*DATA_CENTRE, "sm_107"])
@pytest.mark.parametrize(
    ("row", "fields", "first"),
    [
        ("short", lengths(2048, 2048) | causal(), "cudnn"),
        ("window-small", lengths(2048, 2048) | window(64, 0), "flash"),
        ("documents-small", lengths(4096, 4096) | DOCUMENTS, "flash"),
        ("bottom-right-small", lengths(65, 8192) | causal("bottom_right"), "flash"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_small_calls_go_where_the_host_is_free_soonest(arch, row, fields, first):
    found = order_of(arch, fields)
    assert (found.name, found.order[0]) == (row, first)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121"])
@pytest.mark.parametrize("fields", [LONG, LONG | causal() | TRAINING, LONG | window(64, 0)], ids=str)
def test_fa4_is_late_where_nobody_routes_to_it(arch, fields):
    order = order_of(arch, fields).order
    assert max(map(order.index, ("flash", "fa2", "efficient", "flex"))) < order.index("fa4")


@pytest.mark.parametrize("arch", CUDA)
def test_flexattention_on_fa4_comes_after_flex_but_where_somebody_measured_it_ahead(arch):
    ahead = [
        row.name
        for row in TABLES.arch(arch).order
        if "flex_fa4" in row.order and "flex" in row.order
        if row.order.index("flex_fa4") < row.order.index("flex")
    ]
    known = {"sm_90": ["predicate-inference"], "sm_100": ["predicate"], "sm_103": ["predicate"]}
    assert ahead == known.get(arch, [])
