"""Write mask nodes as words of a call line, and read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.question.line.complaints import reading
from attnroute.question.line.words import (
    ANY,
    COUNTED,
    DOCUMENTS,
    EMPTY,
    FULL,
    FUNCTION,
    KEYS,
    NOT,
    OPEN,
    PREFIX,
    SCALAR,
    SIDES,
    TENSOR,
    name_of,
    split,
)
from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
    WindowNode,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

Nodes = tuple[MaskNode, ...]
Options = Mapping[str, tuple[str, object]]


def read_node(word: str) -> MaskNode:
    """Read a mask word.

    Raises:
        ArgumentError: It is no mask word.
        ValueError, KeyError: Its value or an option is wrong.
    """
    name = name_of(word)
    if name in (ANY, NOT):
        return _read_combined(name, word)
    if name not in _SIMPLE:
        near = did_you_mean(name, NODES) or "; `attnroute explain --help` lists them."
        raise ArgumentError(f"a mask requires words that it knows; got {quoted(word)}{near}")
    head, *options = split(word, ":")
    value = head.partition("=")[2] if "=" in head else None
    return _SIMPLE[name](name, value, options)


def write_node(node: MaskNode, *, with_corner: bool = False) -> str:
    """Return a mask node as one word; `read_node` gives the equal node back.

    Args:
        node: The node.
        with_corner: Write the corner of a causal mask or window even where it is the default.
    """
    if isinstance(node, AnyNode):
        return f"{ANY}({'|'.join(map(_write_part, node.parts))})"
    if isinstance(node, NotNode):
        return f"{NOT}({_write_part(node.part)})"
    if isinstance(node, CausalNode):
        return "=".join(["causal", *_corner(node, with_corner=with_corner)])
    if isinstance(node, WindowNode):
        sides = [OPEN if side is None else str(side) for side in (node.left, node.right)]
        return f"window={','.join([*sides, *_corner(node, with_corner=with_corner)])}"
    if isinstance(node, DenseNode):
        return f"dense={write_shape(node.shape)}{write_options(node, TENSOR)}{_write_recognized(node)}"
    return _write_counted(node)


def _corner(node: CausalNode | WindowNode, *, with_corner: bool) -> list[str]:
    return [node.alignment] if with_corner or node.alignment != "top_left" else []


def _write_counted(node: DocumentsNode | KeyPaddingNode | PrefixNode | FunctionNode) -> str:
    if isinstance(node, DocumentsNode):
        counted = "" if node.count is None else f"={COUNTED}{node.count}"
        return f"documents{_write_lengths(node.lengths) or counted}{write_options(node, DOCUMENTS)}"
    if isinstance(node, KeyPaddingNode):
        word = next(w for w, side in SIDES.items() if side == node.side)
        return f"{word}{_write_lengths(node.lengths)}{write_options(node, KEYS)}"
    if isinstance(node, PrefixNode):
        return f"prefix{_write_lengths(node.lengths)}{write_options(node, PREFIX)}"
    shape = node.block_mask_shape
    given = "" if shape is None else f"={write_shape(shape)}"
    return f"function{given}{write_options(node, FUNCTION)}"


def _read_combined(name: str, word: str) -> MaskNode:
    inner = word.removeprefix(f"{name}(").removesuffix(")")
    if word != f"{name}({inner})":
        raise ValueError(word)
    if name == NOT:
        return NotNode(part=_read_part(inner))
    return AnyNode(parts=tuple(map(_read_part, split(inner, "|"))) if inner else ())


def _read_part(text: str) -> Nodes:
    words = [] if text == FULL else split(text, "+")
    if "" in words:
        raise ValueError(text)
    nodes = []
    for word in words:
        with reading(word):
            nodes.append(read_node(word))
    return tuple(nodes)


def _write_part(nodes: Nodes) -> str:
    return "+".join(map(write_node, nodes)) or FULL


def _causal(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _fields(options, {})
    return CausalNode.model_validate({} if value is None else {"alignment": value})


def _window(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _fields(options, {})
    parts = (value or "").split(",")
    alignment = {"alignment": parts.pop()} if parts[-1] in ("top_left", "bottom_right") else {}
    if len(parts) == 1:
        parts = [str(int(parts[0]) - 1), "0"]
    left, right = (None if part == OPEN else int(part) for part in parts)
    return WindowNode.model_validate({"left": left, "right": right, **alignment})


def _documents(_name: str, value: str | None, options: list[str]) -> MaskNode:
    fields = _fields(options, DOCUMENTS)
    if value is not None and value.startswith(COUNTED):
        return DocumentsNode.model_validate({"count": int(value.removeprefix(COUNTED)), **fields})
    return DocumentsNode.model_validate({"lengths": _lengths(value), **fields})


def _keys(name: str, value: str | None, options: list[str]) -> MaskNode:
    counted = {"lengths": _lengths(value), "side": SIDES[name]}
    return KeyPaddingNode.model_validate({**counted, **_fields(options, KEYS)})


def _prefix(_name: str, value: str | None, options: list[str]) -> MaskNode:
    return PrefixNode.model_validate({"lengths": _lengths(value), **_fields(options, PREFIX)})


def _dense(_name: str, value: str | None, options: list[str]) -> MaskNode:
    seen = [o.removeprefix("recognized=") for o in options if o.startswith("recognized=")]
    changes = read_tensor_options([o for o in options if not o.startswith("recognized=")])
    if seen:
        inner = seen[0][1:-1] if seen[0].startswith("(") else seen[0]
        changes["recognized"] = _read_part(inner)
    return DenseNode.model_validate({"shape": read_shape(value or ""), **changes})


def _function(_name: str, value: str | None, options: list[str]) -> MaskNode:
    shape = None if value is None else read_shape(value)
    return FunctionNode.model_validate({"block_mask_shape": shape, **_fields(options, FUNCTION)})


_SIMPLE: Final[dict[str, Callable[[str, str | None, list[str]], MaskNode]]] = {
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    **dict.fromkeys(SIDES, _keys),
    "prefix": _prefix,
    "dense": _dense,
    "function": _function,
}
NODES: Final = (*_SIMPLE, ANY, NOT)
"""What mask words begin with."""


def read_tensor_options(options: list[str]) -> dict[str, object]:
    """Return the fields that options of a mask or bias tensor set."""
    return _fields(options, TENSOR)


def _fields(options: list[str], words: Options) -> dict[str, object]:
    return dict(words[option] for option in options)


def write_options(model: BaseModel, words: Options) -> str:
    """Return what differs from the defaults of a node or bias."""
    defaults = type(model).model_fields
    found = [w for w, (f, v) in words.items() if getattr(model, f) == v and defaults[f].default != v]
    return "".join(f":{word}" for word in found)


def _write_recognized(node: DenseNode) -> str:
    if node.recognized is None:
        return ""
    part = _write_part(node.recognized)
    return f":recognized=({part})" if "+" in part or ":" in part else f":recognized={part}"


def _lengths(value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    return () if value == EMPTY else tuple(int(part) for part in value.split(","))


def _write_lengths(lengths: tuple[int, ...] | None) -> str:
    return "" if lengths is None else f"={','.join(map(str, lengths)) or EMPTY}"


def read_shape(value: str) -> tuple[int, ...]:
    """Read sizes joined by x."""
    return () if value == SCALAR else tuple(int(part) for part in value.split("x"))


def write_shape(shape: tuple[int, ...]) -> str:
    """Return sizes joined by x."""
    return "x".join(map(str, shape)) or SCALAR
