"""Read a call from its line; each error names the word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from attnroute.errors import ArgumentError, quoted
from attnroute.question.call import Call
from attnroute.question.fits import corner, corner_of_each, depth
from attnroute.question.line.complaints import reading, unknown_word
from attnroute.question.line.nodes import NODES, read_node, read_shape, read_tensor_options
from attnroute.question.line.words import CONTEXT, FLAGS, NUMBERS, SIZES, STRIDES, is_ragged, name_of
from attnroute.question.nodes import CausalNode, DenseBias, MaskNode, WindowNode
from attnroute.vocabulary import DTYPE_SHORT

_SIZE: Final = re.compile(r"(b|hq|hkv|sq|skv)(\d+)", re.ASCII)
_HEAD_DIM: Final = re.compile(r"d(\d+)(?:/(\d+))?", re.ASCII)
_REQUIRED: Final = {
    "dtype": "bf16",
    "batch": "b2",
    "num_heads_q": "hq32",
    "seqlen_q": "sq4096",
    "head_dim_qk": "d128",
}


def parse(line: str) -> Call:
    """Read a call from its line.

    Args:
        line: Words of `WORDS`, separated by spaces. dtype, b, hq, sq and d are required.

    Raises:
        ArgumentError: A word is unknown, stands twice, or its value is wrong; the message names it.
    """
    depth(_levels(line))
    parts: dict[str, dict[str, Any]] = {"": {}, "strides": {}, "context": {}}
    mask: list[MaskNode] = []
    for word in line.split():
        with reading(word):
            if name_of(word) in NODES:
                mask.append(read_node(word))
            else:
                _put(parts, word)
    fields = parts.pop("")
    _require(fields)
    fields.setdefault("num_heads_kv", fields["num_heads_q"])
    fields.setdefault("seqlen_kv", fields["seqlen_q"])
    with reading(line):
        call = Call.model_validate({**fields, **parts, "mask": tuple(mask)})
    _check_corners(call)
    return call


def _levels(line: str) -> int:
    """Return how deep parentheses lie in each other, before anything goes down them."""
    levels = accumulate((letter == "(") - (letter == ")") for letter in line if letter in "()")
    return max(levels, default=0)


def _check_corners(call: Call) -> None:
    """A word without its corner is `is_causal` or `window` without `causal_alignment`."""
    bands = [node for node in call.mask if isinstance(node, CausalNode | WindowNode)]
    if all("alignment" in node.model_fields_set for node in bands):
        return
    if is_ragged(call):
        raise corner_of_each()
    corner(call)


def _put(parts: dict[str, dict[str, Any]], word: str) -> None:
    for part, field, value in _parse_word(word):
        if field in parts[part]:
            got = f"a second time {quoted(word)}"
            raise ArgumentError(f"a call line requires {field} once; got {got}; drop one.")
        parts[part][field] = value


def _require(fields: Mapping[str, object]) -> None:
    missing = [f"{field} (like {word})" for field, word in _REQUIRED.items() if field not in fields]
    if missing:
        raise ArgumentError(f"a call line requires {', '.join(missing)}; got none; add it.")


def _parse_word(word: str) -> Iterator[tuple[str, str, object]]:
    """Yield (part of the call, field, value): the part is "" for the call itself."""
    name, _, value = word.partition("=")
    if match := _SIZE.fullmatch(word):
        yield "", SIZES[match[1]], int(match[2])
    elif match := _HEAD_DIM.fullmatch(word):
        yield "", "head_dim_qk", int(match[1])
        yield "", "head_dim_v", int(match[2] or match[1])
    elif word in FLAGS:
        yield "", *FLAGS[word]
    elif word in STRIDES:
        yield "strides", *STRIDES[word]
    elif word in CONTEXT:
        yield "context", *CONTEXT[word]
    elif name in NUMBERS:
        yield "", NUMBERS[name], float(value)
    elif name == "scale":
        yield "", "scale", value
    elif name == "bias":
        yield "", "bias", _parse_bias(value)
    elif name == "dynamic":
        yield "context", "dynamic", tuple(value.split(","))
    else:
        raise unknown_word(word, _known())


def _known() -> list[str]:
    words = [*FLAGS, *STRIDES, *CONTEXT, *NUMBERS, *NODES, "scale", "bias", "dynamic"]
    return [word for word in words if word not in DTYPE_SHORT]


def _parse_bias(value: str) -> DenseBias:
    dtype, shape, *options = value.split(":")
    fields = {"dtype": DTYPE_SHORT[dtype], "shape": read_shape(shape), **read_tensor_options(options)}
    return DenseBias.model_validate(fields)
