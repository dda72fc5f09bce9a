"""`attention()` under torch.compile and torch.export: no graph break, the decision a constant of the graph.

dynamo follows `attend` down to `_in_graph`, which gets tensors, numbers and words alone. From there on it is
plain Python that runs on the tracer's tensors, as the rest of attnroute does on real ones, and leaves the
operators of the kernel in the graph.

This module imports dynamo, so `attention()` imports it where a graph is made and nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from attnroute.api import in_force
from attnroute.biases import ALiBi, Bias, Dense, Softcap
from attnroute.masks.flat import is_flat, put_together, take_apart
from attnroute.masks.objects.base import Mask

Output = Tensor | tuple[Tensor, Tensor]
_MASK, _BIAS, _SOFTCAP, _SLOPES = 3, 4, 9, 11
_BOUNDS = (16, 17)
"""Where these stand among the arguments of `attention`; the bounds are max_seqlen_q and max_seqlen_kv."""


def attend(*given: Any) -> Output:
    """Run one call inside a graph.

    Masks and biases that hold functions stay outside of it: the call is then a graph break.
    """
    mask, bias = given[_MASK], given[_BIAS]
    if isinstance(mask, Mask) and not is_flat(mask):
        return _outside(*given)  # type: ignore[no-any-return]
    if isinstance(bias, Bias):
        if not all(type(part) in (ALiBi, Dense, Softcap) for part in bias.parts):
            return _outside(*given)  # type: ignore[no-any-return]
        given = _without_object(given, bias)
    elif type(mask).__name__ in ("BlockMask", "CausalBias"):
        return _outside(*given)  # type: ignore[no-any-return]
    tensors: list[Tensor] = []
    spec = take_apart(mask, tensors) if isinstance(mask, Mask) else None
    prefer = given[-1]
    if prefer is not None and not isinstance(prefer, str):
        prefer = tuple(prefer)
    before, after = given[:_MASK], given[_MASK + 1 : -1]
    mask = None if spec is not None else mask
    out, lse = _in_graph(in_force.words, spec, tensors, *before, mask, *after, prefer)
    return out if lse is None else (out, lse)


def _without_object(given: tuple[Any, ...], bias: Bias) -> tuple[Any, ...]:
    """Put the parts of a bias object where tensors and numbers are given."""
    slots = list(given)
    slots[_BIAS] = None
    for part in bias.parts:
        if isinstance(part, Softcap):
            slots[_SOFTCAP] = part.value
        elif isinstance(part, ALiBi):
            slots[_SLOPES] = part.slopes
        elif isinstance(part, Dense):
            slots[_BIAS] = part.tensor
    return tuple(slots)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(_: str, spec: Any, tensors: list[Tensor], *plain: Any) -> tuple[Tensor, Tensor | None]:
    """Run on the tracer's tensors; with a backend that traces no further, on real ones."""
    from attnroute.api import _attend

    mask = plain[_MASK] if spec is None else put_together(spec, tensors)
    rest = (v if n in _BOUNDS else _settled(v) for n, v in enumerate(plain[_MASK + 1 :], _MASK + 1))
    result = _attend(*plain[:_MASK], mask, *rest)
    return result if isinstance(result, tuple) else (result, None)


def _settled(value: Any) -> Any:
    """Make a number that the tracer left open a constant of the graph: code is compiled with it."""
    if isinstance(value, tuple):
        return tuple(_settled(part) for part in value)
    kind = {"SymInt": int, "SymFloat": float, "SymBool": bool}.get(type(value).__name__)
    return value if kind is None else kind(value)


def _attend_outside(*given: Any) -> Output:
    from attnroute.api import _attend

    return _attend(*given)


def _disabled() -> Any:
    """Return what runs a call outside of the graph; newer versions of torch say why."""
    reason = (
        "attnroute.attention() takes masks and biases into a graph that are made of numbers and tensors; this"
        " one has a mask function or a score function, whose call stays outside of it"
    )
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(_attend_outside, reason=reason)
    return torch.compiler.disable(_attend_outside)


_outside = _disabled()
