"""Where all parts of a mask say their numbers, it is known whether some query may attend no key."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.mask_objects import combined
from support.strategies import allowed_of, readable_masks, small_call
from support.strategies import combined as nested

from attnroute.masks.lowered.form import Extent
from attnroute.question.call import Call, Context
from attnroute.question.facts import empty_rows_of, runs
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import normalize

LENGTHS = st.integers(1, 6)
ANY_LENGTHS = st.integers(0, 5)
TOP_LEFT, BOTTOM_RIGHT = CausalNode(), CausalNode(alignment="bottom_right")
SQUARE = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=32,
    num_heads_kv=8,
    seqlen_q=192,
    seqlen_kv=192,
    head_dim_qk=192,
    head_dim_v=128,
)


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_runs_are_counted_exactly(data, batch, seqlen_q, seqlen_kv):
    nodes = data.draw(readable_masks(batch, seqlen_q, seqlen_kv))
    simple = tuple(n for n in nodes if not isinstance(n, AnyNode | NotNode))
    call = small_call(simple, batch, seqlen_q, seqlen_kv)
    has_empty = not all(any(row) for rows in allowed_of(call) for row in rows)
    assert empty_rows_of(call) == ("some" if has_empty else "none")


LEFT = KeyPaddingNode(lengths=(3, 6), side="left")


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((CausalNode(), LEFT), "some"),
        ((WindowNode(left=2, right=3), LEFT), "none"),
        ((WindowNode(left=2, right=2), LEFT), "some"),
        ((DocumentsNode(lengths=(4, 2)), LEFT), "none"),
        ((DocumentsNode(lengths=(3, 3)), LEFT), "some"),
        ((DocumentsNode(lengths=(3, 3)), KeyPaddingNode(lengths=(4, 6))), "none"),
        ((DocumentsNode(lengths=(3, 0, 3)), KeyPaddingNode(lengths=(3, 6))), "some"),
        # Said of other rows, tokens or sides than those that there are, numbers say nothing.
        ((KeyPaddingNode(lengths=(3,)), LEFT), "unknown"),
        ((DocumentsNode(lengths=(4, 3)), LEFT), "unknown"),
        ((DocumentsNode(lengths=(4, 2), contiguous=False), LEFT), "unknown"),
        ((CausalNode(), KeyPaddingNode(lengths=(3, 6), side="any")), "unknown"),
        ((CausalNode(), KeyPaddingNode(side="left")), "unknown"),
    ],
)
def test_parts_that_share_no_key(nodes, said):
    assert empty_rows_of(small_call(nodes, 2, 6, 6)) == said


def test_lengths_that_may_change_are_not_counted():
    call = small_call((WindowNode(left=2, right=3), LEFT), 2, 6, 6)
    assert empty_rows_of(call.with_(context=Context(dynamic=("seqlen_q",)))) == "unknown"


def test_counting_ends_somewhere(monkeypatch):
    """Two distinct rows, four queries at the ends of documents, two nodes."""
    call = small_call((DocumentsNode(lengths=(4, 1, 1)), LEFT), 2, 6, 6)
    for limit, said in ((2 * 4 * 2, "none"), (2 * 4 * 2 - 1, "unknown")):
        monkeypatch.setattr(runs, "LOOKED_AT", limit)
        runs.some_run_is_empty.cache_clear()
        assert empty_rows_of(call) == said
    runs.some_run_is_empty.cache_clear()


@given(st.data(), st.integers(1, 3), ANY_LENGTHS, ANY_LENGTHS)
def test_empty_rows_never_contradict_the_definition(data, batch, seqlen_q, seqlen_kv):
    call = small_call(data.draw(readable_masks(batch, seqlen_q, seqlen_kv)), batch, seqlen_q, seqlen_kv)
    _hold_against(empty_rows_of(call), [row for rows in allowed_of(call) for row in rows])


def _hold_against(said, rows):
    has_empty = not all(any(row) for row in rows)
    assert said != ("none" if has_empty else "some")


@given(st.data(), st.integers(1, 2), ANY_LENGTHS, ANY_LENGTHS)
def test_empty_rows_never_contradict_what_a_mask_object_allows(data, batch, seqlen_q, seqlen_kv):
    mask, allowed = data.draw(combined(batch, seqlen_q, seqlen_kv))
    nodes = mask.describe(Extent(batch, 2, seqlen_q, seqlen_kv))
    call = small_call(_looked_at(nodes, mask), batch, seqlen_q, seqlen_kv)
    for said in (call, normalize(call)):
        _hold_against(empty_rows_of(said), allowed.flatten(0, 2))


def _looked_at(nodes, mask):
    """Say of dense nodes what a look into them would find: here they are too small to be looked at."""
    found = []
    for node, part in zip(nodes, mask.nodes, strict=True):
        if isinstance(node, DenseNode) and part.tensor.dim() > 0:
            state = "none" if bool(part.tensor.any(-1).all()) else "some"
            found.append(node.model_copy(update={"empty_rows": state}))
        else:
            found.append(node)
    return tuple(found)


@pytest.mark.parametrize(
    ("nodes", "seqlen_kv", "bias", "said"),
    [
        # Each part leaves every query a key, both together do not.
        ((TOP_LEFT, WindowNode(left=0, alignment="bottom_right")), 256, None, "some"),
        ((TOP_LEFT,), 192, DenseBias(dtype="float32", shape=(192, 192), empty_rows="none"), "unknown"),
        ((TOP_LEFT, DenseNode(shape=(192, 192), empty_rows="none")), 192, None, "unknown"),
        ((TOP_LEFT, KeyPaddingNode(lengths=(1, 1), side="left")), 192, None, "some"),
        ((TOP_LEFT, KeyPaddingNode(side="left")), 192, None, "unknown"),
        # What is known to leave the first key, or the diagonal, leaves it together too.
        ((TOP_LEFT, KeyPaddingNode(lengths=(1, 1))), 256, None, "none"),
        ((TOP_LEFT, PrefixNode(lengths=(1, 2)), KeyPaddingNode(lengths=(1, 1))), 192, None, "none"),
        ((TOP_LEFT, DocumentsNode(), WindowNode(left=0, right=0)), 192, None, "none"),
        ((BOTTOM_RIGHT, WindowNode(left=0, alignment="bottom_right")), 256, None, "none"),
        ((TOP_LEFT,), 192, AlibiBias(), "none"),
        # One part alone decides.
        ((DenseNode(shape=(192, 192), empty_rows="none"),), 192, None, "none"),
        ((DenseNode(shape=(192, 192), empty_rows="some"), KeyPaddingNode()), 192, None, "some"),
        ((), 192, DenseBias(dtype="float32", shape=(192, 192), empty_rows="none"), "none"),
        ((), 192, DenseBias(dtype="float32", shape=(192, 192)), "unknown"),
        ((BOTTOM_RIGHT,), 100, None, "some"),
        ((PrefixNode(lengths=(1, 0), alignment="bottom_right"),), 100, None, "some"),
        ((PrefixNode(lengths=(1, 2), alignment="bottom_right"),), 100, None, "none"),
        ((PrefixNode(alignment="bottom_right"),), 100, None, "unknown"),
        # One alternative that leaves every query a key is enough.
        ((AnyNode(parts=((FunctionNode(),), (TOP_LEFT,))),), 192, None, "none"),
        ((AnyNode(parts=((FunctionNode(),), (TOP_LEFT,))), TOP_LEFT), 192, None, "none"),
        (
            (AnyNode(parts=((FunctionNode(),), (KeyPaddingNode(lengths=(1, 1)),))), TOP_LEFT),
            256,
            None,
            "none",
        ),
        ((AnyNode(parts=((FunctionNode(),), (BOTTOM_RIGHT,))),), 100, None, "unknown"),
        ((AnyNode(parts=((BOTTOM_RIGHT,), (NotNode(part=(BOTTOM_RIGHT,)),))),), 100, None, "unknown"),
        ((AnyNode(parts=((BOTTOM_RIGHT,),)),), 100, None, "some"),
        ((AnyNode(parts=()),), 192, None, "some"),
        # What a node allows all of, its negation leaves nothing of.
        ((NotNode(part=()),), 192, None, "some"),
        ((NotNode(part=(TOP_LEFT,)),), 192, None, "some"),
        ((NotNode(part=(TOP_LEFT,)),), 193, None, "none"),
        ((NotNode(part=(BOTTOM_RIGHT,)),), 256, None, "some"),
        ((NotNode(part=(WindowNode(left=3, right=3),)),), 192, None, "none"),
        ((NotNode(part=(WindowNode(left=100, right=100),)),), 192, None, "some"),
        ((NotNode(part=(WindowNode(left=400, right=0),)),), 300, None, "none"),
        ((NotNode(part=(WindowNode(left=10, right=500, alignment="bottom_right"),)),), 256, None, "none"),
        ((NotNode(part=(KeyPaddingNode(lengths=(0, 191)),)),), 192, None, "none"),
        ((NotNode(part=(KeyPaddingNode(lengths=(0, 192)),)),), 192, None, "some"),
        ((NotNode(part=(DocumentsNode(lengths=(191, 1)),)),), 192, None, "none"),
        ((NotNode(part=(DocumentsNode(),)),), 192, None, "unknown"),
        ((NotNode(part=(PrefixNode(lengths=(5, 6)),)),), 193, None, "none"),
        ((NotNode(part=(PrefixNode(lengths=(5, 193)),)),), 193, None, "some"),
        ((NotNode(part=(FunctionNode(),)),), 192, None, "unknown"),
        ((NotNode(part=(FunctionNode(), WindowNode(left=3, right=3))),), 192, None, "none"),
        ((NotNode(part=(AnyNode(parts=((FunctionNode(),), (TOP_LEFT,))),)),), 192, None, "some"),
        ((NotNode(part=(NotNode(part=(TOP_LEFT,)),)),), 192, None, "none"),
        # Per document, nobody said how long queries and keys are.
        ((DocumentsNode(cross=True), TOP_LEFT), 192, None, "unknown"),
        ((KeyPaddingNode(lengths=(0, 5)),), 192, None, "some"),
        ((), 0, None, "some"),
    ],
)
def test_empty_rows_of_parts_together(nodes, seqlen_kv, bias, said):
    assert empty_rows_of(SQUARE.with_(seqlen_kv=seqlen_kv, mask=nodes, bias=bias)) == said


@pytest.mark.parametrize("size", ["batch", "seqlen_q", "heads"])
@pytest.mark.parametrize("nodes", [(), (KeyPaddingNode(lengths=(0, 0)),), (BOTTOM_RIGHT,)])
def test_where_there_are_no_rows_none_is_empty(size, nodes):
    changes = {"num_heads_q": 0, "num_heads_kv": 0} if size == "heads" else {size: 0}
    assert empty_rows_of(SQUARE.with_(mask=nodes, seqlen_kv=0, **changes)) == "none"


@given(st.data(), st.integers(1, 2), ANY_LENGTHS, ANY_LENGTHS)
@example(None, 1, 3, 3)
def test_empty_rows_hold_for_every_length_that_may_come(data, batch, seqlen_q, seqlen_kv):
    """A band or prefix is the only part whose description stays the same when lengths change."""
    alignment = st.sampled_from(["top_left", "bottom_right"])
    beside = st.none() | st.integers(0, 3)
    simple = st.one_of(
        st.builds(CausalNode, alignment=alignment),
        st.builds(WindowNode, left=beside, right=beside, alignment=alignment),
        st.builds(PrefixNode, lengths=st.just((1,) * batch), alignment=alignment),
    )
    band = st.lists(simple | nested(simple), max_size=2)
    nodes = (TOP_LEFT, WindowNode(left=0)) if data is None else tuple(data.draw(band))
    varying = small_call(
        nodes, batch, seqlen_q, seqlen_kv, context=Context(dynamic=("seqlen_q", "seqlen_kv"))
    )
    if empty_rows_of(varying) != "none":
        return
    for other_q in range(1, 6):
        for other_kv in range(1, 6):
            call = small_call(nodes, batch, other_q, other_kv)
            assert all(any(row) for rows in allowed_of(call) for row in rows), (other_q, other_kv)
