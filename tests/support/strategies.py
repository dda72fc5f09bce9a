"""Strategies shared by the property tests: any valid call, any host that the tables describe."""

from __future__ import annotations

from hypothesis import strategies as st

from attnroute.question.call import Call, Context, Strides
from attnroute.question.host import Host
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
from attnroute.tables.load import load
from attnroute.vocabulary import DTYPES

LENGTHS = (1, 2, 7, 64, 100, 127, 128, 192, 1000, 4096, 100_000)
HEAD_DIMS = (64, 128, 1, 4, 8, 20, 72, 192, 256, 320, 512)
TORCHES = (
    "2.11.0+cu130",
    "2.13.0+cpu",
    "2.5.1",
    "2.7.1+cu126",
    "2.9.0+cu128",
    "2.14.0a0",
    "2.15.0.dev20260922",
)
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
EMPTY_ROWS = st.sampled_from(["none", "some", "unknown"])


def mostly(usual, *others):
    """Return a strategy that draws the first value nine times out of ten.

    A call has a dozen parts that a kernel may refuse: were each drawn evenly, nothing would be eligible.
    """
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(others) if n == 9 else st.just(usual))


TRUE_MOSTLY = mostly(True, False)
FALSE_MOSTLY = mostly(False, True)


@st.composite
def calls(draw):
    """Draw any call that `attention()` takes.

    Sizes are those that rows speak about, so that both sides of a row come up.
    """
    heads_kv = draw(mostly(8, 1, 2, 40_000))
    seqlen_q = draw(mostly(draw(st.sampled_from(LENGTHS)), 0))
    head_dim = draw(mostly(128, *HEAD_DIMS))
    sizes = {
        "batch": draw(mostly(2, 0, 1, 70_000)),
        "num_heads_q": heads_kv * draw(st.sampled_from([1, 4])),
        "num_heads_kv": heads_kv,
        "seqlen_q": seqlen_q,
        "seqlen_kv": draw(st.sampled_from([seqlen_q, 0, *LENGTHS]) | st.just(seqlen_q)),
        "head_dim_qk": head_dim,
        "head_dim_v": draw(mostly(head_dim, *HEAD_DIMS)),
    }
    nodes = st.lists(mask_nodes(sizes["batch"], seqlen_q, sizes["seqlen_kv"]), max_size=2)
    return Call(
        dtype=draw(mostly("bfloat16", *DTYPES)),
        **sizes,
        layout=draw(mostly("bhsd", "bshd", "thd")),
        phase=draw(st.sampled_from(["inference", "training"])),
        mask=tuple(draw(nodes)),
        bias=draw(mostly(None, draw(biases(seqlen_q, sizes["seqlen_kv"])))),
        scale=draw(mostly("positive", "zero", "negative")),
        softcap=draw(mostly(0.0, 30.0)),
        sink=draw(FALSE_MOSTLY),
        dropout_p=draw(mostly(0.0, 0.1, 0.25)),
        deterministic=draw(FALSE_MOSTLY),
        return_lse=draw(FALSE_MOSTLY),
        qkv_requires_grad=draw(st.none() | st.booleans()),
        strides=draw(strides()),
        context=draw(contexts()),
    )


def mask_nodes(batch, seqlen_q, seqlen_kv):
    """Return any node that can be read at these sizes."""
    counts = st.none()
    if batch < 70_000:
        counts |= st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)
    tensor = {
        "shape": st.sampled_from(
            [(seqlen_q, seqlen_kv), (batch, 1, 1, seqlen_kv), (1, 1, seqlen_q, seqlen_kv), (1,)]
        ),
        "requires_grad": FALSE_MOSTLY,
        "last_dim_contiguous": TRUE_MOSTLY,
        "aligned": TRUE_MOSTLY,
        "empty_rows": EMPTY_ROWS,
    }
    beside = st.none() | st.integers(0, seqlen_kv + 2)
    readable = st.one_of(
        st.builds(CausalNode, alignment=ALIGNMENTS),
        st.builds(WindowNode, left=beside, right=beside, alignment=ALIGNMENTS),
        st.builds(
            DocumentsNode,
            lengths=_cut(seqlen_kv),
            contiguous=TRUE_MOSTLY,
            cross=FALSE_MOSTLY if seqlen_q == seqlen_kv else st.just(True),
        ),
        st.builds(KeyPaddingNode, lengths=counts, side=st.sampled_from(["right", "left", "any"])),
        st.builds(PrefixNode, lengths=counts, alignment=ALIGNMENTS),
    )
    recognized = st.none() | st.lists(readable, max_size=2).map(tuple)
    simple = st.one_of(
        readable,
        st.builds(DenseNode, **tensor, recognized=recognized),
        st.builds(
            FunctionNode,
            block_mask_shape=st.sampled_from([None, (seqlen_q, seqlen_kv)]),
            per_batch=st.booleans(),
            per_head=st.booleans(),
        ),
    )
    return st.integers(0, 4).flatmap(lambda n: combined(simple) if n == 4 else simple)


def combined(simple, max_leaves=4):
    """Return disjunctions and negations of nodes, nested, some of no parts at all."""

    def outer(inner):
        part = st.lists(inner, max_size=2).map(tuple)
        either = st.builds(AnyNode, parts=st.lists(part, max_size=3).map(tuple))
        return either | st.builds(NotNode, part=part)

    return outer(st.recursive(simple, outer, max_leaves=max_leaves))


def _cut(seqlen):
    """Return None, or the length cut into up to three documents, empty ones among them."""
    cuts = st.lists(st.integers(0, seqlen), max_size=2).map(sorted)
    lengths = cuts.map(lambda ends: tuple(b - a for a, b in zip([0, *ends], [*ends, seqlen], strict=True)))
    return st.none() | lengths


