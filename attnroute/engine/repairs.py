"""Preparations as changes of a `Call`: what the call is after each, and how many bytes the change takes.

The executor side of each stands in `attnroute.executors._repairs`. None changes the mathematical result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attnroute.call import (
    Call,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    PrefixNode,
    Strides,
    WindowNode,
)
from attnroute.facts import empty_rows_of
from attnroute.masks.normalize import recognized
from attnroute.vocabulary import DTYPE_BYTES, GRID_LIMIT, HEAD_DIM_MULTIPLE, EmptyRows, Repair

Change = tuple[Call, int]


def apply(repair: Repair, call: Call) -> Change | None:
    """Return the call after one preparation and its extra bytes, or None when it cannot be made."""
    return _CHANGES[repair](call)


def _recognize(call: Call) -> Change | None:
    changed = recognized(call)
    return None if changed is None else (changed, 0)


def _to_varlen(call: Call) -> Change | None:
    """Documents side by side become separate sequences of one ragged batch."""
    documents = [n for n in call.mask if isinstance(n, DocumentsNode)]
    band = tuple(n for n in call.mask if isinstance(n, CausalNode | WindowNode))
    square = call.seqlen_q == call.seqlen_kv and not call.context.dynamic
    fits = len(documents) == 1 and len(band) + 1 == len(call.mask) and call.bias is None
    if not (fits and square and documents[0].contiguous):
        return None
    tokens = 0 if call.layout == "bshd" else call.batch * call.seqlen_q
    size = tokens * (call.num_heads_q + call.num_heads_kv) * (call.head_dim_qk + call.head_dim_v)
    return call.with_(mask=band, layout="thd"), size * DTYPE_BYTES[call.dtype]


def _expand_kv(call: Call) -> Change | None:
    if call.num_heads_kv == call.num_heads_q and not call.strides.kv_heads_expanded:
        return None
    size = call.batch * call.num_heads_q * call.seqlen_kv * (call.head_dim_qk + call.head_dim_v)
    strides = call.strides.model_copy(update={"kv_heads_expanded": False})
    return call.with_(num_heads_kv=call.num_heads_q, strides=strides), size * DTYPE_BYTES[call.dtype]


def _pad_head_dim(call: Call) -> Change | None:
    qk, v = _round_up(call.head_dim_qk), _round_up(call.head_dim_v)
    if (qk, v) == (call.head_dim_qk, call.head_dim_v):
        return None
    query = call.batch * call.num_heads_q * call.seqlen_q * (qk + v)
    keys = call.batch * call.num_heads_kv * call.seqlen_kv * (qk + v)
    # Only what is padded is copied, so the strides are those of a copy only where both are.
    both = qk != call.head_dim_qk and v != call.head_dim_v
    changed = call.with_(head_dim_qk=qk, head_dim_v=v, strides=Strides() if both else call.strides)
    return changed, (query + keys) * DTYPE_BYTES[call.dtype]


def _contiguous(call: Call) -> Change | None:
    # A tensor whose rows are whole and aligned is left alone, gaps between them and shared heads included.
    strides = call.strides.model_copy(update={"last_dim_contiguous": True, "aligned_16": True})
    if call.strides == strides:
        return None
    query = call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_qk
    keys = call.batch * call.num_heads_kv * call.seqlen_kv * (call.head_dim_qk + call.head_dim_v)
    return call.with_(strides=strides), (query + keys) * DTYPE_BYTES[call.dtype]


def _materialize(call: Call) -> Change | None:
    if any(isinstance(n, FunctionNode) for n in call.mask) or call.context.dynamic:
        return None
    if all(isinstance(n, DenseNode) for n in call.mask):
        return None
    per_row = any(isinstance(n, KeyPaddingNode | PrefixNode) for n in call.mask)
    one_row = all(isinstance(n, DenseNode | KeyPaddingNode) for n in call.mask)
    shape = [call.batch if per_row else 1, 1, 1 if one_row else call.seqlen_q, call.seqlen_kv]
    for node in call.mask:
        if isinstance(node, DenseNode):
            shape = broadcast(shape, node.shape)
    node = DenseNode(shape=tuple(shape), empty_rows=_empty(call.with_(bias=None)))
    return call.with_(mask=(node,)), _product(shape)


def _cast_mask(call: Call) -> Change | None:
    masks = [n for n in call.mask if isinstance(n, DenseNode)]
    if not masks or (call.bias is not None and not isinstance(call.bias, DenseBias)):
        return None
    shape: list[int] = []
    for node in masks:
        shape = broadcast(shape, node.shape)
    if call.bias is not None:
        shape = broadcast(shape, call.bias.shape)
    bias = DenseBias(
        dtype=call.dtype,
        shape=tuple(shape),
        requires_grad=call.bias is not None and call.bias.requires_grad,
        empty_rows=_empty(call),
    )
    rest = tuple(n for n in call.mask if not isinstance(n, DenseNode))
    return call.with_(mask=rest, bias=bias), _product(shape) * DTYPE_BYTES[call.dtype]


def _cast_bias(call: Call) -> Change | None:
    return _rewrite_bias(call, dtype=call.dtype, aligned=True, last_dim_contiguous=True)


def _align_bias(call: Call) -> Change | None:
    return _rewrite_bias(call, aligned=True, last_dim_contiguous=True)


def _rewrite_bias(call: Call, **changes: object) -> Change | None:
    if not isinstance(call.bias, DenseBias):
        return None
    bias = DenseBias.model_validate({**call.bias.__dict__, **changes})
    if bias == call.bias:
        return None
    return call.with_(bias=bias), _product(bias.shape) * DTYPE_BYTES[bias.dtype]


def _zero_empty_rows(call: Call) -> Change | None:
    settled = {"empty_rows": "none"}
    mask = tuple(n.model_copy(update=settled) if isinstance(n, DenseNode) else n for n in call.mask)
    bias = call.bias.model_copy(update=settled) if isinstance(call.bias, DenseBias) else call.bias
    changed = call.with_(mask=mask, bias=bias)
    if changed == call:
        return None
    output = call.batch * call.num_heads_q * call.seqlen_q * call.head_dim_v
    return changed, output * DTYPE_BYTES[call.dtype]


def _split_batch(call: Call) -> Change | None:
    return None if call.batch <= GRID_LIMIT else (call.with_(batch=GRID_LIMIT), _output_bytes(call))


def _split_heads(call: Call) -> Change | None:
    if call.num_heads_q <= GRID_LIMIT:
        return None
    group = call.num_heads_q // call.num_heads_kv
    if group > GRID_LIMIT:
        return None
    kv = GRID_LIMIT // group
    return call.with_(num_heads_q=kv * group, num_heads_kv=kv), _output_bytes(call)


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
    "to_varlen": _to_varlen,
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
