"""Arbitrary calls for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from attnroute.question.call import Call, Context, Strides
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
from attnroute.vocabulary import DTYPES

ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
COUNTS = st.integers(0, 2**40)
LENGTHS = st.none() | st.lists(COUNTS, max_size=4).map(tuple)
SHAPES = st.lists(COUNTS, max_size=5).map(tuple)
CAUSAL = st.builds(CausalNode, alignment=ALIGNMENTS)
TENSOR = {
    "shape": SHAPES,
    "requires_grad": st.booleans(),
    "last_dim_contiguous": st.booleans(),
    "aligned": st.booleans(),
    "empty_rows": st.sampled_from(["none", "some", "unknown"]),
}
RECOGNIZED = st.one_of(
    CAUSAL,
    st.builds(WindowNode, left=st.none() | COUNTS, right=st.none() | COUNTS, alignment=ALIGNMENTS),
    st.builds(DocumentsNode, lengths=LENGTHS, contiguous=st.booleans(), cross=st.booleans()),
    st.builds(KeyPaddingNode, lengths=LENGTHS, side=st.sampled_from(["right", "left", "any"])),
    st.builds(PrefixNode, lengths=LENGTHS, alignment=ALIGNMENTS),
)
SIMPLE = st.one_of(
    RECOGNIZED,
    st.builds(DenseNode, **TENSOR, recognized=st.none() | st.lists(RECOGNIZED, max_size=3).map(tuple)),
    st.builds(
        FunctionNode,
        block_mask_shape=st.none() | SHAPES,
        per_batch=st.booleans(),
        per_head=st.booleans(),
    ),
)


def _combined(inner):
    parts = st.lists(inner, max_size=3).map(tuple)
    either = st.builds(AnyNode, parts=st.lists(parts, max_size=3).map(tuple))
    return either | st.builds(NotNode, part=parts)


NODES = st.recursive(SIMPLE, _combined, max_leaves=4)
BIASES = st.one_of(
    st.none(),
    st.builds(AlibiBias, requires_grad=st.booleans()),
    st.builds(FunctionBias, requires_grad=st.booleans()),
    st.builds(DenseBias, dtype=st.sampled_from(DTYPES), **TENSOR),
)
CONTEXTS = st.builds(
    Context,
    compiled=st.booleans(),
    cuda_graph=st.booleans(),
    dispatch_mode=st.booleans(),
    shapes_vary=st.booleans(),
    dynamic=st.lists(st.sampled_from(["batch", "seqlen_q", "seqlen_kv"]), max_size=3).map(tuple),
    transform=st.sampled_from([None, "double_backward", "forward_ad", "vmap", "export"]),
    distributed=st.sampled_from([None, "dtensor", "context_parallel"]),
)
FIELDS = {
    "dtype": st.sampled_from(DTYPES),
    "batch": COUNTS,
    "seqlen_q": COUNTS,
    "seqlen_kv": COUNTS,
    "head_dim_qk": st.integers(1, 2**20),
    "head_dim_v": st.integers(1, 2**20),
    "layout": st.sampled_from(["bhsd", "bshd", "thd"]),
    "phase": st.sampled_from(["inference", "training"]),
    "mask": st.lists(NODES, max_size=4).map(tuple),
    "bias": BIASES,
    "scale": st.sampled_from(["positive", "zero", "negative"]),
    "softcap": st.just(0.0) | st.floats(2.0**-126, 2.0**127),
    "sink": st.booleans(),
    "dropout_p": st.floats(0.0, 1.0, exclude_max=True),
    "deterministic": st.booleans(),
    "return_lse": st.booleans(),
    "qkv_requires_grad": st.sampled_from([None, True, False]),
    "strides": st.builds(Strides, **{name: st.booleans() for name in Strides.model_fields}),
    "context": CONTEXTS,
}


@st.composite
def calls(draw):
    """Draw a valid call: everything that a `Call` can say."""
    heads_kv = draw(st.integers(0, 64))
    return Call(
        num_heads_q=heads_kv * draw(st.integers(1, 16)),
        num_heads_kv=heads_kv,
        **draw(st.fixed_dictionaries(FIELDS)),
    )
