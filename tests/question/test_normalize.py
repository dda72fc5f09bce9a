"""Simplifying a mask never changes who may attend, and leaves nothing that rules nothing out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import allowed_of, calls, combined, readable_masks, small_call

from attnroute import masks
from attnroute.masks.lowered.form import FULL, Extent, open_band
from attnroute.question.call import Context
from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import normalize, recognized

LENGTHS = st.integers(0, 6)
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
VARYING = Context(dynamic=("seqlen_q", "seqlen_kv"))
TOP_LEFT, BOTTOM_RIGHT = CausalNode(), CausalNode(alignment="bottom_right")
NOBODY, CROSS = NotNode(part=()), DocumentsNode(cross=True)
EITHER_FUNCTION = AnyNode(parts=((FunctionNode(),), (FunctionNode(),)))
WRITTEN_OTHERWISE = NotNode(part=(NotNode(part=(TOP_LEFT,)), WindowNode()))
DOUBLE_NEGATION = NotNode(part=(NotNode(part=(TOP_LEFT,)),))


@given(st.data(), st.integers(1, 2), LENGTHS, LENGTHS)
def test_who_may_attend_stays_the_same(data, batch, seqlen_q, seqlen_kv):
    call = small_call(data.draw(readable_masks(batch, seqlen_q, seqlen_kv)), batch, seqlen_q, seqlen_kv)
    assert allowed_of(normalize(call)) == allowed_of(call)


@given(st.data(), LENGTHS, LENGTHS)
def test_who_may_attend_stays_the_same_at_every_length_that_may_come(data, seqlen_q, seqlen_kv):
    prefix = st.builds(PrefixNode, lengths=st.just((data.draw(st.integers(0, 2)),)), alignment=ALIGNMENTS)
    bands = st.one_of(_causal(), _window(), prefix)
    nodes = tuple(data.draw(st.lists(bands | combined(bands), max_size=2)))
    simple = normalize(small_call(nodes, 1, seqlen_q, seqlen_kv, context=VARYING)).mask
    for other_q in range(7):
        for other_kv in range(7):
            given_mask, simple_mask = (small_call(n, 1, other_q, other_kv) for n in (nodes, simple))
            assert allowed_of(simple_mask) == allowed_of(given_mask), (other_q, other_kv)


def _causal():
    return st.builds(CausalNode, alignment=ALIGNMENTS)


def _window():
    beside = st.none() | st.integers(0, 7)
    return st.builds(WindowNode, left=beside, right=beside, alignment=ALIGNMENTS)


@given(calls())
def test_everything_but_the_mask_stays_and_once_is_enough(call):
    simple = normalize(call)
    assert simple.with_(mask=call.mask) == call
    assert normalize(simple) == simple
    said = [node for node in simple.mask if isinstance(node, CausalNode | WindowNode)]
    assert len(set(said)) == len(said)


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
    assert open_band(lowered, extent).is_full is (said == ())


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
        ((DocumentsNode(lengths=(60, 0, 4)),), 64, 64, (DocumentsNode(lengths=(60, 4)),)),
        ((DocumentsNode(lengths=(0, 64)),), 64, 64, ()),
        # Equal words say the same only where they say everything.
        ((DocumentsNode(), DocumentsNode()), 64, 64, (DocumentsNode(), DocumentsNode())),
        ((DocumentsNode(lengths=(60, 4)),) * 2, 64, 64, (DocumentsNode(lengths=(60, 4)),)),
        ((KeyPaddingNode(lengths=(1, 2)),) * 2, 64, 64, (KeyPaddingNode(lengths=(1, 2)),)),
        ((FunctionNode(), FunctionNode()), 64, 64, (FunctionNode(), FunctionNode())),
        # A prefix that causal shows anyway is causal, one of all keys is nothing.
        ((PrefixNode(lengths=(0, 0)),), 64, 64, (TOP_LEFT,)),
        ((PrefixNode(lengths=(1, 0), alignment="bottom_right"),), 64, 64, (TOP_LEFT,)),
        ((PrefixNode(lengths=(2, 0)),), 64, 64, (PrefixNode(lengths=(2, 0)),)),
        ((PrefixNode(lengths=(37, 0), alignment="bottom_right"),), 64, 100, (BOTTOM_RIGHT,)),
        (
            (PrefixNode(lengths=(38, 0), alignment="bottom_right"),),
            64,
            100,
            (PrefixNode(lengths=(38, 0), alignment="bottom_right"),),
        ),
        ((PrefixNode(lengths=(0, 0), alignment="bottom_right"),), 100, 64, (BOTTOM_RIGHT,)),
        ((PrefixNode(lengths=(3, 0), alignment="bottom_right"),), 64, 64, (PrefixNode(lengths=(3, 0)),)),
        ((PrefixNode(alignment="bottom_right"),), 64, 64, (PrefixNode(),)),
        ((PrefixNode(alignment="bottom_right"),), 1, 64, ()),
        ((PrefixNode(lengths=(64, 64)),), 64, 64, ()),
        ((PrefixNode(lengths=(64, 63)),), 64, 64, (PrefixNode(lengths=(64, 63)),)),
        # A disjunction with a part that allows everything is nothing; of one part, it is that part.
        ((AnyNode(parts=((TOP_LEFT,), ())),), 64, 64, ()),
        ((AnyNode(parts=((FunctionNode(),), (WindowNode(left=63, right=63),))),), 64, 64, ()),
        ((AnyNode(parts=((BOTTOM_RIGHT, FunctionNode()),)),), 64, 64, (TOP_LEFT, FunctionNode())),
        ((AnyNode(parts=((BOTTOM_RIGHT,), (WindowNode(right=0),))),), 64, 64, (TOP_LEFT,)),
        ((AnyNode(parts=((FunctionNode(),), (FunctionNode(),))),), 64, 64, (EITHER_FUNCTION,)),
        ((AnyNode(parts=((KeyPaddingNode(lengths=(0, 0)),), (FunctionNode(),))),), 64, 64, (FunctionNode(),)),
        ((AnyNode(parts=()),), 64, 64, (NOBODY,)),
        ((AnyNode(parts=((AnyNode(parts=()),), (TOP_LEFT, NOBODY))),), 64, 64, (NOBODY,)),
        # The negation of nothing allows nobody, and its negation everything.
        ((NotNode(part=()),), 64, 64, (NOBODY,)),
        ((NotNode(part=(WindowNode(left=63, right=63),)),), 64, 64, (NOBODY,)),
        ((NotNode(part=(AnyNode(parts=()),)),), 64, 64, ()),
        (
            (NotNode(part=(NotNode(part=(BOTTOM_RIGHT, FunctionNode())),)),),
            64,
            64,
            (TOP_LEFT, FunctionNode()),
        ),
        ((NotNode(part=(BOTTOM_RIGHT, BOTTOM_RIGHT)),), 64, 64, (NotNode(part=(TOP_LEFT,)),)),
        # Only what is lowered as no negation is said as none.
        ((WRITTEN_OTHERWISE,), 64, 64, (WRITTEN_OTHERWISE,)),
        # Beside documents with diagonals of their own, corners stay apart and bands stay where they stand.
        ((CROSS, BOTTOM_RIGHT), 64, 64, (CROSS, BOTTOM_RIGHT)),
        ((CROSS, AnyNode(parts=((TOP_LEFT,),))), 64, 64, (CROSS, AnyNode(parts=((TOP_LEFT,),)))),
        ((AnyNode(parts=((CROSS, TOP_LEFT),)),), 64, 64, (AnyNode(parts=((CROSS, TOP_LEFT),)),)),
        ((CROSS, PrefixNode(lengths=(0, 0))), 64, 64, (CROSS, PrefixNode(lengths=(0, 0)))),
        ((CROSS, NotNode(part=(NotNode(part=(TOP_LEFT,)),))), 64, 64, (CROSS, DOUBLE_NEGATION)),
        ((FunctionNode(), DenseNode(shape=(1, 1)), NOBODY, PrefixNode()), 0, 64, ()),
        ((TOP_LEFT, BOTTOM_RIGHT, WindowNode(left=0, right=0)), 0, 64, ()),
        ((TOP_LEFT, BOTTOM_RIGHT, WindowNode(left=0, right=0)), 64, 0, ()),
    ],
)
def test_simple_forms(nodes, seqlen_q, seqlen_kv, simple):
    found = normalize(small_call(nodes, 2, seqlen_q, seqlen_kv))
    assert found.mask == simple
    assert normalize(found) == found


def test_a_call_without_anything_to_simplify_is_itself():
    call = small_call((TOP_LEFT,), 2, 64, 64)
    assert normalize(call) is call


@pytest.mark.parametrize("dynamic", ["seqlen_q", "seqlen_kv"])
@pytest.mark.parametrize(
    "node",
    [
        BOTTOM_RIGHT,
        WindowNode(left=4095),
        KeyPaddingNode(lengths=(64, 64)),
        PrefixNode(lengths=(64, 64)),
        PrefixNode(lengths=(1, 1), alignment="bottom_right"),
        AnyNode(parts=((FunctionNode(),), (WindowNode(left=63, right=63),))),
    ],
)
def test_nothing_is_dropped_because_of_a_length_that_varies(dynamic, node):
    assert normalize(small_call((node,), 2, 1, 64, context=Context(dynamic=(dynamic,)))).mask == (node,)


def test_recognised_tensors_become_what_they_say():
    causal = DenseNode(shape=(64, 64), recognized=(BOTTOM_RIGHT,))
    other = DenseNode(shape=(64, 64))
    call = small_call((causal, other, KeyPaddingNode()), 2, 64, 64)
    assert recognized(call).mask == (TOP_LEFT, other, KeyPaddingNode())
    full = small_call((DenseNode(shape=(64, 64), recognized=()),), 2, 64, 64)
    assert recognized(full).mask == ()


def test_recognised_tensors_become_everything_they_say():
    nodes = (DocumentsNode(lengths=(60, 4)), BOTTOM_RIGHT)
    call = small_call((DenseNode(shape=(64, 64), recognized=nodes), TOP_LEFT), 2, 64, 64)
    assert recognized(call).mask == (DocumentsNode(lengths=(60, 4)), TOP_LEFT)


def test_a_tensor_inside_a_disjunction_stays_one():
    seen = DenseNode(shape=(64, 64), recognized=(TOP_LEFT,))
    call = small_call((AnyNode(parts=((seen,), (FunctionNode(),))),), 2, 64, 64)
    assert recognized(call) is None
    beside = call.with_(mask=(seen, *call.mask))
    assert recognized(beside).mask == (TOP_LEFT, *call.mask)


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
