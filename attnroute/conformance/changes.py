"""Changes one thing about a call, so that a condition of a row says something else about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from attnroute.errors import ArgumentError
from attnroute.question import fits
from attnroute.question.call import Call
from attnroute.question.facts import FACTS, Facts
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
    MaskNode,
    PrefixNode,
    WindowNode,
)
from attnroute.tables.conditions import Spec, parse

Changes = dict[str, Any]
"""Fields of a call by name, with their new values."""
_STEP: Final = 8
"""Head dims and strides count in pieces of so many elements."""
_PLACES: Final = {"batch": 4, "num_heads_q": 3, "seqlen_q": 2, "seqlen_kv": 1}
"""Which dimension of a mask a size is, counted from the last."""


def neighbours(call: Call, conditions: Iterable[tuple[str, Spec]]) -> Iterator[Call]:
    """Give calls that differ from one in what conditions ask about, the smallest differences first."""
    for field, spec in conditions:
        for value in _values(field, spec, call):
            yield from changed(call, field, value)


def changed(call: Call, field: str, value: Any) -> Iterator[Call]:
    """Give calls of which a fact is a value, or nearly; none where nobody knows how to make one."""
    change = _CHANGES.get(field)
    found = change(call, value) if change is not None else [{field: value}] if field in _FIELDS else []
    for fields in found:
        made = made_of(call, fields)
        if made is not None and made != call:
            yield made


def _values(field: str, spec: Spec, call: Call) -> list[Any]:
    """Return the values on both sides of a condition, those at its edge first."""
    fact = FACTS[field]
    if fact.kind == "bool":
        return [True, False]
    if fact.kind == "word":
        return list(fact.words)
    if isinstance(spec, list):
        return _near([int(value) for value in spec])
    if not isinstance(spec, str):
        return _near([spec])
    facts, found = Facts(call), []
    for term in parse(spec):
        operand: Any = facts[term.operand] if term.operand in FACTS else term.operand
        if not isinstance(operand, int | float):
            continue
        if term.op == "%":
            whole = max(1, int(_number(facts[field]) // operand)) * int(operand)
            found += [whole, whole + int(operand), whole + _STEP, whole + 1, whole + int(operand) // 2]
        else:
            found += _near([operand])
    return list(dict.fromkeys(found))


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 1


def _near(values: list[Any]) -> list[Any]:
    if any(isinstance(value, float) and value != int(value) for value in values):
        return [*values, 0.0, 0.1]
    at = [int(value) for value in values]
    steps = (0, 1, -1, _STEP, -_STEP, 64, -64)
    return list(dict.fromkeys(value + step for step in steps for value in at if value + step >= 0))


def made_of(call: Call, fields: Changes) -> Call | None:
    """Return a call with other fields, masks and biases cut to its sizes; None where the parts do not fit."""
    try:
        made = call.with_(**fields)
        sizes = {n: (getattr(call, n), getattr(made, n)) for n in _PLACES}
        if any(a != b for a, b in sizes.values()):
            made = made.changed(
                mask=tuple(_cut(node, made, sizes) for node in made.mask),
                bias=_cut_bias(made, sizes),
            )
        fits.check(made)
    except (ArgumentError, ValueError, ZeroDivisionError):
        return None
    return made


def _cut(node: MaskNode, call: Call, sizes: dict[str, tuple[int, int]]) -> MaskNode:
    if isinstance(node, DenseNode):
        return node.changed(shape=_shape(node.shape, sizes))
    if isinstance(node, FunctionNode) and node.block_mask_shape is not None:
        return node.changed(block_mask_shape=(call.seqlen_q, call.seqlen_kv))
    if isinstance(node, KeyPaddingNode | PrefixNode) and node.lengths is not None:
        whole = [min(n, call.seqlen_kv) for n in node.lengths] or [call.seqlen_kv]
        return node.changed(lengths=tuple(whole[row % len(whole)] for row in range(call.batch)))
    if isinstance(node, DocumentsNode) and call.layout == "thd":
        return node.changed(cross=call.seqlen_q != call.seqlen_kv)
    if isinstance(node, DocumentsNode) and node.lengths is not None:
        return node.changed(lengths=(call.seqlen_kv // 3, call.seqlen_kv - call.seqlen_kv // 3))
    return node


def _cut_bias(call: Call, sizes: dict[str, tuple[int, int]]) -> Any:
    bias = call.bias
    return bias.changed(shape=_shape(bias.shape, sizes)) if isinstance(bias, DenseBias) else bias


def _shape(shape: tuple[int, ...], sizes: dict[str, tuple[int, int]]) -> tuple[int, ...]:
    found = list(shape)
    for name, (before, now) in sizes.items():
        place = -_PLACES[name]
        if len(found) >= -place and found[place] == before and before != 1:
            found[place] = now
    return tuple(found)


def _dtype(call: Call, value: str) -> list[Changes]:
    bias = call.bias
    if isinstance(bias, DenseBias) and bias.dtype == call.dtype:
        return [{"dtype": value, "bias": bias.changed(dtype=value)}]
    return [{"dtype": value}]


def _heads(call: Call, value: int) -> list[Changes]:
    alike, apart = {"num_heads_q": value, "num_heads_kv": value}, {"num_heads_q": value}
    return [alike, apart] if call.num_heads_q == call.num_heads_kv else [apart, alike]


def _heads_kv(call: Call, value: int) -> list[Changes]:
    group = call.num_heads_q // call.num_heads_kv
    return [{"num_heads_kv": value}, {"num_heads_kv": value, "num_heads_q": value * group}]


def _queries(call: Call, value: int) -> list[Changes]:
    alike = {"seqlen_q": value, "seqlen_kv": value}
    apart = {"seqlen_q": value}
    return [alike, apart] if call.seqlen_q == call.seqlen_kv else [apart, alike]


def _keys(_: Call, value: int) -> list[Changes]:
    return [{"seqlen_kv": value}, {"seqlen_q": value, "seqlen_kv": value}]


def _width(call: Call, value: int) -> list[Changes]:
    both = {"head_dim_qk": value, "head_dim_v": value}
    return (
        [both, {"head_dim_qk": value}]
        if call.head_dim_qk == call.head_dim_v
        else [{"head_dim_qk": value}, both]
    )


def _remainder(name: str) -> Callable[[Call, int], list[Changes]]:
    def change(call: Call, value: int) -> list[Changes]:
        whole = max(128, getattr(call, name) // 128 * 128)
        made = _queries if name == "seqlen_q" else _keys
        return [*made(call, whole + value), *made(call, whole - 128 + value)]

    return change


def _node(kind: type, make: Callable[[Call], MaskNode]) -> Callable[[Call, bool], list[Changes]]:
    """Add a node to the mask, or take all of its kind away."""

    def change(call: Call, value: bool) -> list[Changes]:
        rest = tuple(node for node in call.mask if not isinstance(node, kind))
        if not value:
            return [{"mask": rest}]
        if len(rest) < len(call.mask):
            return []
        return [{"mask": (*rest, make(call))}, {"mask": (make(call),)}]

    return change


def _aligned(call: Call, value: str) -> list[Changes]:
    if value == "none":
        return [{"mask": tuple(n for n in call.mask if not hasattr(n, "alignment"))}]
    if value == "square":
        return [{"seqlen_q": call.seqlen_kv}, {"seqlen_kv": call.seqlen_q}]
    if value not in ("top_left", "bottom_right"):
        return []
    mask = tuple(n.changed(alignment=value) if hasattr(n, "alignment") else n for n in call.mask)
    if not any(hasattr(n, "alignment") for n in mask):
        mask = (*mask, CausalNode(alignment=value))  # type: ignore[arg-type]
    apart = (
        [{"mask": mask, "seqlen_kv": call.seqlen_q + call.seqlen_q // 2}]
        if call.seqlen_q == call.seqlen_kv
        else []
    )
    return [{"mask": mask}, *apart]


def _ahead(call: Call, value: bool) -> list[Changes]:
    rest = tuple(n for n in call.mask if not isinstance(n, WindowNode | CausalNode))
    return [{"mask": (*rest, WindowNode(left=40, right=24 if value else 0))}]


def _finite(call: Call, value: bool) -> list[Changes]:
    mask = tuple(n.changed(finite=value) if isinstance(n, KeyPaddingNode) else n for n in call.mask)
    return [{"mask": mask}, *([] if value else _node(KeyPaddingNode, _padding)(call, True))]


def _tensors(**changes: Any) -> Callable[[Call, Any], list[Changes]]:
    """Change what mask and bias tensors are like; `value` stands for the value that is wanted."""

    def change(call: Call, value: Any) -> list[Changes]:
        fields = {name: value if new == "value" else new for name, new in changes.items()}
        mask = tuple(n.changed(**fields) if isinstance(n, DenseNode) else n for n in call.mask)
        bias = call.bias.changed(**fields) if isinstance(call.bias, DenseBias) else call.bias
        return [{"mask": mask, "bias": bias}]

    return change


def _rank(call: Call, value: bool) -> list[Changes]:
    shape = (1, 1, call.seqlen_q, call.seqlen_kv) if value else (call.seqlen_kv,)
    return _tensors(shape=shape)(call, value)


def _rows(call: Call, value: bool) -> list[Changes]:
    return _tensors(shape=(call.batch, 1, call.seqlen_q if value else 1, call.seqlen_kv))(call, value)


def _bias(make: Callable[[Call], Any]) -> Callable[[Call, bool], list[Changes]]:
    return lambda call, value: [{"bias": make(call) if value else None}]


def _bias_dtype(call: Call, value: bool, *others: str) -> list[Changes]:
    if not isinstance(call.bias, DenseBias):
        return []
    other = next(name for name in others if name != call.dtype)
    return [{"bias": call.bias.changed(dtype=call.dtype if value else other)}]


def _bias_grad(call: Call, value: bool) -> list[Changes]:
    if call.bias is None:
        return []
    bias = call.bias.changed(requires_grad=value)
    return [{"bias": bias}, {"bias": bias, "phase": "training", "qkv_requires_grad": True}]


def _only_bias(call: Call, value: bool) -> list[Changes]:
    return [{**fields, "qkv_requires_grad": not value} for fields in _bias_grad(call, True)]


def _part(part: str, field: str) -> Callable[[Call, Any], list[Changes]]:
    def change(call: Call, value: Any) -> list[Changes]:
        return [{part: getattr(call, part).changed(**{field: None if value == "none" else value})}]

    return change


def _expanded(call: Call, value: bool) -> list[Changes]:
    strides = call.strides.changed(kv_heads_expanded=value)
    return [{"strides": strides}, {"strides": strides, "num_heads_kv": call.num_heads_q}]


def _padding(call: Call) -> MaskNode:
    return KeyPaddingNode(
        lengths=tuple(max(1, call.seqlen_kv - 3 - 37 * row % call.seqlen_kv) for row in range(call.batch))
    )


def _full(call: Call) -> tuple[int, ...]:
    return (call.batch, 1, call.seqlen_q, call.seqlen_kv)


_FIELDS: Final = frozenset(
    {"layout", "phase", "scale", "softcap", "sink", "dropout_p", "deterministic"} | {"return_lse"}
)
_CHANGES: Final[dict[str, Callable[[Call, Any], list[Changes]]]] = {
    "dtype": _dtype,
    "batch": lambda _, value: [{"batch": value}],
    "num_heads_q": _heads,
    "num_heads_kv": _heads_kv,
    "is_gqa": lambda call, value: [
        {"num_heads_kv": max(1, call.num_heads_q // 2) if value else call.num_heads_q}
    ],
    "gqa_ratio_power_of_two": lambda _, value: [{"num_heads_q": 8 if value else 6, "num_heads_kv": 2}],
    "seqlen_q": _queries,
    "seqlen_kv": _keys,
    "seqlens_equal": lambda call, value: _queries(call, call.seqlen_kv if value else call.seqlen_kv + 56)[
        ::-1
    ],
    "seqlen_q_mod_128": _remainder("seqlen_q"),
    "seqlen_kv_mod_128": _remainder("seqlen_kv"),
    "head_dim_qk": _width,
    "head_dim_v": lambda _, value: [{"head_dim_v": value}, {"head_dim_qk": value, "head_dim_v": value}],
    "head_dim_max": _width,
    "head_dims_equal": lambda call, value: [
        {"head_dim_v": call.head_dim_qk if value else call.head_dim_qk // 2}
    ],
    "head_dims_power_of_two": lambda call, value: _width(call, 64 if value else 80),
    "causal": _node(CausalNode, lambda _: CausalNode()),
    "only_causal": _node(CausalNode, lambda _: CausalNode()),
    "window": _node(WindowNode, lambda call: WindowNode(left=max(1, call.seqlen_kv // 3), right=0)),
    "window_looks_ahead": _ahead,
    "documents": _node(
        DocumentsNode,
        lambda call: DocumentsNode(lengths=(call.seqlen_kv // 3, call.seqlen_kv - call.seqlen_kv // 3)),
    ),
    "key_padding": _node(KeyPaddingNode, _padding),
    "left_out_finite": _finite,
    "prefix": _node(PrefixNode, lambda call: PrefixNode(lengths=(max(1, call.seqlen_kv // 4),) * call.batch)),
    "combined_mask": _node(
        AnyNode, lambda call: AnyNode(parts=((CausalNode(),), (PrefixNode(lengths=(9,) * call.batch),)))
    ),
    "dense_mask": _node(DenseNode, lambda call: DenseNode(shape=_full(call))),
    "masked": lambda _, value: [{"mask": (CausalNode(),) if value else ()}],
    "function_mask": _node(FunctionNode, lambda _: FunctionNode()),
    "alignment": _aligned,
    "empty_rows": _tensors(empty_rows="value"),
    "mask_last_dim_contiguous": _tensors(last_dim_contiguous="value"),
    "mask_aligned": _tensors(aligned="value"),
    "mask_rank_2_or_4": _rank,
    "mask_has_query_dim": _rows,
    "dense_bias": _bias(lambda call: DenseBias(dtype=call.dtype, shape=_full(call))),
    "alibi": _bias(lambda _: AlibiBias()),
    "function_bias": _bias(lambda _: FunctionBias()),
    "bias_is_query_dtype": lambda *call: _bias_dtype(*call, "float32", "bfloat16"),
    "bias_is_query_dtype_or_float32": lambda *call: _bias_dtype(*call, "bfloat16", "float16"),
    "bias_requires_grad": _bias_grad,
    "only_bias_requires_grad": _only_bias,
    "dropout_is_sixteenth": lambda call, value: [{"dropout_p": call.dropout_p and 0.125 if value else 0.1}],
    "qkv_last_dim_contiguous": _part("strides", "last_dim_contiguous"),
    "qkv_packed": _part("strides", "packed"),
    "qkv_tokens_contiguous": _part("strides", "tokens_contiguous"),
    "qkv_aligned_16": lambda call, value: [
        {"strides": call.strides.changed(aligned_16=value, packed=packed)} for packed in (True, value)
    ],
    "kv_heads_expanded": _expanded,
    "compiled": _part("context", "compiled"),
    "cuda_graph": _part("context", "cuda_graph"),
    "dispatch_mode": _part("context", "dispatch_mode"),
}


def variants(call: Call) -> Iterator[Call]:
    """Give calls that are simpler in one thing, or other than most: what other rows may be about."""
    for field, value in _SIMPLER:
        yield from changed(call, field, value)


_SIMPLER: Final[tuple[tuple[str, object], ...]] = (
    ("phase", "inference"),
    ("phase", "training"),
    ("dropout_is_sixteenth", True),
    ("batch", 1),
    ("batch", 2),
    ("num_heads_q", 4),
    ("is_gqa", False),
    ("is_gqa", True),
    ("seqlen_q", 128),
    ("seqlen_q", 130),
    ("seqlen_q", 512),
    ("head_dim_qk", 64),
    ("head_dim_qk", 128),
    ("dtype", "bfloat16"),
    ("dtype", "float16"),
    ("dtype", "float32"),
    ("causal", True),
    ("causal", False),
    ("deterministic", False),
    ("deterministic", True),
    ("return_lse", False),
    ("dense_mask", False),
    ("dense_bias", False),
    ("seqlens_equal", True),
)


def smaller(call: Call) -> Iterator[Call]:
    """Give calls of the same kind that take less: a large batch needs no long sequences."""
    for fields in ({}, {"batch": 1}, {"num_heads_q": 1, "num_heads_kv": 1}):
        for lengths in ((16, 16), (call.seqlen_q, 16), (16, call.seqlen_kv)):
            for width in (8, 64, call.head_dim_qk):
                sizes = {"seqlen_q": lengths[0], "seqlen_kv": lengths[1]}
                dims = {"head_dim_qk": width, "head_dim_v": width}
                made = made_of(call, {**fields, **sizes, **dims})
                if made is not None:
                    yield made
