"""Torch's attention operators by the way that costs least: eager calls and tracers differ in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnroute.masks.tracing import is_traced
from attnroute.memory import INSTALLED, cached


def operator_of(name: str, query: Tensor) -> Any:
    """Return what calls an operator of aten.

    The generated binding costs the host 2 us less. It returns lengths as numbers, though, which makes a
    tracer's open lengths constants of the graph: a tracer gets the operator itself.

    Args:
        name: The operator, which has one overload.
        query: A tensor of the call, which says who asks.
    """
    return _traced(name) if is_traced(query) else _eager(name)


@cached(64, INSTALLED)
def _traced(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


@cached(64, INSTALLED)
def _eager(name: str) -> Any:
    return getattr(torch, name)
