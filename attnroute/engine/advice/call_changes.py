"""Single changes of a call: those that are worth a hint, and all others, the smallest of each kind first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from attnroute.engine.decision import Hint
from attnroute.question.call import Call, Context, Strides
from attnroute.question.line import render
from attnroute.question.nodes import (
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    PrefixNode,
    WindowNode,
    nested,
)

_LENGTH_MULTIPLE: Final = 128
_HEAD_DIM_MULTIPLE: Final = 8
_HEAD_DIMS: Final = (256, 128, 64)
_DTYPES: Final = ("bfloat16", "float16", "float32")
_DOUBLINGS: Final = 8
"""A count is tried at up to so many times two, and at as many halves."""

Family = Iterable[Call]
"""One kind of change, the smallest first; who wants the smallest stops at the first that does."""


def hinted(call: Call) -> Iterator[tuple[Hint, Call]]:
    """Give the changes that a caller may make without asking for something else, or nearly so."""
    if any(isinstance(n, DenseNode) and n.recognized is None for n in call.mask):
        rest = tuple(n for n in call.mask if not isinstance(n, DenseNode))
        yield _hint("mask_object", "causal"), call.changed(mask=(*rest, CausalNode()))
    finite = tuple(_finite(node) for node in call.mask)
    if finite != call.mask:
        yield _hint("finite", "finite = true of the key padding"), call.changed(mask=finite)
    if call.dropout_p > 0:
        yield _hint("dropout", "dropout_p = 0"), call.changed(dropout_p=0.0)
    if call.deterministic:
        yield _hint("deterministic", "deterministic = false"), call.changed(deterministic=False)
    if (padded := _padded(call)) is not None:
        yield _hint("pad_seqlen", f"seqlen = {padded.seqlen_kv}"), padded


def families(call: Call) -> Iterator[Family]:
    """Give every single change that is tried, those of how it is called before those of what it computes."""
    yield from ([changed] for changed in _surroundings(call))
    yield from ([changed] for changed in _features(call))
    yield from ([changed] for changed in _masks(call))
    yield from _sizes(call)
    for dtype in _DTYPES:
        if dtype != call.dtype:
            yield [call.changed(dtype=dtype)]


def in_words(before: Call, after: Call) -> str:
    """Say a change by the words of the call line: "d128 in place of d512", "without dropout=0.1"."""
    old, new = render(before).split(), render(after).split()
    gone = " ".join(word for word in old if word not in new)
    come = " ".join(word for word in new if word not in old)
    if not come:
        return f"without {gone}"
    return f"{come} in place of {gone}" if gone else f"with {come}"


def _hint(kind: str, change: str) -> Hint:
    return Hint.model_validate({"kind": kind, "change": change, "selects": ""})


def _surroundings(call: Call) -> Iterator[Call]:
    if call.strides != Strides():
        yield call.changed(strides=Strides())
    if call.layout in ("bhsd", "bshd"):
        yield call.changed(layout="bshd" if call.layout == "bhsd" else "bhsd")
    for name, value in Context():
        if getattr(call.context, name) != value:
            yield call.changed(context=call.context.changed(**{name: value}))
    if not call.context.compiled:
        yield call.changed(context=call.context.changed(compiled=True))


def _features(call: Call) -> Iterator[Call]:
    plain = {"return_lse": False, "deterministic": False, "dropout_p": 0.0, "softcap": 0.0, "sink": False}
    for name, value in {**plain, "scale": "positive", "bias": None, "phase": "inference"}.items():
        if getattr(call, name) != value:
            yield call.changed(**{name: value})
    if call.bias is not None and call.bias.requires_grad:
        yield call.changed(bias=call.bias.changed(requires_grad=False))


def _masks(call: Call) -> Iterator[Call]:
    for at, node in enumerate(call.mask):
        for instead in _instead_of(node, call):
            yield call.changed(mask=(*call.mask[:at], *instead, *call.mask[at + 1 :]))


def _instead_of(node: MaskNode, call: Call) -> Iterator[tuple[MaskNode, ...]]:
    if _finite(node) != node:
        yield (_finite(node),)
    if isinstance(node, DocumentsNode) and not node.contiguous:
        yield (node.changed(contiguous=True),)
    if isinstance(node, CausalNode | WindowNode | PrefixNode) and call.seqlen_q != call.seqlen_kv:
        corner = "top_left" if node.alignment == "bottom_right" else "bottom_right"
        yield (node.changed(alignment=corner),)
    if isinstance(node, DenseNode) and node.recognized is None:
        yield (CausalNode(),)
    if not (isinstance(node, DocumentsNode) and call.layout == "thd"):
        yield ()


def _sizes(call: Call) -> Iterator[Family]:
    wide = max(call.head_dim_qk, call.head_dim_v)
    if call.head_dim_qk != call.head_dim_v:
        yield [call.changed(head_dim_qk=wide, head_dim_v=wide)]
    padded = -(-wide // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    narrower = [size for size in _HEAD_DIMS if size < wide]
    yield [call.changed(head_dim_qk=d, head_dim_v=d) for d in (*([padded] * (padded != wide)), *narrower)]
    if call.num_heads_kv != call.num_heads_q:
        yield [call.changed(num_heads_kv=call.num_heads_q)]
    if (longer := _padded(call)) is not None:
        yield [longer]
    if not _is_of_one_length(call) and not any(_has_lengths(node) for node in call.mask):
        yield [_with_lengths(call, call.seqlen_kv << by) for by in range(1, _DOUBLINGS)]
        yield [
            _with_lengths(call, call.seqlen_kv >> by) for by in range(1, _DOUBLINGS) if call.seqlen_kv >> by
        ]
        yield [call.changed(batch=call.batch << by) for by in range(1, _DOUBLINGS)]


def _with_lengths(call: Call, length: int) -> Call:
    queries = length if call.seqlen_q == call.seqlen_kv else min(call.seqlen_q, length)
    return call.changed(seqlen_q=queries, seqlen_kv=length)


def _padded(call: Call) -> Call | None:
    """Return the call with both lengths padded to a multiple of 128, None where they are or cannot be."""
    padded = -(-call.seqlen_kv // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    if padded == call.seqlen_kv or call.seqlen_q != call.seqlen_kv or _is_of_one_length(call):
        return None
    mask = tuple(_with_padding(n, padded - call.seqlen_kv) for n in call.mask)
    return call.changed(seqlen_q=padded, seqlen_kv=padded, mask=mask)


def _is_of_one_length(call: Call) -> bool:
    """Whether something belongs to the length as it is: a tensor, blocks, documents in a combination."""
    inside = [n for node in call.mask for n in nested((node,)) if n is not node]
    return (
        call.bias is not None
        or any(isinstance(n, DocumentsNode) for n in inside)
        or any(isinstance(n, DenseNode) or _has_blocks(n) for n in (*call.mask, *inside))
    )


def _has_blocks(node: MaskNode) -> bool:
    return isinstance(node, FunctionNode) and node.block_mask_shape is not None


def _has_lengths(node: MaskNode) -> bool:
    return isinstance(node, DocumentsNode | KeyPaddingNode | PrefixNode) and node.lengths is not None


def _finite(node: MaskNode) -> MaskNode:
    """Say that what padding leaves out holds no NaN and no infinity."""
    return node.changed(finite=True) if isinstance(node, KeyPaddingNode) else node


def _with_padding(node: MaskNode, tokens: int) -> MaskNode:
    """Give padding a document of its own."""
    if not isinstance(node, DocumentsNode) or node.lengths is None:
        return node
    return node.changed(lengths=(*node.lengths, tokens))
