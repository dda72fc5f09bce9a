"""Masks as a description without tensors, and the tensors: what a tracer can carry into its graph."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

if TYPE_CHECKING:
    from attnroute.masks.objects.nodes import Mask

Spec = Any
"""A nested tuple of words and numbers; `("tensor", n)` stands for the n-th tensor."""

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "Causal": ("alignment",),
    "Window": ("left", "right", "alignment"),
    "Documents": ("lengths", "ids", "cu_seqlens", "position_ids"),
    "KeyPadding": ("lengths", "left", "keep", "finite"),
    "PrefixLM": ("lengths", "alignment"),
    "Dense": ("tensor",),
    "All": ("parts",),
    "Either": ("parts",),
    "Not": ("part",),
    "Ragged": (
        "cu_seqlens",
        "cu_seqlens_kv",
        "max_seqlen",
        "max_seqlen_kv",
        "left",
        "right",
        "alignment",
    ),
}
"""The masks that are made of numbers and tensors alone, with the arguments that make them."""


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
    if kind == "tuple":
        return tuple(made)
    return _class(kind)(**dict(zip(FIELDS[kind], made, strict=True)))


def _class(name: str) -> type[Mask]:
    module = "attnroute.masks.objects.ragged" if name == "Ragged" else "attnroute.masks"
    found: type[Mask] = getattr(import_module(module), name)
    return found
