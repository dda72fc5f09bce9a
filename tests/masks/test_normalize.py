"""Simplifying a mask never changes who may attend, and leaves nothing that rules nothing out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import allowed_of, calls, readable_masks, small_call

from attnroute import masks
from attnroute.api.routes import _simplified
from attnroute.call import (
    CausalNode,
    Context,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    PrefixNode,
    WindowNode,
)
from attnroute.masks.lowered import FULL
from attnroute.masks.nodes import Extent
from attnroute.masks.normalize import normalize, recognized

LENGTHS = st.integers(0, 6)
VARYING = Context(dynamic=("seqlen_q", "seqlen_kv"))
TOP_LEFT, BOTTOM_RIGHT = CausalNode(), CausalNode(alignment="bottom_right")


@given(st.data(), st.integers(1, 2), LENGTHS, LENGTHS)
def test_who_may_attend_stays_the_same(data, batch, seqlen_q, seqlen_kv):
    call = small_call(data.draw(readable_masks(batch, seqlen_q, seqlen_kv)), batch, seqlen_q, seqlen_kv)
    assert allowed_of(normalize(call)) == allowed_of(call)


@given(st.data(), LENGTHS, LENGTHS)
def test_who_may_attend_stays_the_same_at_every_length_that_may_come(data, seqlen_q, seqlen_kv):
    bands = st.lists(st.one_of(_causal(), _window()), max_size=2).map(tuple)
    nodes = data.draw(bands)
    simple = normalize(small_call(nodes, 1, seqlen_q, seqlen_kv, context=VARYING)).mask
    for other_q in range(7):
        for other_kv in range(7):
            given_mask, simple_mask = (small_call(n, 1, other_q, other_kv) for n in (nodes, simple))
            assert allowed_of(simple_mask) == allowed_of(given_mask), (other_q, other_kv)


def _causal():
    return st.builds(CausalNode, alignment=st.sampled_from(["top_left", "bottom_right"]))


def _window():
    beside = st.none() | st.integers(0, 7)
    alignment = st.sampled_from(["top_left", "bottom_right"])
    return st.builds(WindowNode, left=beside, right=beside, alignment=alignment)


@given(calls())
def test_everything_but_the_mask_stays_and_once_is_enough(call):
    simple = normalize(call)
    assert simple.with_(mask=call.mask) == call
    assert normalize(simple) == simple
    assert len(set(simple.mask)) == len(simple.mask)


@given(_causal() | _window(), LENGTHS, LENGTHS)
def test_one_band_that_rules_nothing_out_is_dropped(node, seqlen_q, seqlen_kv):
    call = small_call((node,), 1, seqlen_q, seqlen_kv)
    rules_out = not all(all(row) for row in allowed_of(call)[0])
    assert bool(normalize(call).mask) is rules_out


@given(st.data(), LENGTHS, LENGTHS)
def test_the_decision_and_the_kernel_see_a_band_at_the_same_calls(data, seqlen_q, seqlen_kv):
    """The decision reads the simplified nodes, the executor the lowered band."""
    nodes = data.draw(st.lists(st.one_of(_causal(), _window()), min_size=1, max_size=2))
    extent = Extent(1, 2, seqlen_q, seqlen_kv)
    lowered = FULL
    for node in nodes:
        lowered = _object(node).lower(lowered, extent)
    said = normalize(small_call(tuple(nodes), 1, seqlen_q, seqlen_kv)).mask
    assert _simplified(lowered, extent).is_full is (said == ())


def _object(node):
    if isinstance(node, CausalNode):
        return masks.Causal(node.alignment)
    return masks.Window(node.left, node.right, node.alignment)


@pytest.mark.parametrize(
    ("nodes", "seqlen_q", "seqlen_kv", "simple"),
    [
        # One query at the end of a cache sees everything; one at its start does not.
        ((BOTTOM_RIGHT,), 1, 64, ()),
        ((TOP_LEFT,), 1, 64, (TOP_LEFT,)),
        ((TOP_LEFT,), 64, 1, ()),
        ((BOTTOM_RIGHT,), 64, 1, (BOTTOM_RIGHT,)),
        ((TOP_LEFT,), 1, 1, ()),
        ((BOTTOM_RIGHT,), 64, 64, (TOP_LEFT,)),
        ((TOP_LEFT, BOTTOM_RIGHT), 64, 64, (TOP_LEFT,)),
        ((TOP_LEFT, BOTTOM_RIGHT), 64, 65, (TOP_LEFT, BOTTOM_RIGHT)),
        ((WindowNode(left=4095),), 64, 64, ()),
        ((WindowNode(left=4095, right=0),), 64, 64, (TOP_LEFT,)),
        ((WindowNode(left=4095, right=0), TOP_LEFT), 64, 64, (TOP_LEFT,)),
        ((WindowNode(left=62, right=70),), 64, 64, (WindowNode(left=62),)),
        ((WindowNode(left=63, alignment="bottom_right"),), 1, 64, ()),
        (
            (WindowNode(left=62, alignment="bottom_right"),),
            1,
            64,
            (WindowNode(left=62, alignment="bottom_right"),),
        ),
        ((WindowNode(left=3, alignment="bottom_right"),), 64, 64, (WindowNode(left=3),)),
        ((DocumentsNode(lengths=(64,)),), 64, 64, ()),
        ((DocumentsNode(lengths=(60, 4)),), 64, 64, (DocumentsNode(lengths=(60, 4)),)),
        ((DocumentsNode(),), 64, 64, (DocumentsNode(),)),
        ((KeyPaddingNode(lengths=(64, 64)),), 64, 64, ()),
        ((KeyPaddingNode(lengths=(64, 63)),), 64, 64, (KeyPaddingNode(lengths=(64, 63)),)),
        ((KeyPaddingNode(),), 64, 64, (KeyPaddingNode(),)),
        ((FunctionNode(), PrefixNode()), 64, 64, (FunctionNode(), PrefixNode())),
        ((TOP_LEFT, BOTTOM_RIGHT, WindowNode(left=0, right=0)), 0, 64, ()),
        ((TOP_LEFT, BOTTOM_RIGHT, WindowNode(left=0, right=0)), 64, 0, ()),
    ],
)
def test_simple_forms(nodes, seqlen_q, seqlen_kv, simple):
    assert normalize(small_call(nodes, 2, seqlen_q, seqlen_kv)).mask == simple


def test_a_call_without_anything_to_simplify_is_itself():
    call = small_call((TOP_LEFT,), 2, 64, 64)
    assert normalize(call) is call


@pytest.mark.parametrize("dynamic", ["seqlen_q", "seqlen_kv"])
@pytest.mark.parametrize("node", [BOTTOM_RIGHT, WindowNode(left=4095), KeyPaddingNode(lengths=(64, 64))])
def test_nothing_is_dropped_because_of_a_length_that_varies(dynamic, node):
    assert normalize(small_call((node,), 2, 1, 64, context=Context(dynamic=(dynamic,)))).mask == (node,)


def test_recognised_tensors_become_what_they_say():
    causal = DenseNode(shape=(64, 64), recognized=(BOTTOM_RIGHT,))
    other = DenseNode(shape=(64, 64))
    call = small_call((causal, other, KeyPaddingNode()), 2, 64, 64)
    assert recognized(call).mask == (TOP_LEFT, other, KeyPaddingNode())
    full = small_call((DenseNode(shape=(64, 64), recognized=()),), 2, 64, 64)
    assert recognized(full).mask == ()


def test_without_a_recognised_tensor_there_is_nothing_to_say():
    assert recognized(small_call((DenseNode(shape=(64, 64)), TOP_LEFT), 2, 64, 64)) is None
    assert recognized(small_call((), 2, 64, 64)) is None


def test_definition_used_here_equals_the_masks():
    """The nested lists that these tests compare are the tensors that `materialize` builds."""
    nodes = [
        TOP_LEFT,
        BOTTOM_RIGHT,
        WindowNode(left=1, right=2),
        WindowNode(left=0, alignment="bottom_right"),
    ]
    for node in nodes:
        for seqlen_q, seqlen_kv in ((3, 5), (5, 3), (4, 4), (1, 6)):
            wanted = _object(node).materialize(seqlen_q, seqlen_kv)[0]
            got = torch.tensor(allowed_of(small_call((node,), 1, seqlen_q, seqlen_kv)))
            assert torch.equal(got, wanted), (node, seqlen_q, seqlen_kv)
