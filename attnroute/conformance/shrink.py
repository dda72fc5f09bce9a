"""Makes a failing call as simple as it can be and still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from attnroute.conformance.changes import made_of
from attnroute.conformance.trials import Outcome, Trial
from attnroute.question.call import Call, Context, Strides
from attnroute.question.line import parse, render
from attnroute.question.nodes import KeyPaddingNode, PrefixNode

_MOST: Final = 150
"""Calls that are tried for one failure."""
_PLAIN: Final[tuple[dict[str, Any], ...]] = (
    {"context": Context()},
    {"strides": Strides()},
    {"bias": None},
    {"sink": False},
    {"softcap": 0.0},
    {"scale": "positive"},
    {"return_lse": False},
    {"deterministic": False},
    {"layout": "bhsd"},
    {"phase": "inference", "qkv_requires_grad": None},
    {"batch": 1},
)
_WIDTHS: Final = (8, 16, 32, 64)


def shrunk(
    trial: Trial,
    outcome: Outcome,
    ask: Callable[[Trial], Outcome],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Trial, Outcome]:
    """Return the simplest trial that was found to fail in the same way.

    Args:
        trial: One that fails.
        outcome: How.
        ask: Runs a trial.
        is_over: Whether the time for it is over.
    """
    asked: set[Trial] = set()
    going = True
    while going:
        going = False
        for simple in simpler(trial):
            if simple in asked or len(asked) >= _MOST or is_over():
                continue
            asked.add(simple)
            found = ask(simple)
            if found.status == outcome.status:
                trial, outcome, going = simple, found, True
                break
    return trial, outcome


def simpler(trial: Trial) -> Iterator[Trial]:
    """Give trials that are simpler in one thing."""
    call = parse(trial.line)
    if trial.values != "usual":
        yield trial.changed(values="usual")
    if trial.memory:
        yield trial.changed(memory=())
    for fields in _fields(call):
        made = made_of(call, fields)
        if made is not None and made != call:
            yield trial.changed(line=render(made))


def _fields(call: Call) -> Iterator[dict[str, Any]]:
    for at in range(len(call.mask)):
        yield {"mask": call.mask[:at] + call.mask[at + 1 :]}
        node = call.mask[at]
        if isinstance(node, KeyPaddingNode | PrefixNode) and node.lengths and max(node.lengths) > 1:
            less = node.changed(lengths=tuple(-(-n // 2) for n in node.lengths))
            yield {"mask": (*call.mask[:at], less, *call.mask[at + 1 :])}
    yield from _PLAIN
    group = call.num_heads_q // max(1, call.num_heads_kv)
    yield {"num_heads_q": 1, "num_heads_kv": 1}
    yield {"num_heads_q": group, "num_heads_kv": 1}
    yield {"num_heads_q": call.num_heads_kv}
    for name in ("seqlen_q", "seqlen_kv"):
        size = getattr(call, name)
        for less in dict.fromkeys((1, size // 2, size - 16, size - 1)):
            if 0 < less < size:
                yield (
                    {"seqlen_q": less, "seqlen_kv": less} if call.seqlen_q == call.seqlen_kv else {name: less}
                )
                yield {name: less}
    for width in _WIDTHS:
        if width < max(call.head_dim_qk, call.head_dim_v):
            yield {"head_dim_qk": width, "head_dim_v": width}
    yield {"head_dim_v": call.head_dim_qk}
