"""Write a call as its line."""

from __future__ import annotations

from attnroute.question.call import Call
from attnroute.question.line.nodes import write_node, write_options, write_shape
from attnroute.question.line.words import CONTEXT, FLAGS, NUMBERS, SIZES, STRIDES, TENSOR, is_ragged, word_of
from attnroute.question.nodes import DenseBias


def render(call: Call) -> str:
    """Say a call as one line; `parse` gives the equal call back."""
    words = [word_of(FLAGS, "dtype", call.dtype)]
    words += [f"{word}{getattr(call, field)}" for word, field in SIZES.items()]
    words.append(f"d{call.head_dim_qk}")
    words[-1] += f"/{call.head_dim_v}" if call.head_dim_v != call.head_dim_qk else ""
    words += [call.layout] if call.layout != "bhsd" else []
    has_corners = call.seqlen_q != call.seqlen_kv or is_ragged(call)
    words += [write_node(node, with_corner=has_corners) for node in call.mask]
    words += [_bias(call.bias)] if isinstance(call.bias, DenseBias) else []
    words += [f"scale={call.scale}"] if call.scale != "positive" else []
    words += [f"{w}={_number(v)}" for w, f in NUMBERS.items() if (v := getattr(call, f))]
    words += [w for w, (field, value) in FLAGS.items() if _stated(call, field, value)]
    words += [w for w, (field, value) in STRIDES.items() if getattr(call.strides, field) == value]
    words += [w for w, (field, value) in CONTEXT.items() if getattr(call.context, field) == value]
    words += [f"dynamic={','.join(call.context.dynamic)}"] if call.context.dynamic else []
    return " ".join(words)


def _stated(call: Call, field: str, value: object) -> bool:
    """Return whether a flag is written here; dtype and layout have their own place."""
    return field not in ("dtype", "layout") and getattr(call, field) == value


def _bias(bias: DenseBias) -> str:
    dtype = word_of(FLAGS, "dtype", bias.dtype)
    return f"bias={dtype}:{write_shape(bias.shape)}{write_options(bias, TENSOR)}"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
