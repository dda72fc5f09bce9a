"""Ragged batches on plain data: what becomes one, what comes back from one, and what kernels make of it."""

from __future__ import annotations

import pytest

from attnroute.engine.classes import class_of
from attnroute.engine.decide import decide
from attnroute.engine.repairs import apply
from attnroute.question.call import Call, Context, Strides
from attnroute.question.host import Host
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DocumentsNode,
    KeyPaddingNode,
    PrefixNode,
    WindowNode,
)
from attnroute.tables.load import load

CALL = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=8,
    num_heads_kv=4,
    seqlen_q=16,
    seqlen_kv=32,
    head_dim_qk=20,
    head_dim_v=24,
    strides=Strides(tokens_contiguous=False),
)
SQUARE = CALL.with_(seqlen_q=32)
PACKED = CALL.with_(batch=1, layout="thd")
LEFT = KeyPaddingNode(side="left")
AT_END = CausalNode(alignment="bottom_right")
CROSS = DocumentsNode(cross=True)
CPU = Host(arch="cpu", versions={"torch": "2.13.0+cpu"})
H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})


@pytest.mark.parametrize(
    ("repair", "call", "changes", "size"),
    [
        (
            "to_varlen",
            SQUARE.with_(mask=(DocumentsNode(lengths=(20, 12)), CausalNode())),
            {"mask": (CausalNode(),), "layout": "thd"},
            2 * 32 * (8 + 4) * (20 + 24) * 2,
        ),
        (
            "to_varlen",
            SQUARE.with_(mask=(DocumentsNode(lengths=(20, 12)),), strides=Strides()),
            {"mask": (), "layout": "thd"},
            0,
        ),
        (
            "to_varlen",
            SQUARE.with_(mask=(DocumentsNode(),), layout="bshd"),
            {"mask": (), "layout": "thd"},
            0,
        ),
        (
            "to_varlen",
            SQUARE.with_(mask=(DocumentsNode(),), batch=1),
            {"mask": (), "layout": "thd"},
            0,
        ),
        (
            "to_varlen",
            CALL.with_(mask=(KeyPaddingNode(lengths=(0, 32)),)),
            {"mask": (), "layout": "thd"},
            2 * 16 * 8 * 20 * 2,
        ),
        (
            "to_varlen",
            CALL.with_(mask=(KeyPaddingNode(lengths=(0, 32)),), seqlen_q=1),
            {"mask": (), "layout": "thd"},
            0,
        ),
        (
            "to_varlen",
            CALL.with_(mask=(KeyPaddingNode(lengths=(0, 32)),), phase="training"),
            {"mask": (), "layout": "thd"},
            2 * (16 * 8 + 32 * 4) * (20 + 24) * 2,
        ),
        (
            "to_varlen",
            CALL.with_(mask=(LEFT, AT_END), layout="bshd"),
            {"mask": (AT_END,), "layout": "thd"},
            0,
        ),
        (
            "to_varlen",
            SQUARE.with_(mask=(WindowNode(left=3, right=5), KeyPaddingNode(lengths=(1, 2), side="left"))),
            {"mask": (WindowNode(left=3, right=5),), "layout": "thd"},
            2 * 32 * 8 * 20 * 2,
        ),
        ("to_varlen", PACKED.with_(mask=(CROSS,)), {"mask": ()}, 0),
        ("to_varlen", PACKED.with_(mask=(CROSS, AT_END)), {"mask": (AT_END,)}, 0),
        (
            "to_varlen",
            PACKED.with_(mask=(DocumentsNode(), CausalNode()), seqlen_q=32),
            {"mask": (CausalNode(),)},
            0,
        ),
        ("from_varlen", PACKED.with_(mask=(CROSS, AT_END)), {"layout": "bshd"}, 0),
        ("from_varlen", PACKED, {"layout": "bshd", "mask": (CROSS,)}, 0),
        ("from_varlen", PACKED.with_(seqlen_q=0, seqlen_kv=0), {"layout": "bshd"}, 0),
        (
            "from_varlen",
            PACKED.with_(seqlen_q=32, mask=(CausalNode(),)),
            {"layout": "bshd", "mask": (DocumentsNode(), CausalNode())},
            0,
        ),
    ],
)
def test_what_becomes_a_ragged_batch_and_comes_back(repair, call, changes, size):
    assert apply(repair, call) == (call.with_(**changes), size)


