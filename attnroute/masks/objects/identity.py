"""Compare and print the fields of mask objects: numbers by value, tensors and functions by identity."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import MethodType
from typing import Final

from attnroute.masks.checks import is_tensor

SHOWN: Final = 8
"""Numbers of a tuple that are printed; a thousand document lengths would bury the rest of a line."""


class Same:
    """Stands for an object that is equal to itself only, whatever its own `==` does."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def identity(value: object) -> Hashable:
    """Return what stands for a field of a mask in `==` and `hash`."""
    if is_tensor(value):
        return Same(value)
    if isinstance(value, MethodType):
        return (Same(value.__self__), value.__func__)
    return Same(value) if callable(value) or not isinstance(value, Hashable) else value


def format_field(value: object) -> str:
    """Return a field of a mask as text: a tensor's dtype and shape, a function's name, all else by value."""
    if is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, tuple) and len(value) > SHOWN:
        first = ", ".join(map(repr, value[:SHOWN]))
        return f"({first}, ... {len(value)} in all)"
    return name_of(value) if callable(value) else repr(value)


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of an object that can be called."""
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
