"""`attention()` under torch.compile and torch.export: no graph break, the decision a constant of the graph.

dynamo follows `run` down to `_in_graph`, which gets tensors, numbers and strings alone. From there on the
Python of eager calls runs on the tracer's tensors, and leaves the operators of the kernel in the graph.

This module imports dynamo, so `attention()` imports it where a graph is made and nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from attnroute import scopes
from attnroute.api import dispatch
from attnroute.api.records import Given, Output
from attnroute.biases import ALiBi, Bias, Dense, Softcap
from attnroute.masks.flat import is_flat, made_of, put_together, take_apart
from attnroute.masks.objects.base import Mask

_BOUNDS = ("max_seqlen_q", "max_seqlen_kv")
"""Numbers that no code is made for."""


def run(given: Given) -> Output:
    """Run one call inside a graph.

    Masks and biases with functions stay outside of it: the call is then a graph break.
    """
    mask, bias = given.mask, given.bias
    changes: dict[str, Any] = {}
    if isinstance(mask, Mask) and not is_flat(mask):
        return _outside(given)  # type: ignore[no-any-return]
    if isinstance(bias, Bias):
        if not all(type(part) in (ALiBi, Dense, Softcap) for part in bias.parts):
            return _outside(given)  # type: ignore[no-any-return]
        changes = _as_arguments(bias)
    elif type(mask).__name__ in ("BlockMask", "CausalBias"):
        return _outside(given)  # type: ignore[no-any-return]
    tensors: list[Tensor] = []
    spec = None
    if isinstance(mask, Mask):
        spec = take_apart(mask, tensors)
        changes["mask"] = None
    if given.prefer is not None and not isinstance(given.prefer, str):
        changes["prefer"] = tuple(given.prefer)
    arguments = list(given)
    if changes:
        arguments = [changes.get(name, value) for name, value in zip(Given._fields, given, strict=True)]
    return _in_graph(scopes.override_guard, spec, tensors, *arguments)  # type: ignore[no-any-return]


def _as_arguments(bias: Bias) -> dict[str, Any]:
    """Return the tensors and numbers of a bias object as the arguments that mean the same."""
    found: dict[str, Any] = {"bias": None}
    for part in bias.parts:
        if isinstance(part, Softcap):
            found["softcap"] = part.value
        elif isinstance(part, ALiBi):
            found["alibi_slopes"] = part.slopes
        elif isinstance(part, Dense):
            found["bias"] = part.tensor
    return found


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(_: str, spec: Any, tensors: list[Tensor], *arguments: Any) -> Output:
    """Run on the tracer's tensors; with a backend that traces no further, on real ones.

    The first argument is read by nobody: it makes what `override()` says a condition of the graph.
    """
    given = Given(*arguments)
    constants = {
        name: _constant(value)
        for name, value in zip(Given._fields, given, strict=True)
        if name not in _BOUNDS and (type(value) is tuple or type(value).__name__ in _KINDS)
    }
    if spec is not None:
        constants["mask"] = put_together(spec, tensors)
    elif isinstance(given.mask, Tensor) and given.layout == "bhsd":
        constants["mask"] = made_of(given.mask, given.query.shape[-2], given.key.shape[-2])
    return dispatch.run(given._replace(**constants) if constants else given)


_KINDS = {"SymInt": int, "SymFloat": float, "SymBool": bool}


def _constant(value: Any) -> Any:
    """Make a number that the tracer left open a constant of the graph: code is compiled with it."""
    if isinstance(value, tuple):
        return tuple(_constant(part) for part in value)
    kind = _KINDS.get(type(value).__name__)
    return value if kind is None else kind(value)


def _disabled() -> Any:
    """Return what runs a call outside of the graph; newer versions of torch say why."""
    reason = (
        "attnroute.attention() takes masks and biases into a graph that are made of numbers and tensors; this"
        " one has a mask function or a score function, whose call stays outside of it"
    )
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        return torch.compiler.disable(dispatch.run, reason=reason)
    return torch.compiler.disable(dispatch.run)


_outside = _disabled()
