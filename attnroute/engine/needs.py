"""Which features of the closed list a call needs."""

from __future__ import annotations

from attnroute.question.call import Call
from attnroute.question.facts import Facts
from attnroute.vocabulary import Feature

_FLAGS: tuple[Feature, ...] = (
    "causal",
    "window",
    "documents",
    "key_padding",
    "prefix",
    "combined_mask",
    "dense_mask",
    "function_mask",
    "dense_bias",
    "function_bias",
    "alibi",
    "sink",
    "return_lse",
    "compiled",
    "cuda_graph",
)


def needed_features(call: Call, facts: Facts) -> tuple[Feature, ...]:
    """Return the features that a kernel must have for this call, in the order of the closed list."""
    needed: list[Feature] = [name for name in _FLAGS if facts[name] is True]
    if facts["alignment"] in ("bottom_right", "mixed"):
        needed.append("bottom_right")
    conditions: tuple[tuple[Feature, bool], ...] = (
        ("bias_grad", facts["bias_requires_grad"] is True),
        ("softcap", call.softcap > 0),
        ("dropout", call.dropout_p > 0),
        ("gqa", call.num_heads_q != call.num_heads_kv),
        ("deterministic", call.deterministic and call.phase == "training"),
        ("varlen", call.layout == "thd"),
        ("fp8", call.dtype.startswith("float8")),
    )
    needed.extend(name for name, holds in conditions if holds)
    transform, distributed = call.context.transform, call.context.distributed
    if transform in ("double_backward", "forward_ad", "vmap"):
        needed.append(transform)
    if distributed is not None:
        needed.append(distributed)
    return tuple(needed)
