"""Applies preparations to a `Call`: what the call is after each, and how many bytes the change takes.

The executor side of each stands in `attnroute.executors.prepare.apply`. None changes the mathematical result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attnroute.question.call import Call, Strides
from attnroute.question.facts.empty import empty_rows_of
from attnroute.question.facts.masks import alignment, key_padding
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import normalize, recognized
from attnroute.vocabulary import DTYPE_BYTES, GRID_LIMIT, HEAD_DIM_MULTIPLE, EmptyRows, Repair

Change = tuple[Call, int]

_REMADE = (CausalNode, WindowNode, DocumentsNode, KeyPaddingNode)
"""Masks that a kernel and chunked read in the same form."""

SMALL_BIAS: Final = 2**24
"""Elements of an ALiBi term up to which it is built: 64 MiB in float32, where chunked takes two to five times
as long on the CPU (`benchmarks/alibi_cpu.py`)."""

SUMS_LIMIT: Final = 2**31 - 1
"""Tokens: prefix sums of ragged batches are int32."""


def apply(repair: Repair, call: Call) -> Change | None:
    """Return the call after one preparation and its extra bytes, or None when it cannot be made."""
    return _CHANGES[repair](call)


def _recognize(call: Call) -> Change | None:
    changed = recognized(call)
    return None if changed is None else (changed, 0)


def _clear_left_out(call: Call) -> Change | None:
    """Keys and values that padding leaves out become zeros, in copies."""
    if all(n.finite for n in call.mask if isinstance(n, KeyPaddingNode)):
        return None
    mask = tuple(n.changed(finite=True) if isinstance(n, KeyPaddingNode) else n for n in call.mask)
    size = call.batch * call.num_heads_kv * call.seqlen_kv * (call.head_dim_qk + call.head_dim_v)
    return call.changed(mask=mask), size * DTYPE_BYTES[call.dtype]


def _to_varlen(call: Call) -> Change | None:
    """Documents, or padded rows without their padding, become the sequences of one ragged batch."""
    band = tuple(n for n in call.mask if isinstance(n, CausalNode | WindowNode))
    others = [n for n in call.mask if not isinstance(n, CausalNode | WindowNode)]
    if len(others) != 1 or call.bias is not None or call.context.dynamic:
        return None
    node = others[0]
    if isinstance(node, DocumentsNode):
        sequences = _documents(node, call)
    else:
        sequences = _padded_rows(node, call) if isinstance(node, KeyPaddingNode) else None
    tokens = call.batch * max(call.seqlen_q, call.seqlen_kv)
    if not sequences or sequences > GRID_LIMIT or tokens > SUMS_LIMIT:
        return None
    in_place = isinstance(node, KeyPaddingNode) and call.phase == "inference"
    return call.changed(mask=band, layout="thd"), _token_bytes(call, in_place=in_place)


def _documents(node: DocumentsNode, call: Call) -> int | None:
    """Return the number of sequences, as far as it is known, where each document can be one."""
    at_the_end = alignment(call) in ("none", "bottom_right")
    fits = at_the_end if node.cross else call.seqlen_q == call.seqlen_kv
    if not (fits and node.contiguous):
        return None
    count = node.count if node.lengths is None else len(node.lengths)
    return call.batch * (1 if count is None else count)


def _padded_rows(node: KeyPaddingNode, call: Call) -> int | None:
    """Return the number of sequences where each row can be two, of which one has the padding and no query.

    Padding at the left keeps the diagonal that ends with the last query and key. Padding at the right moves
    it, and the queries beside the padding would need keys that belong to other queries' sequence.
    """
    alignments = {"right": ("none",), "left": ("none", "square", "bottom_right"), "any": ()}
    return 2 * call.batch if alignment(call) in alignments[node.side] else None


def _token_bytes(call: Call, *, in_place: bool) -> int:
    """Tokens side by side in one row, or with the heads of each together, need no copy.

    Nor do keys of padded rows where no gradient is written to those that are left out: kernels read them
    where they lie (`attnroute/executors/ragged.py`), and one that cannot has a row that says so.
    """
    if call.layout != "bhsd" or call.batch == 1 or call.strides.tokens_contiguous:
        return 0
    queries, keys = call.seqlen_q * call.num_heads_q, call.seqlen_kv * call.num_heads_kv
    if in_place:
        size = 0 if call.seqlen_q == 1 else call.batch * queries * call.head_dim_qk
    else:
        size = call.batch * (queries + keys) * (call.head_dim_qk + call.head_dim_v)
    return size * DTYPE_BYTES[call.dtype]


def _from_varlen(call: Call) -> Change | None:
    """A ragged batch is one row of documents, of unknown lengths where nobody described them."""
    if call.layout != "thd":
        return None
    documents = any(isinstance(n, DocumentsNode) for n in call.mask)
    undescribed = () if documents else (DocumentsNode.unchecked(cross=call.seqlen_q != call.seqlen_kv),)
    return normalize(call.changed(layout="bshd", mask=(*undescribed, *call.mask))), 0


def _sink_from_lse(call: Call) -> Change | None:
    """A sink rescales the output by what it adds to the log-sum-exp."""
    if not call.sink:
        return None
    output = call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_v
    return call.changed(sink=False, return_lse=True), output * DTYPE_BYTES[call.dtype]


def _backward_from_chunked(call: Call) -> Change | None:
    """Run as without gradients, and go back by chunked from the log-sum-exp, which is kept.

    Not with dropout, whose weights are not made again; nor with tensors that the forward would be handed in
    other forms than the scores are made of, or that train.
    """
    bias, transform = call.bias, call.context.transform
    plain_bias = bias is None or (isinstance(bias, AlibiBias) and not bias.requires_grad)
    plain_mask = all(isinstance(n, _REMADE) for n in call.mask)
    if call.phase != "training" or call.dropout_p > 0 or transform or not (plain_bias and plain_mask):
        return None
    size = 4 * call.batch * call.num_heads_q * call.seqlen_q
    return call.changed(phase="inference", return_lse=True, qkv_requires_grad=None), size


def _expand_kv(call: Call) -> Change | None:
    if call.num_heads_kv == call.num_heads_q and not call.strides.kv_heads_expanded:
        return None
    size = call.batch * call.num_heads_q * call.seqlen_kv * (call.head_dim_qk + call.head_dim_v)
    strides = _heads_outermost(call, call.strides.changed(kv_heads_expanded=False))
    return call.changed(num_heads_kv=call.num_heads_q, strides=strides), size * DTYPE_BYTES[call.dtype]


def _pad_head_dim(call: Call) -> Change | None:
    qk, v = _round_up(call.head_dim_qk), _round_up(call.head_dim_v)
    if (qk, v) == (call.head_dim_qk, call.head_dim_v):
        return None
    query = call.batch * call.num_heads_q * call.seqlen_q * (qk + v)
    keys = call.batch * call.num_heads_kv * call.seqlen_kv * (qk + v)
    # Only what is padded is copied, so the strides are those of a copy only where both are.
    both = qk != call.head_dim_qk and v != call.head_dim_v
    strides = _heads_outermost(call, Strides() if both else call.strides)
    changed = call.changed(head_dim_qk=qk, head_dim_v=v, strides=strides)
    return changed, (query + keys) * DTYPE_BYTES[call.dtype]


def _heads_outermost(call: Call, strides: Strides) -> Strides:
    """A copy has its heads outermost, whose tokens a ragged batch takes as they lie."""
    return strides.changed(tokens_contiguous=False) if call.layout == "thd" else strides


def _contiguous(call: Call) -> Change | None:
    # A tensor whose rows are whole and aligned is left alone, gaps between them and shared heads included.
    # Of a ragged batch, and of padded rows that become one, it makes the tokens follow each other as well.
    of_tokens = {"tokens_contiguous": True, "packed": True, "kv_heads_expanded": False}
    whole = of_tokens if call.layout == "thd" or key_padding(call) else {}
    strides = call.strides.changed(last_dim_contiguous=True, aligned_16=True, **whole)
    if call.strides == strides:
        return None
    query = call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_qk
    keys = call.batch * call.num_heads_kv * call.seqlen_kv * (call.head_dim_qk + call.head_dim_v)
    return call.changed(strides=strides), (query + keys) * DTYPE_BYTES[call.dtype]


def _materialize(call: Call) -> Change | None:
    if call.context.dynamic or all(isinstance(n, DenseNode) for n in call.mask):
        return None
    shape = _mask_shape(call.mask, call)
    node = DenseNode.unchecked(shape=tuple(shape), empty_rows=_empty(call.changed(bias=None)))
    return call.changed(mask=(node,)), _product(shape)


def _materialize_alibi(call: Call) -> Change | None:
    """The term as a tensor, where it is small, exact in the query's dtype, and needs no gradient."""
    alibi = call.bias
    if not isinstance(alibi, AlibiBias) or alibi.requires_grad or call.context.dynamic:
        return None
    crosses = any(isinstance(n, DocumentsNode) and n.cross for n in call.mask)
    if crosses or call.dtype not in ("float32", "float64"):
        return None
    shape = (call.batch if alibi.per_batch else 1, call.num_heads_q, call.seqlen_q, call.seqlen_kv)
    size = _product(shape)
    if size > SMALL_BIAS:
        return None
    bias = DenseBias.unchecked(dtype=call.dtype, shape=shape, empty_rows="none")
    return call.changed(bias=bias), size * DTYPE_BYTES[call.dtype]


