"""The fields that rules ask about: all are listed, each is what its description says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import calls

from attnroute.question.call import Call, Context, Strides
from attnroute.question.facts import FACTS, UNKNOWN, Facts, Varies, facts_of
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)

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
    assert [name for name, fact in FACTS.items() if not fact.doc.strip()] == []


def test_the_facts_of_a_plain_call():
    assert facts_of(SQUARE) == {
        "dtype": "bfloat16",
        "batch": 2,
        "batch_heads_q": 2 * 32,
        "batch_heads_kv": 2 * 8,
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "is_gqa": True,
        "seqlen_q": 192,
        "seqlen_kv": 192,
        "seqlens_equal": True,
        "seqlen_q_mod_128": 64,
        "group_queries": 192 * 4,
        "seqlen_kv_mod_128": 64,
        "score_elements": 2 * 32 * 192 * 192,
        "mask_elements": 192 * 192,
        "dq_accumulator_elements": 3145728,
        "query_reach": 192 * 32 * 192,
        "key_reach": 192 * 8 * 192,
        "query_elements": 2 * 192 * 32 * 192,
        "key_elements": 2 * 192 * 8 * 192,
        "mask_tensor_elements": 0,
        "dq_accumulator_elements_wide": 3145728,
        "dq_accumulator_row_elements": 1572864,
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "head_dim_max": 192,
        "head_dims_equal": False,
        "head_dims_power_of_two": False,
        "head_dims_multiple_of_16": True,
        "head_dim_qk_tile_mod_32": 0,
        "dv_store_fits_16": True,
        "dv_store_fits_32": True,
        "fa4_tile_bytes": 90112,
        "head_dims_ratio": 128 / 192,
        "gqa_ratio": 4,
        "gqa_ratio_power_of_two": True,
        "layout": "bhsd",
        "phase": "inference",
        "scale": "positive",
        "masked": False,
        "causal": False,
        "window": False,
        "window_right_open": False,
        "window_looks_ahead": False,
        "documents": False,
        "key_padding": False,
        "left_out_finite": True,
        "prefix": False,
        "combined_mask": False,
        "documents_cross": False,
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
        "bias_is_query_dtype_or_float32": True,
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
        "qkv_tokens_contiguous": True,
        "qkv_aligned_16": True,
        "kv_heads_expanded": False,
        "compiled": False,
        "cuda_graph": False,
        "dispatch_mode": False,
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
        ({"seqlen_q": 129, "head_dim_qk": 72}, {"dq_accumulator_elements": 2 * 32 * 256 * 96}),
        ({"head_dim_qk": 200}, {"dq_accumulator_elements": 2 * 32 * 256 * 256}),
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
        ({"mask": (WindowNode(left=3, right=0),)}, {"window_looks_ahead": False}),
        ({"mask": (WindowNode(left=3, right=1),)}, {"window_looks_ahead": True}),
        ({"mask": (WindowNode(left=3),)}, {"window_looks_ahead": True}),
        ({"mask": (WindowNode(left=3, right=1), TOP_LEFT)}, {"window_looks_ahead": False}),
        ({"mask": (WindowNode(left=9, right=9), WindowNode(left=3, right=0))}, {"window_looks_ahead": False}),
        ({"mask": (WindowNode(left=3), TOP_LEFT)}, {"window_right_open": False, "causal": True}),
        ({"mask": (DocumentsNode(),)}, {"documents": True, "band_only": False}),
        ({"bias": FunctionBias(), "layout": "thd", "batch": 1}, {"masked": False}),
        (
            {"mask": (KeyPaddingNode(),)},
            {"key_padding": True, "left_out_finite": False, "empty_rows": "unknown"},
        ),
        ({"mask": (KeyPaddingNode(finite=True),)}, {"key_padding": True, "left_out_finite": True}),
        ({"mask": (PrefixNode(),)}, {"prefix": True, "causal": False, "alignment": "square"}),
        ({"head_dim_qk": 128}, {"head_dims_power_of_two": True}),
        ({"head_dim_qk": 200}, {"head_dims_multiple_of_16": False}),
        ({"head_dim_v": 72}, {"head_dims_multiple_of_16": False}),
        ({"num_heads_q": 24}, {"gqa_ratio_power_of_two": False}),
        ({"num_heads_q": 0, "num_heads_kv": 0}, {"gqa_ratio_power_of_two": False}),
        (
            {"mask": (AnyNode(parts=((TOP_LEFT, WindowNode(left=1)), (PrefixNode(), KeyPaddingNode()))),)},
            {"combined_mask": True, "causal": False, "window": False, "prefix": False, "key_padding": False},
        ),
        (
            {"mask": (AnyNode(parts=((BOTTOM_RIGHT,), (DocumentsNode(),))),)},
            {"alignment": "none", "documents": False, "band_only": False, "window_right_open": False},
        ),
        # A kernel that evaluates a combination reads its tensors and calls its functions, but is handed none.
        (
            {"mask": (NotNode(part=(AnyNode(parts=((STRIDED,), (TOP_LEFT,))),)),)},
            {"combined_mask": True, "dense_mask": True, "function_mask": False, "mask_has_query_dim": False},
        ),
        (
            {"mask": (NotNode(part=(AnyNode(parts=((STRIDED,), (TOP_LEFT,))),)),)},
            {"mask_last_dim_contiguous": True, "mask_aligned": True, "mask_rank_2_or_4": True},
        ),
        ({"mask": (NotNode(part=(FunctionNode(),)),)}, {"function_mask": True, "dense_mask": False}),
        (
            {"mask": (DocumentsNode(cross=True), TOP_LEFT), "layout": "thd", "batch": 1},
            {"documents_cross": True, "alignment": "top_left", "empty_rows": "unknown", "causal": True},
        ),
        ({"mask": (DocumentsNode(), BOTTOM_RIGHT)}, {"documents_cross": False, "alignment": "square"}),
        ({"mask": (FunctionNode(),)}, {"function_mask": True, "masked": True, "empty_rows": "unknown"}),
        ({"mask": (STRIDED,)}, {"mask_last_dim_contiguous": False, "mask_has_query_dim": True}),
        (
            {"bias": TRAINED},
            {"mask_aligned": False, "mask_has_query_dim": False, "bias_is_query_dtype": False},
        ),
        ({"bias": TRAINED}, {"bias_is_query_dtype_or_float32": True}),
        ({"bias": TRAINED.changed(dtype="float16")}, {"bias_is_query_dtype_or_float32": False}),
        ({"bias": TRAINED.changed(dtype="bfloat16")}, {"bias_is_query_dtype_or_float32": True}),
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
        (
            {"strides": STREWN},
            {"query_reach": 192 * 2 * 48 * 192, "key_reach": 192 * 2 * 48 * 192},
        ),
        (
            {"strides": STREWN, "seqlen_kv": 64, "head_dim_v": 512},
            {"query_elements": 192 * 2 * 48 * 512, "key_elements": 64 * 2 * 48 * 512},
        ),
        ({"mask": (STRIDED,)}, {"mask_tensor_elements": 192 * 192}),
        ({"bias": TRAINED}, {"mask_tensor_elements": 192}),
        (
            {"bias": DenseBias(dtype="float32", shape=(2, 32, 192, 192))},
            {"mask_tensor_elements": 2 * 32 * 192 * 192, "mask_elements": 192 * 192},
        ),
        (
            {"mask": (NotNode(part=(DenseNode(shape=(2, 1, 1, 192)),)), DenseNode(shape=(32, 192, 1)))},
            {"mask_tensor_elements": 2 * 32 * 192 * 192},
        ),
        ({"context": Context(dynamic=("seqlen_kv", "batch"))}, {"key_reach": 192 * 8 * 192}),
        ({"strides": Strides(tokens_contiguous=False)}, {"qkv_tokens_contiguous": False, "qkv_packed": True}),
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
        (256, (PrefixNode(alignment="bottom_right"),), "bottom_right"),
        (256, (PrefixNode(), BOTTOM_RIGHT), "mixed"),
        (256, (NotNode(part=(BOTTOM_RIGHT,)), TOP_LEFT), "top_left"),
        (192, (DocumentsNode(cross=True), BOTTOM_RIGHT), "bottom_right"),
    ],
)
def test_alignment(seqlen_kv, nodes, alignment):
    assert Facts(SQUARE.with_(seqlen_kv=seqlen_kv, mask=nodes))["alignment"] == alignment


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
    assert (facts["batch_heads_q"], facts["batch_heads_kv"]) == (Varies(32), Varies(8))
    assert (facts["alignment"], facts["empty_rows"], facts["seqlens_equal"]) == ("square", "none", True)


def test_unknown_and_varying_values_are_said_in_a_word():
    assert (str(UNKNOWN), str(Varies(3))) == ("unknown", "varies")