def biases(seqlen_q, seqlen_kv):
    """Return any bias that can be read at these lengths."""
    dense = st.builds(
        DenseBias,
        dtype=st.sampled_from(DTYPES),
        shape=st.sampled_from([(seqlen_q, seqlen_kv), (1, 1, 1, seqlen_kv), ()]),
        requires_grad=st.booleans(),
        last_dim_contiguous=TRUE_MOSTLY,
        aligned=TRUE_MOSTLY,
        empty_rows=EMPTY_ROWS,
    )
    trains = st.booleans()
    return st.one_of(
        dense, st.builds(AlibiBias, requires_grad=trains), st.builds(FunctionBias, requires_grad=trains)
    )


def strides():
    """Return any way in which query, key and value can lie in memory."""
    return st.builds(
        Strides,
        last_dim_contiguous=TRUE_MOSTLY,
        packed=TRUE_MOSTLY,
        tokens_contiguous=TRUE_MOSTLY,
        aligned_16=TRUE_MOSTLY,
        kv_heads_expanded=FALSE_MOSTLY,
    )


def contexts():
    """Return any surroundings of a call, mostly none."""
    return st.builds(
        Context,
        compiled=FALSE_MOSTLY,
        cuda_graph=FALSE_MOSTLY,
        dispatch_mode=FALSE_MOSTLY,
        shapes_vary=FALSE_MOSTLY,
        dynamic=mostly((), ("batch",), ("seqlen_q",), ("seqlen_q", "seqlen_kv")),
        transform=mostly(None, "double_backward", "forward_ad", "vmap", "export"),
        distributed=mostly(None, "dtensor", "context_parallel"),
    )


@st.composite
def hosts(draw):
    """Draw any host whose architecture the tables describe, with versions that may be missing or strange.

    What compiles FlexAttention is mostly there, so that it can be eligible.
    """
    arch = draw(st.sampled_from(load().arch_names))
    needs = {"c++": "12.2", "avx2": "present"} if arch == "cpu" else {"triton": "3.5.0"}
    versions = {
        "torch": draw(mostly(draw(st.sampled_from(TORCHES)), None, "3.0", "2.4.1")),
        "cuda": draw(mostly("13.0", None, "12.4", "12.8")),
        "cudnn": draw(mostly("9.19.0", None, "8.9.7", "9.1.0.70", "9.10.2.21", "9.26.0")),
        "flash-attn-4": draw(st.sampled_from([None, "4.0.0b11", "4.0.0b36"])),
        **{name: draw(mostly(version, None)) for name, version in needs.items()},
    }
    return Host(
        arch=arch,
        device_name=draw(st.sampled_from(["", "a card"])),
        versions={name: version for name, version in versions.items() if version is not None},
        broken=draw(mostly({}, {"cudnn": "ImportError: libcudnn.so.9"})),
    )


@st.composite
def readable_masks(draw, batch, seqlen_q, seqlen_kv):
    """Draw a conjunction that says everything about who may attend: no tensor, no predicate, all lengths."""
    counts = st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)
    beside = st.none() | st.integers(0, max(seqlen_q, seqlen_kv) + 1)
    kinds = [
        st.builds(CausalNode, alignment=ALIGNMENTS),
        st.builds(WindowNode, left=beside, right=beside, alignment=ALIGNMENTS),
        st.builds(KeyPaddingNode, lengths=counts, side=st.sampled_from(["right", "left"])),
        st.builds(PrefixNode, lengths=counts, alignment=ALIGNMENTS),
    ]
    if seqlen_q == seqlen_kv:
        kinds.append(st.builds(DocumentsNode, lengths=_cut(seqlen_kv).filter(bool), contiguous=st.just(True)))
    simple = st.one_of(kinds)
    return tuple(draw(st.lists(simple | combined(simple), max_size=3)))


def small_call(mask, batch, seqlen_q, seqlen_kv, **rest):
    """Return a call of few heads with this mask."""
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
    return Call(
        dtype="float32",
        num_heads_q=2,
        num_heads_kv=1,
        head_dim_qk=8,
        head_dim_v=8,
        mask=mask,
        **sizes,
        **rest,
    )


def allowed_of(call):
    """Return who may attend whom by definition, as lists of bools: [batch][seqlen_q][seqlen_kv]."""
    rows, columns = range(call.seqlen_q), range(call.seqlen_kv)
    return [
        [[_all_allow(call.mask, call, b, i, j) for j in columns] for i in rows] for b in range(call.batch)
    ]


def _all_allow(nodes, call, b, i, j):
    return all(_allows(node, call, b, i, j) for node in nodes)


def _allows(node, call, b, i, j):
    if isinstance(node, AnyNode):
        return any(_all_allow(part, call, b, i, j) for part in node.parts)
    if isinstance(node, NotNode):
        return not _all_allow(node.part, call, b, i, j)
    distance = j - i
    if getattr(node, "alignment", "") == "bottom_right":
        distance -= call.seqlen_kv - call.seqlen_q
    if isinstance(node, CausalNode):
        return distance <= 0
    if isinstance(node, WindowNode):
        return (node.left is None or distance >= -node.left) and (
            node.right is None or distance <= node.right
        )
    if isinstance(node, KeyPaddingNode):
        return j < node.lengths[b] if node.side == "right" else j >= call.seqlen_kv - node.lengths[b]
    if isinstance(node, PrefixNode):
        return distance <= 0 or j < node.lengths[b]
    ids = [n for n, length in enumerate(node.lengths) for _ in range(length)]
    return ids[i] == ids[j]