def _mask_shape(nodes: tuple[MaskNode, ...], call: Call) -> list[int]:
    """Return the smallest shape of a conjunction: key padding has one row for all queries."""
    shape = [1, 1, 1, call.seqlen_kv]
    for node in nodes:
        shape = broadcast(shape, _node_shape(node, call))
    return shape


def _node_shape(node: MaskNode, call: Call) -> tuple[int, ...]:
    if isinstance(node, DenseNode):
        return node.shape
    if isinstance(node, AnyNode | NotNode):
        parts = node.parts if isinstance(node, AnyNode) else (node.part,)
        shape = [1, 1, 1, call.seqlen_kv]
        for part in parts:
            shape = broadcast(shape, tuple(_mask_shape(part, call)))
        return tuple(shape)
    per_batch = isinstance(node, KeyPaddingNode | PrefixNode)
    per_head = False
    if isinstance(node, FunctionNode):
        per_batch, per_head = node.per_batch, node.per_head
    queries = 1 if isinstance(node, KeyPaddingNode) else call.seqlen_q
    return (call.batch if per_batch else 1, call.num_heads_q if per_head else 1, queries, call.seqlen_kv)


def _cast_mask(call: Call) -> Change | None:
    masks = [n for n in call.mask if isinstance(n, DenseNode)]
    if not masks or (call.bias is not None and not isinstance(call.bias, DenseBias)):
        return None
    shape: list[int] = []
    for node in masks:
        shape = broadcast(shape, node.shape)
    if call.bias is not None:
        shape = broadcast(shape, call.bias.shape)
    bias = DenseBias.unchecked(
        dtype=call.dtype,
        shape=tuple(shape),
        requires_grad=call.bias is not None and call.bias.requires_grad,
        aligned=_aligns(call),
        empty_rows=_empty(call),
    )
    rest = tuple(n for n in call.mask if not isinstance(n, DenseNode))
    return call.changed(mask=rest, bias=bias), _product(shape) * DTYPE_BYTES[call.dtype]


