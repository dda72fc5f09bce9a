"""Turn mask objects into nested tuples and tensors, which torch.compile can put into a graph, and back.

Where code between wants a tensor, `as_tensor` makes one. The tracers of a graph hand the same Python object
from call to call, so `made_of` finds the mask behind it: nothing reads the tensor, and no graph makes it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.masks.objects.arbitrary import Dense
from attnroute.masks.objects.bands import Causal, PrefixLM, Window
from attnroute.masks.objects.base import All, Either, Mask, Not
from attnroute.masks.objects.ragged import Ragged
from attnroute.masks.objects.tokens import Documents, KeyPadding

Spec = Any
"""A nested tuple of words and numbers; `("tensor", n)` stands for the n-th tensor."""

_CLASSES: Final = {
    kind.__name__: kind
    for kind in (All, Causal, Dense, Documents, Either, KeyPadding, Not, PrefixLM, Ragged, Window)
}
"""The masks that are made of numbers, tensors and such masks alone. By name, as dynamo follows `is_flat`."""
FIELDS: Final = {name: tuple(field.name for field in fields(kind)) for name, kind in _CLASSES.items()}
"""The arguments that make them."""


def is_flat(mask: object) -> bool:
    """Return whether a mask is made of numbers and tensors alone."""
    name = type(mask).__name__
    if name in ("All", "Either"):
        return all(is_flat(part) for part in mask.parts)  # type: ignore[attr-defined]
    return is_flat(mask.part) if name == "Not" else name in FIELDS  # type: ignore[attr-defined]


def take_apart(mask: object, tensors: list[Tensor]) -> Spec:
    """Return a mask's description, appending its tensors."""
    if isinstance(mask, Tensor):
        tensors.append(mask)
        return ("tensor", len(tensors) - 1)
    if isinstance(mask, tuple | list):
        return ("tuple", *[take_apart(part, tensors) for part in mask])
    name = type(mask).__name__
    if name not in FIELDS:
        return ("value", mask)
    return (name, *[take_apart(getattr(mask, field), tensors) for field in FIELDS[name]])


def put_together(spec: Spec, tensors: list[Tensor]) -> Any:
    """Return what `take_apart` took apart."""
    kind, *parts = spec
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "value":
        # A number that varies would be a number of the tracer's, where a mask has numbers of its own.
        return int(parts[0]) if type(parts[0]).__name__ == "SymInt" else parts[0]
    made = [put_together(part, tensors) for part in parts]
    return tuple(made) if kind == "tuple" else _CLASSES[kind](*made)


def as_tensor(mask: Mask, sizes: tuple[int, int, int], device: torch.device | str) -> Tensor:
    """Return a mask of numbers and tensors as a tensor of the graph that is being made.

    Args:
        mask: The mask.
        sizes: Batch size, queries and keys.
        device: Where the tensor lies.

    Returns:
        Bool tensor (batch, 1, seqlen_q, seqlen_kv), True = attend. Calls of `attention()` in this graph that
        get the tensor itself run with the mask; what is made from it is a tensor like any other.
    """
    tensors: list[Tensor] = []
    spec = take_apart(mask, tensors)
    return _as_tensor(spec, tensors, *sizes, device)  # type: ignore[no-any-return]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _as_tensor(
    spec: Spec, tensors: list[Tensor], batch: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str
) -> Tensor:
    # Somebody may write into the tensors later, which changes no mask that was made of them.
    mask: Mask = put_together(spec, [tensor.clone() for tensor in tensors])
    found = mask.materialize(seqlen_q, seqlen_kv, batch=batch, device=device)
    found = found.expand(batch, 1, seqlen_q, seqlen_kv).clone()
    found.made_of = mask, found._version  # type: ignore[attr-defined]
    return found


def made_of(tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask | Tensor:
    """Return the mask that `as_tensor` made a tensor of for these lengths; else the tensor.

    It counts itself where somebody wrote into it, or where it is to broadcast.
    """
    mask, version = getattr(tensor, "made_of", (tensor, None))
    same = version == tensor._version and tuple(tensor.shape[-2:]) == (seqlen_q, seqlen_kv)
    return mask if same else tensor
