"""The fields that rules ask about: all are listed, each is what its description says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import allowed_of, calls, readable_masks, small_call

from attnroute import masks
from attnroute.call import (
    AlibiBias,
    Call,
    CausalNode,
    Context,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    FunctionNode,
    KeyPaddingNode,
    PrefixNode,
    Strides,
    WindowNode,
)
from attnroute.facts import FACTS, UNKNOWN, Varies, alignment_of, empty_rows_of, facts_of
from attnroute.masks.nodes import Extent

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
TOP_LEFT, BOTTOM_RIGHT = CausalNode(), CausalNode(alignment="bottom_right")
LENGTHS = st.integers(0, 5)


@given(calls())
def test_every_listed_fact_is_computed_and_no_other(call):
    assert facts_of(call).keys() == FACTS.keys()


@given(calls())
def test_facts_are_plain_values(call):
    for name, value in facts_of(call).items():
        assert isinstance(value, bool | int | float | str | Varies) or value is UNKNOWN, name


def test_every_fact_is_described_in_words():
    assert [name for name, said in FACTS.items() if not said.strip()] == []


def test_the_facts_of_a_plain_call():
    assert facts_of(SQUARE) == {
        "dtype": "bfloat16",
        "batch": 2,
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "is_gqa": True,
        "seqlen_q": 192,
        "seqlen_kv": 192,
        "seqlens_equal": True,
        "seqlen_q_mod_128": 64,
        "seqlen_kv_mod_128": 64,
        "score_elements": 2 * 32 * 192 * 192,
        "mask_elements": 192 * 192,
        "dq_accumulator_elements": 3145728,
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "head_dim_max": 192,
        "head_dims_equal": False,
        "layout": "bhsd",
        "phase": "inference",
        "scale": "positive",
        "causal": False,
        "window": False,
        "window_right_open": False,
        "documents": False,
        "key_padding": False,
        "prefix": False,
        "dense_mask": False,
        "function_mask": False,
        "band_only": True,
        "only_causal": False,
        "alignment": "none",
        "mask_last_dim_contiguous": True,
        "mask_aligned": True,
        "mask_rank_2_or_4": True,
        "mask_has_query_dim": False,
        "dense_bias": False,
        "bias_is_query_dtype": True,
        "bias_requires_grad": False,
        "only_bias_requires_grad": False,
        "empty_rows": "none",
        "softcap": 0.0,
        "sink": False,
        "alibi": False,
        "function_bias": False,
        "dropout_p": 0.0,
        "dropout_is_sixteenth": True,
        "deterministic": False,
        "return_lse": False,
        "qkv_last_dim_contiguous": True,
        "qkv_packed": True,
        "qkv_aligned_16": True,
        "kv_heads_expanded": False,
        "compiled": False,
        "cuda_graph": False,
        "transform": "none",
        "distributed": "none",
    }


STRIDED = DenseNode(shape=(192, 192), last_dim_contiguous=False)
TRAINED = DenseBias(dtype="float32", shape=(1, 1, 1, 192), requires_grad=True, aligned=False)
STREWN = Strides(last_dim_contiguous=False, packed=False, aligned_16=False, kv_heads_expanded=True)
SURROUNDED = Context(compiled=True, cuda_graph=True, transform="vmap", distributed="dtensor")


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"num_heads_kv": 32}, {"is_gqa": False}),
        ({"num_heads_kv": 1}, {"is_gqa": True}),
        ({"seqlen_kv": 256}, {"seqlens_equal": False, "seqlen_kv_mod_128": 0, "mask_elements": 192 * 256}),
        ({"head_dim_v": 192}, {"head_dims_equal": True}),
        ({"head_dim_v": 256}, {"head_dim_max": 256}),
        (
            {"mask": (TOP_LEFT,)},
            {"causal": True, "only_causal": True, "band_only": True, "alignment": "square"},
        ),
        (
            {"mask": (TOP_LEFT,), "bias": AlibiBias()},
            {"only_causal": False, "alibi": True, "dense_bias": False},
        ),
        ({"mask": (TOP_LEFT, STRIDED)}, {"only_causal": False, "band_only": False, "dense_mask": True}),
        ({"mask": (WindowNode(left=3),)}, {"window": True, "window_right_open": True, "causal": False}),
        ({"mask": (WindowNode(left=3, right=0),)}, {"window_right_open": False, "band_only": True}),
        ({"mask": (WindowNode(left=3), TOP_LEFT)}, {"window_right_open": False, "causal": True}),
        ({"mask": (DocumentsNode(),)}, {"documents": True, "band_only": False}),
        ({"mask": (KeyPaddingNode(),)}, {"key_padding": True, "empty_rows": "unknown"}),
        ({"mask": (PrefixNode(),)}, {"prefix": True, "causal": False}),
        ({"mask": (FunctionNode(),)}, {"function_mask": True, "empty_rows": "unknown"}),
        ({"mask": (STRIDED,)}, {"mask_last_dim_contiguous": False, "mask_has_query_dim": True}),
        (
            {"bias": TRAINED},
            {"mask_aligned": False, "mask_has_query_dim": False, "bias_is_query_dtype": False},
        ),
        (
            {"bias": TRAINED},
            {"dense_bias": True, "bias_requires_grad": True, "only_bias_requires_grad": False},
        ),
        ({"bias": TRAINED, "phase": "training"}, {"only_bias_requires_grad": UNKNOWN}),
        (
            {"bias": TRAINED, "phase": "training", "qkv_requires_grad": True},
            {"only_bias_requires_grad": False},
        ),
        (
            {"bias": TRAINED, "phase": "training", "qkv_requires_grad": False},
            {"only_bias_requires_grad": True},
        ),
        ({"bias": DenseBias(dtype="float32", shape=(192,))}, {"mask_rank_2_or_4": False}),
        ({"bias": FunctionBias()}, {"function_bias": True, "empty_rows": "unknown"}),
        ({"dropout_p": 0.1}, {"dropout_p": 0.1, "dropout_is_sixteenth": False}),
        ({"dropout_p": 0.125}, {"dropout_is_sixteenth": True}),
        (
            {"softcap": 30.0, "sink": True, "return_lse": True},
            {"softcap": 30.0, "sink": True, "return_lse": True},
        ),
        ({"scale": "zero", "deterministic": True}, {"scale": "zero", "deterministic": True}),
        (
            {"strides": STREWN},
            {"qkv_last_dim_contiguous": False, "qkv_packed": False, "kv_heads_expanded": True},
        ),
        ({"strides": STREWN, "layout": "bshd"}, {"qkv_aligned_16": False, "layout": "bshd"}),
        ({"context": SURROUNDED}, {"compiled": True, "cuda_graph": True}),
        ({"context": SURROUNDED}, {"transform": "vmap", "distributed": "dtensor"}),
    ],
)
def test_facts_follow_the_call(changes, facts):
    found = facts_of(SQUARE.with_(**changes))
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize(
    ("seqlen_kv", "nodes", "alignment"),
    [
        (192, (), "none"),
        (192, (KeyPaddingNode(),), "none"),
        (192, (BOTTOM_RIGHT,), "square"),
        (192, (TOP_LEFT, BOTTOM_RIGHT), "square"),
        (256, (TOP_LEFT,), "top_left"),
        (256, (WindowNode(left=1, alignment="bottom_right"),), "bottom_right"),
        (256, (WindowNode(left=1, alignment="bottom_right"), BOTTOM_RIGHT), "bottom_right"),
        (256, (TOP_LEFT, BOTTOM_RIGHT), "mixed"),
    ],
)
def test_alignment(seqlen_kv, nodes, alignment):
    assert alignment_of(SQUARE.with_(seqlen_kv=seqlen_kv, mask=nodes)) == alignment


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_kv"])
def test_a_length_that_varies_makes_everything_vary_that_depends_on_it(name):
    facts = facts_of(SQUARE.with_(mask=(TOP_LEFT,), context=Context(dynamic=(name,))))
    other = {"seqlen_q": "seqlen_kv", "seqlen_kv": "seqlen_q"}[name]
    assert facts[name] == Varies(1)
    assert facts[f"{name}_mod_128"] == facts["seqlens_equal"] == Varies(0)
    assert facts["score_elements"] == Varies(2 * 32 * 192)
    assert facts["mask_elements"] == Varies(192)
    assert (facts[other], facts[f"{other}_mod_128"], facts["batch"]) == (192, 64, 2)
    assert facts["alignment"] == "top_left"


def test_a_batch_that_varies_leaves_the_lengths_alone():
    facts = facts_of(SQUARE.with_(mask=(BOTTOM_RIGHT,), context=Context(dynamic=("batch",))))
    assert (facts["batch"], facts["score_elements"]) == (Varies(1), Varies(32 * 192 * 192))
    assert (facts["alignment"], facts["empty_rows"], facts["seqlens_equal"]) == ("square", "none", True)


def test_unknown_and_varying_values_are_said_in_a_word():
    assert (str(UNKNOWN), str(Varies(3))) == ("unknown", "varies")


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_empty_rows_never_contradict_the_definition(data, batch, seqlen_q, seqlen_kv):
    call = small_call(data.draw(readable_masks(batch, seqlen_q, seqlen_kv)), batch, seqlen_q, seqlen_kv)
    _hold_against(empty_rows_of(call), [row for rows in allowed_of(call) for row in rows])


def _hold_against(said, rows):
    has_empty = not all(any(row) for row in rows)
    assert said != ("none" if has_empty else "some")


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_empty_rows_never_contradict_the_materialised_mask(data, batch, seqlen_q, seqlen_kv):
    mask = data.draw(_objects(batch, seqlen_q, seqlen_kv))
    nodes = mask.describe(Extent(batch, 2, seqlen_q, seqlen_kv))
    dense = mask.materialize(seqlen_q, seqlen_kv, batch=batch, num_heads_q=2)
    call = small_call(_looked_at(nodes, mask), batch, seqlen_q, seqlen_kv)
    _hold_against(empty_rows_of(call), dense.flatten(0, 2))


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


@st.composite
def _objects(draw, batch, seqlen_q, seqlen_kv):
    alignment = st.sampled_from(["top_left", "bottom_right"])
    beside = st.none() | st.integers(0, 6)
    counts = st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)
    shape = st.sampled_from(
        [(seqlen_kv,), (seqlen_q, seqlen_kv), (batch, 2, seqlen_q, seqlen_kv), (batch, 1, 1, 1)]
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    parts = [
        st.builds(masks.Causal, alignment),
        st.builds(masks.Window, beside, beside, alignment),
        st.builds(masks.KeyPadding, lengths=counts),
        st.builds(masks.KeyPadding, left=counts),
        st.builds(masks.KeyPadding, lengths=counts.map(torch.tensor)),
        shape.map(lambda size: masks.Dense(torch.rand(size, generator=generator) < 0.7)),
    ]
    drawn = draw(st.lists(st.one_of(parts), min_size=1, max_size=3))
    return drawn[0] if len(drawn) == 1 else masks.All(tuple(drawn))


@pytest.mark.parametrize(
    ("nodes", "seqlen_kv", "bias", "said"),
    [
        # Each part leaves every query a key, both together do not.
        ((TOP_LEFT, WindowNode(left=0, alignment="bottom_right")), 256, None, "unknown"),
        ((TOP_LEFT,), 192, DenseBias(dtype="float32", shape=(192, 192), empty_rows="none"), "unknown"),
        ((TOP_LEFT, DenseNode(shape=(192, 192), empty_rows="none")), 192, None, "unknown"),
        ((TOP_LEFT, KeyPaddingNode(lengths=(1, 1), side="left")), 192, None, "unknown"),
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


@given(st.data(), st.integers(1, 2), LENGTHS, LENGTHS)
@example(None, 1, 3, 3)
def test_empty_rows_hold_for_every_length_that_may_come(data, batch, seqlen_q, seqlen_kv):
    """A band is the only part whose description stays the same when lengths change."""
    band = st.lists(
        st.one_of(
            st.builds(CausalNode, alignment=st.sampled_from(["top_left", "bottom_right"])),
            st.builds(
                WindowNode,
                left=st.none() | st.integers(0, 3),
                right=st.none() | st.integers(0, 3),
                alignment=st.sampled_from(["top_left", "bottom_right"]),
            ),
        ),
        max_size=2,
    )
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
