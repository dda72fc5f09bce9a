"""What torch's attention operators share: how they are called, and the mask in the form that they take."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import as_4d
from attnroute.masks.tracing import is_traced
from attnroute.memory import INSTALLED, cached


def operator_of(name: str, query: Tensor) -> Any:
    """Return what calls an operator of aten.

    The generated binding costs the host 2 us less. It returns lengths as numbers, though, which makes a
    tracer's open lengths constants of the graph: a tracer gets the operator itself.

    Args:
        name: The operator, which has one overload.
        query: A tensor of the call, a tracer's or not.
    """
    return _traced(name) if is_traced(query) else _eager(name)


def scaled(operator: Any, scale: float | None) -> Any:
    """Return an operator that has the scale: each argument that is read costs the host."""
    return operator if scale is None else partial(operator, scale=scale)


def attn_of(inputs: Inputs) -> Tensor | None:
    """Return the mask or bias as a tensor of four dimensions, None where none is needed."""
    return None if inputs.attn is None else as_4d(inputs.attn)


def is_causal(inputs: Inputs) -> bool:
    """Return the argument of this name: the mask is causal, and no tensor stands for it."""
    return inputs.attn is None and inputs.mask.band_hi is not None


@cached(64, INSTALLED)
def _traced(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


@cached(64, INSTALLED)
def _eager(name: str) -> Any:
    return getattr(torch, name)