@pytest.mark.parametrize(
    ("repair", "call"),
    [
        ("to_varlen", CALL),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(contiguous=False),))),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(), KeyPaddingNode()))),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(), DocumentsNode(lengths=(32,))))),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(),), bias=AlibiBias())),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(), PrefixNode()))),
        ("to_varlen", CALL.with_(mask=(DocumentsNode(),))),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(lengths=(1,) * 32),), batch=2048)),
        ("to_varlen", SQUARE.with_(mask=(DocumentsNode(lengths=(16, 16)),), batch=0)),
        ("to_varlen", PACKED.with_(mask=(CROSS, CausalNode()))),
        ("to_varlen", PACKED.with_(mask=(CROSS, CausalNode()), seqlen_q=32)),
        ("to_varlen", PACKED.with_(mask=(AT_END,))),
        ("to_varlen", CALL.with_(mask=(KeyPaddingNode(side="any"),))),
        ("to_varlen", CALL.with_(mask=(KeyPaddingNode(), AT_END))),
        ("to_varlen", SQUARE.with_(mask=(KeyPaddingNode(), CausalNode()))),
        ("to_varlen", SQUARE.with_(mask=(KeyPaddingNode(), WindowNode(left=3)))),
        ("to_varlen", CALL.with_(mask=(LEFT, CausalNode()))),
        ("to_varlen", CALL.with_(mask=(LEFT, AT_END, WindowNode(left=3)))),
        ("to_varlen", CALL.with_(mask=(LEFT, KeyPaddingNode()))),
        ("to_varlen", CALL.with_(mask=(LEFT,), bias=AlibiBias())),
        ("to_varlen", CALL.with_(mask=(LEFT,), context=Context(dynamic=("seqlen_kv",)))),
        ("to_varlen", CALL.with_(mask=(LEFT,), batch=32768)),
        ("to_varlen", CALL.with_(mask=(LEFT,), batch=1024, seqlen_kv=2**21)),
        ("from_varlen", CALL),
        ("from_varlen", CALL.with_(layout="bshd")),
        (
            "to_varlen",
            SQUARE.with_(mask=(DocumentsNode(),), context=Context(dynamic=("seqlen_q", "seqlen_kv"))),
        ),
    ],
)
def test_what_is_no_ragged_batch(repair, call):
    assert apply(repair, call) is None


@pytest.mark.parametrize("node", [KeyPaddingNode(), KeyPaddingNode(lengths=(3, 32)), LEFT])
def test_padded_rows_run_ragged_where_the_kernel_takes_sequences(node):
    call = CALL.with_(mask=(node,), head_dim_qk=24, phase="training")
    assert decide(call, H100).verdict("flash").repairs == ("to_varlen",)
    assert decide(call, CPU).verdict("flash").repairs == ("clear_left_out", "materialize_mask", "cast_mask")


@pytest.mark.parametrize(
    "call",
    [
        CALL.with_(mask=(LEFT, CausalNode()), head_dim_qk=24),
        PACKED.with_(mask=(CROSS, CausalNode()), head_dim_qk=24),
        PACKED.with_(mask=(CROSS, WindowNode(left=3, right=0)), head_dim_qk=24, seqlen_q=32),
    ],
)
def test_a_diagonal_from_the_top_left_is_said_to_be_in_the_way(call):
    verdict = decide(call, H100).verdict("flash")
    assert verdict.status == "rejected"
    assert "shared/flash_cuda/diagonal-at-bottom-right" in [f.rule for f in verdict.blocking]


def test_ragged_batches_of_equal_totals_keep_the_corner_of_their_diagonals():
    call = PACKED.with_(mask=(CROSS, AT_END), head_dim_qk=24, seqlen_q=32)
    assert decide(call, H100).verdict("flash").repairs == ("to_varlen",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((LEFT, CausalNode()), (KeyPaddingNode(), CausalNode())),
        ((CROSS, AT_END), (DocumentsNode(), CausalNode())),
        ((LEFT,), (KeyPaddingNode(side="any"),)),
        ((AnyNode(parts=((LEFT,), (LEFT,))),), (AnyNode(parts=((LEFT,), (CausalNode(),))),)),
    ],
)
def test_masks_that_repairs_treat_differently_are_of_two_classes(one, other):
    calls = [SQUARE.with_(mask=mask, head_dim_qk=24) for mask in (one, other)]
    first, second = (class_of(call, "sm_90", load()) for call in calls)
    assert first != second