def _aligns(call: Call) -> bool:
    """Return whether a copy has aligned rows: with an open length the padding that they need is not known."""
    return "seqlen_kv" not in call.context.dynamic


def _cast_bias(call: Call) -> Change | None:
    return _rewrite_bias(call, dtype=call.dtype, aligned=_aligns(call), last_dim_contiguous=True)


def _align_bias(call: Call) -> Change | None:
    aligned = _aligns(call) or (call.bias is not None and getattr(call.bias, "aligned", False))
    return _rewrite_bias(call, aligned=aligned, last_dim_contiguous=True)


def _rewrite_bias(call: Call, **changes: object) -> Change | None:
    if not isinstance(call.bias, DenseBias):
        return None
    bias = call.bias.changed(**changes)
    if bias == call.bias:
        return None
    return call.changed(bias=bias), _product(bias.shape) * DTYPE_BYTES[bias.dtype]


def _zero_empty_rows(call: Call) -> Change | None:
    mask = tuple(n.changed(empty_rows="none") if isinstance(n, DenseNode) else n for n in call.mask)
    bias = call.bias.changed(empty_rows="none") if isinstance(call.bias, DenseBias) else call.bias
    changed = call.changed(mask=mask, bias=bias)
    if changed == call:
        return None
    output = call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_v
    return changed, output * DTYPE_BYTES[call.dtype]


def _split_batch(call: Call) -> Change | None:
    return None if call.batch <= GRID_LIMIT else (call.changed(batch=GRID_LIMIT), _output_bytes(call))


def _split_heads(call: Call) -> Change | None:
    if call.num_heads_q <= GRID_LIMIT:
        return None
    group = call.num_heads_q // call.num_heads_kv
    if group > GRID_LIMIT:
        return None
    kv = GRID_LIMIT // group
    return call.changed(num_heads_q=kv * group, num_heads_kv=kv), _output_bytes(call)


def _output_bytes(call: Call) -> int:
    return call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_v * DTYPE_BYTES[call.dtype]


def _empty(call: Call) -> EmptyRows:
    state = empty_rows_of(call)
    return "none" if state == "none" else "some" if state == "some" else "unknown"


def broadcast(left: list[int], right: tuple[int, ...]) -> list[int]:
    """Return the broadcast of two shapes that are known to fit."""
    size = max(len(left), len(right))
    padded = [1] * (size - len(left)) + left, [1] * (size - len(right)) + list(right)
    return [b if a == 1 else a for a, b in zip(*padded, strict=True)]


def _round_up(value: int) -> int:
    return -(-value // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def _product(shape: tuple[int, ...] | list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


_CHANGES: Final[dict[Repair, Callable[[Call], Change | None]]] = {
    "recognize_mask": _recognize,
    "clear_left_out": _clear_left_out,
    "from_varlen": _from_varlen,
    "to_varlen": _to_varlen,
    "backward_from_chunked": _backward_from_chunked,
    "sink_from_lse": _sink_from_lse,
    "materialize_alibi": _materialize_alibi,
    "materialize_mask": _materialize,
    "expand_kv": _expand_kv,
    "pad_head_dim": _pad_head_dim,
    "contiguous": _contiguous,
    "cast_mask": _cast_mask,
    "cast_bias": _cast_bias,
    "align_bias": _align_bias,
    "zero_empty_rows": _zero_empty_rows,
    "split_batch": _split_batch,
    "split_heads": _split_heads,
}
ORDER: Final[tuple[Repair, ...]] = tuple(_CHANGES)
"""The order in which preparations are tried and made."""
