"""Custom operators for graphs, each with its backward: how chunked, flex and the packages register theirs.

A graph holds such an operator where a tracer must not look inside. Eager calls run without them, because an
operator of Python costs the host several times what an autograd function does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Side(NamedTuple):
    """One direction of an operator.

    Attributes:
        schema: Its arguments and outputs.
        run: Computes it; outputs own their memory, and lie as the fake ones do.
        fake: Makes outputs without values, for tracers.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]


def register(
    name: str, forward: Side, backward: Side, *, save: Callable[..., None], gradients: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register the operators `attnroute::<name>` and `attnroute::<name>_backward`, and return them.

    Args:
        name: What both are called.
        forward: The operator that calls run.
        backward: The operator that its gradient runs.
        save: ``(ctx, inputs, output)``, keeps what the backward takes.
        gradients: ``(backward operator, ctx, *gradients of the outputs)``, one gradient for each argument.
    """
    operator, its_backward = (
        torch.library.custom_op(f"attnroute::{full_name}", side.run, mutates_args=(), schema=side.schema)
        for full_name, side in ((name, forward), (f"{name}_backward", backward))
    )
    operator.register_fake(forward.fake)
    its_backward.register_fake(backward.fake)
    operator.register_autograd(partial(gradients, its_backward), setup_context=save)
    return operator, its_backward


def spread(made: Iterable[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients at the places where they are wanted, None at the others."""
    following = iter(made)
    return [next(following) if wants else None for wants in wanted]


def no_gradient(value: object) -> Any:
    """Return what stands for "no gradient" in the place of one argument.

    torch takes a list that holds tensors alone apart, an empty one too, and any other one for a single value.
    """
    if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
        return [None] * len(value)
    return None
