"""Sorts calls into kinds: by mask, scores, head dims, heads, lengths and direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from attnroute.question.call import Call
from attnroute.question.nodes import DenseNode, DocumentsNode, KeyPaddingNode, WindowNode

Kind = Literal[
    "full", "causal", "window", "documents", "padding", "decoding", "mask tensor", "scores", "other"
]
KINDS = get_args(Kind)
FEW_QUERIES = 16
LENGTHS = ((16, "few"), (128, "short"), (1024, "middle"), (8192, "usual"))


def kind_of(call: Call) -> Kind:
    """Return the kind of a call: what is done to its scores, else how it decodes, else its mask."""
    if call.bias or call.softcap or call.sink:
        return "scores"
    if call.seqlen_q <= FEW_QUERIES < call.seqlen_kv:
        return "decoding"
    nodes = {type(node) for node in call.mask}
    named: tuple[tuple[type, Kind], ...] = (
        (DenseNode, "mask tensor"),
        (DocumentsNode, "documents"),
        (KeyPaddingNode, "padding"),
        (WindowNode, "window"),
    )
    for node, kind in named:
        if node in nodes:
            return kind
    if not nodes:
        return "full"
    return "causal" if {node.kind for node in call.mask} == {"causal"} else "other"


def _scores(call: Call) -> str:
    bias = call.bias and call.bias.kind + " bias" + ", trained" * call.bias.requires_grad
    return bias or ("softcap" if call.softcap else "sink" if call.sink else "none")


def _dims(call: Call) -> str:
    return "/".join(map(str, dict.fromkeys((call.head_dim_qk, call.head_dim_v))))


def _heads(call: Call) -> str:
    return "MQA" if call.num_heads_kv == 1 else f"group {call.num_heads_q // call.num_heads_kv}"


def _lengths(call: Call) -> str:
    if call.seqlen_q == call.seqlen_kv:
        return "self, " + next((name for most, name in LENGTHS if call.seqlen_q <= most), "long")
    return (
        "decoding"
        if call.seqlen_q <= FEW_QUERIES
        else "cross to few keys"
        if call.seqlen_kv < 128
        else "unequal"
    )


BY: dict[str, Callable[[Call], str]] = {
    "mask": kind_of,
    "scores": _scores,
    "dims": _dims,
    "heads": _heads,
    "lengths": _lengths,
    "direction": lambda call: call.phase,
}
"""What calls can be sorted by."""
