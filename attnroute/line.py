"""One line of words that says a `Call` to people, logs and the command line, and parses back to an equal one.

`bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train`: sizes first, then what differs from the default. Words
of the mask keep their order; every other word may stand anywhere. `WORDS` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from attnroute.call import (
    AlibiBias,
    Call,
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
from attnroute.errors import ArgumentError, did_you_mean
from attnroute.vocabulary import DTYPE_SHORT

WORDS: Final[dict[str, str]] = {
    "bf16 fp16 fp32 fp64 fp8e4 fp8e5": "dtype of query, key and value",
    "b2 hq32 hkv8 sq4096 skv4096": "batch, heads and lengths; hkv is hq and skv is sq where left out",
    "d128 or d192/128": "head_dim_qk and, where it differs, head_dim_v",
    "bshd or thd": "layout; bhsd where left out",
    "causal or causal=bottom_right": "causal mask, and where its diagonal ends",
    "window=4095,0 or window=open,0,bottom_right": "keys beside the diagonal; window=4096 is window=4095,0",
    "documents or documents=1000,3096": "packed documents; :scattered when their tokens lie anywhere",
    "keys=100,37 or keys-left=100,37 or keys-any": "keys per batch row; padding right, left or anywhere",
    "prefix or prefix=10,20": "causal behind a prefix that every query sees",
    "dense=2x1x100x100": "bool mask tensor; then :grad :strided :unaligned :empty=some :recognized=causal",
    "function or function=4096x4096": "predicate, with the shape of its block mask",
    "bias=bf16:1x1x64x64": "bias tensor; then :grad :strided :unaligned :empty=none",
    "alibi, function_bias": "ALiBi slopes, a score_mod",
    "scale=negative or scale=zero": "sign of the factor on QK^T",
    "softcap=30, sink, dropout=0.1": "score features",
    "train, deterministic, lse": "training, only deterministic kernels, log-sum-exp returned",
    "qkv_grad or no_qkv_grad": "whether query, key or value needs a gradient, where somebody said",
    "last_dim_strided, unpacked, misaligned, kv_expanded": "how query, key and value lie in memory",
    "compiled, graph": "traced by torch.compile, captured into a CUDA graph",
    "dynamic=seqlen_q,seqlen_kv": "sizes that may change",
    "double_backward or forward_ad or vmap or export": "transform around the call",
    "dtensor or context_parallel": "how the call is distributed",
}
"""Every word, with its meaning."""

_SIZES: Final = {
    "b": "batch",
    "hq": "num_heads_q",
    "hkv": "num_heads_kv",
    "sq": "seqlen_q",
    "skv": "seqlen_kv",
}
_SIZE: Final = re.compile(r"(b|hq|hkv|sq|skv)(\d+)", re.ASCII)
_HEAD_DIM: Final = re.compile(r"d(\d+)(?:/(\d+))?", re.ASCII)
_REQUIRED: Final = {
    "dtype": "bf16",
    "batch": "b2",
    "num_heads_q": "hq32",
    "seqlen_q": "sq4096",
    "head_dim_qk": "d128",
}
_FLAGS: Final[dict[str, tuple[str, object]]] = {
    **{word: ("dtype", long) for word, long in DTYPE_SHORT.items()},
    **{word: ("layout", word) for word in ("bhsd", "bshd", "thd")},
    "alibi": ("bias", AlibiBias()),
    "function_bias": ("bias", FunctionBias()),
    "sink": ("sink", True),
    "train": ("phase", "training"),
    "deterministic": ("deterministic", True),
    "lse": ("return_lse", True),
    "qkv_grad": ("qkv_requires_grad", True),
    "no_qkv_grad": ("qkv_requires_grad", False),
}
_STRIDES: Final[dict[str, tuple[str, object]]] = {
    "last_dim_strided": ("last_dim_contiguous", False),
    "unpacked": ("packed", False),
    "misaligned": ("aligned_16", False),
    "kv_expanded": ("kv_heads_expanded", True),
}
_CONTEXT: Final[dict[str, tuple[str, object]]] = {
    "compiled": ("compiled", True),
    "graph": ("cuda_graph", True),
    **{word: ("transform", word) for word in ("double_backward", "forward_ad", "vmap", "export")},
    **{word: ("distributed", word) for word in ("dtensor", "context_parallel")},
}
_NUMBERS: Final = {"softcap": "softcap", "dropout": "dropout_p"}
_TENSOR: Final[dict[str, tuple[str, object]]] = {
    "grad": ("requires_grad", True),
    "strided": ("last_dim_contiguous", False),
    "unaligned": ("aligned", False),
    **{f"empty={state}": ("empty_rows", state) for state in ("none", "some", "unknown")},
}
_RECOGNIZED: Final = {"causal": CausalNode(), "causal_bottom_right": CausalNode(alignment="bottom_right")}
_SIDES: Final = {"keys": "right", "keys-left": "left", "keys-any": "any"}
_OPEN, _EMPTY, _SCALAR, _FULL = "open", "empty", "scalar", "full"


def render(call: Call) -> str:
    """Say a call as one line; `parse` gives the equal call back."""
    words = [_word_of(_FLAGS, "dtype", call.dtype)]
    words += [f"{word}{getattr(call, field)}" for word, field in _SIZES.items()]
    words.append(f"d{call.head_dim_qk}")
    words[-1] += f"/{call.head_dim_v}" if call.head_dim_v != call.head_dim_qk else ""
    words += [call.layout] if call.layout != "bhsd" else []
    words += [_render_node(node) for node in call.mask]
    words += [_render_bias(call.bias)] if isinstance(call.bias, DenseBias) else []
    words += [f"scale={call.scale}"] if call.scale != "positive" else []
    words += [f"{w}={_number(v)}" for w, f in _NUMBERS.items() if (v := getattr(call, f))]
    words += [w for w, (field, value) in _FLAGS.items() if _stated(call, field, value)]
    words += [w for w, (field, value) in _STRIDES.items() if getattr(call.strides, field) == value]
    words += [w for w, (field, value) in _CONTEXT.items() if getattr(call.context, field) == value]
    words += [f"dynamic={','.join(call.context.dynamic)}"] if call.context.dynamic else []
    return " ".join(words)


def parse(line: str) -> Call:
    """Read a call from its line.

    Args:
        line: Words of `WORDS`, separated by spaces. dtype, b, hq, sq and d are required.

    Raises:
        ArgumentError: A word is unknown, stands twice, or its value is wrong; the message names it.
    """
    parts: dict[str, dict[str, Any]] = {"": {}, "strides": {}, "context": {}}
    mask: list[MaskNode] = []
    for word in line.split():
        name = _name_of(word)
        with _reading(word):
            if name in _NODES:
                mask.append(_parse_node(name, word))
            else:
                _put(parts, word)
    fields = parts.pop("")
    _require(fields)
    fields.setdefault("num_heads_kv", fields["num_heads_q"])
    fields.setdefault("seqlen_kv", fields["seqlen_q"])
    with _reading(line):
        return Call.model_validate({**fields, **parts, "mask": tuple(mask)})


@contextmanager
def _reading(text: str) -> Iterator[None]:
    """Turn whatever is wrong with a word into one sentence that names it."""
    try:
        yield
    except ArgumentError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the call"
        what = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        raise ArgumentError(f'"{text}" requires a valid value; {where}: {what}.') from error
    except (ValueError, KeyError) as error:
        forms = [form for form in WORDS if re.search(rf"(^|\s){re.escape(_name_of(text))}=", form)]
        form = forms[0] if forms else f"{_name_of(text)} without a value"
        raise ArgumentError(f'a call line requires words like {form}; got "{text}".') from error


def _name_of(word: str) -> str:
    return re.split(r"[=:]", word, maxsplit=1)[0]


def _put(parts: dict[str, dict[str, Any]], word: str) -> None:
    for part, field, value in _parse_word(word):
        if field in parts[part]:
            raise ArgumentError(f'a call line requires {field} once; got a second time "{word}"; drop one.')
        parts[part][field] = value


def _require(fields: Mapping[str, object]) -> None:
    missing = [f"{field} (like {word})" for field, word in _REQUIRED.items() if field not in fields]
    if missing:
        raise ArgumentError(f"a call line requires {', '.join(missing)}; got none; add it.")


def _parse_word(word: str) -> Iterator[tuple[str, str, object]]:
    """Yield (part of the call, field, value): the part is "" for the call itself."""
    name, _, value = word.partition("=")
    if match := _SIZE.fullmatch(word):
        yield "", _SIZES[match[1]], int(match[2])
    elif match := _HEAD_DIM.fullmatch(word):
        yield "", "head_dim_qk", int(match[1])
        yield "", "head_dim_v", int(match[2] or match[1])
    elif word in _FLAGS:
        yield "", *_FLAGS[word]
    elif word in _STRIDES:
        yield "strides", *_STRIDES[word]
    elif word in _CONTEXT:
        yield "context", *_CONTEXT[word]
    elif name in _NUMBERS:
        yield "", _NUMBERS[name], float(value)
    elif name == "scale":
        yield "", "scale", value
    elif name == "bias":
        yield "", "bias", _parse_bias(value)
    elif name == "dynamic":
        yield "context", "dynamic", tuple(value.split(","))
    else:
        near = did_you_mean(name, _known()) or "; `attnroute explain --help` lists them."
        raise ArgumentError(f'a call line requires words that it knows; got "{word}"{near}')


def _known() -> list[str]:
    return [*_FLAGS, *_STRIDES, *_CONTEXT, *_NUMBERS, *_NODES, "scale", "bias", "dynamic"]


def _parse_node(name: str, word: str) -> MaskNode:
    head, *options = word.split(":")
    value = head.partition("=")[2] if "=" in head else None
    return _NODES[name](name, value, options)


def _causal(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _no_options(options)
    return CausalNode.model_validate({} if value is None else {"alignment": value})


def _window(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _no_options(options)
    parts = (value or "").split(",")
    alignment = {"alignment": parts.pop()} if parts[-1] in ("top_left", "bottom_right") else {}
    if len(parts) == 1:
        parts = [str(int(parts[0]) - 1), "0"]
    left, right = (None if part == _OPEN else int(part) for part in parts)
    return WindowNode.model_validate({"left": left, "right": right, **alignment})


def _documents(_name: str, value: str | None, options: list[str]) -> MaskNode:
    contiguous = "scattered" not in options
    _no_options([o for o in options if o != "scattered"])
    return DocumentsNode(lengths=_lengths(value), contiguous=contiguous)


def _keys(name: str, value: str | None, options: list[str]) -> MaskNode:
    _no_options(options)
    return KeyPaddingNode.model_validate({"lengths": _lengths(value), "side": _SIDES[name]})


def _prefix(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _no_options(options)
    return PrefixNode(lengths=_lengths(value))


def _dense(_name: str, value: str | None, options: list[str]) -> MaskNode:
    seen = [o.removeprefix("recognized=") for o in options if o.startswith("recognized=")]
    changes = _tensor_options([o for o in options if not o.startswith("recognized=")])
    if seen:
        words = () if seen[0] == _FULL else seen[0].split("+")
        changes["recognized"] = tuple(_RECOGNIZED[word] for word in words)
    return DenseNode.model_validate({"shape": _shape(value or ""), **changes})


def _function(_name: str, value: str | None, options: list[str]) -> MaskNode:
    _no_options(options)
    return FunctionNode(block_mask_shape=None if value is None else _shape(value))


_NODES: Final[dict[str, Callable[[str, str | None, list[str]], MaskNode]]] = {
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    **dict.fromkeys(_SIDES, _keys),
    "prefix": _prefix,
    "dense": _dense,
    "function": _function,
}


def _parse_bias(value: str) -> DenseBias:
    dtype, shape, *options = value.split(":")
    fields = {"dtype": DTYPE_SHORT[dtype], "shape": _shape(shape), **_tensor_options(options)}
    return DenseBias.model_validate(fields)


def _tensor_options(options: list[str]) -> dict[str, object]:
    return dict(_TENSOR[option] for option in options)


def _no_options(options: list[str]) -> None:
    if options:
        raise ValueError(options[0])


def _lengths(value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    return () if value == _EMPTY else tuple(int(part) for part in value.split(","))


def _shape(value: str) -> tuple[int, ...]:
    return () if value == _SCALAR else tuple(int(part) for part in value.split("x"))


def _word_of(words: Mapping[str, tuple[str, object]], field: str, value: object) -> str:
    return next(word for word, said in words.items() if said == (field, value))


def _stated(call: Call, field: str, value: object) -> bool:
    """Whether a flag is said here; dtype and layout have their place."""
    return field not in ("dtype", "layout") and getattr(call, field) == value


def _render_node(node: MaskNode) -> str:
    if isinstance(node, CausalNode):
        return "causal" + ("=bottom_right" if node.alignment == "bottom_right" else "")
    if isinstance(node, WindowNode):
        sides = [_OPEN if side is None else str(side) for side in (node.left, node.right)]
        return f"window={','.join(sides)}" + (",bottom_right" if node.alignment == "bottom_right" else "")
    if isinstance(node, DocumentsNode):
        return f"documents{_render_lengths(node.lengths)}" + ("" if node.contiguous else ":scattered")
    if isinstance(node, KeyPaddingNode):
        return f"{next(w for w, side in _SIDES.items() if side == node.side)}{_render_lengths(node.lengths)}"
    if isinstance(node, PrefixNode):
        return f"prefix{_render_lengths(node.lengths)}"
    if isinstance(node, FunctionNode):
        shape = node.block_mask_shape
        return "function" if shape is None else f"function={_render_shape(shape)}"
    return f"dense={_render_shape(node.shape)}{_render_options(node)}{_render_recognized(node)}"


def _render_bias(bias: DenseBias) -> str:
    return f"bias={_word_of(_FLAGS, 'dtype', bias.dtype)}:{_render_shape(bias.shape)}{_render_options(bias)}"


def _render_options(tensor: BaseModel) -> str:
    defaults = type(tensor).model_fields
    said = [w for w, (f, v) in _TENSOR.items() if getattr(tensor, f) == v and defaults[f].default != v]
    return "".join(f":{word}" for word in said)


def _render_recognized(node: DenseNode) -> str:
    if node.recognized is None:
        return ""
    words = [word for n in node.recognized for word, seen in _RECOGNIZED.items() if seen == n]
    return f":recognized={'+'.join(words) or _FULL}"


def _render_lengths(lengths: tuple[int, ...] | None) -> str:
    return "" if lengths is None else f"={','.join(map(str, lengths)) or _EMPTY}"


def _render_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or _SCALAR


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
