"""Turn a lowered mask into a text, tensors and numbers, which an operator of torch can take, and back.

The text is a Python literal in which `("tensor", n)` and `("number", n)` stand for the n-th of each.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor

from attnroute.masks.lowered.form import LoweredMask

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEFAULT: Final = LoweredMask()


class Flat(NamedTuple):
    """A lowered mask without functions and blocks.

    Attributes:
        text: A Python literal.
        tensors: Its tensors.
        numbers: Its numbers, which a tracer may leave open.
    """

    text: str
    tensors: list[Tensor]
    numbers: list[int]


def flatten(mask: LoweredMask) -> Flat:
    """Take a lowered mask apart. It may hold neither functions nor blocks."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    return Flat(repr(_taken(mask, tensors, numbers)), tensors, numbers)


def restore(text: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> LoweredMask:
    """Undo `flatten`."""
    made: LoweredMask = _made(literal_eval(text), tensors, numbers)
    return made


def _taken(value: Any, tensors: list[Tensor], numbers: list[int]) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, tuple):
        return ("tuple", *(_taken(part, tensors, numbers) for part in value))
    if isinstance(value, LoweredMask):
        stated = [(f.name, getattr(value, f.name)) for f in fields(value)]
        parts = ((n, _taken(v, tensors, numbers)) for n, v in stated if v is not getattr(_DEFAULT, n))
        return ("mask", *parts)
    numbers.append(value)
    return ("number", len(numbers) - 1)


def _made(value: Any, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *parts = value
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "number":
        return numbers[parts[0]]
    if kind == "tuple":
        return tuple(_made(part, tensors, numbers) for part in parts)
    return LoweredMask(**{name: _made(part, tensors, numbers) for name, part in parts})
