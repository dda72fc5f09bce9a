"""Bias objects: changes of the scaled scores before the softmax, which combine with `+`.

`attention(bias=...)` takes one. The order is fixed: scale, softcap, then the bias, the ALiBi term or the
function, then the mask, then the sink. Importing this module loads no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnroute.errors import ArgumentError, argument_error
from attnroute.masks import checks

if TYPE_CHECKING:
    from torch import Tensor

    ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

__all__ = ["ALiBi", "Bias", "Dense", "Function", "Softcap", "Sum"]


class Bias(ABC):
    """Base of every bias object."""

    @property
    def parts(self) -> tuple[Bias, ...]:
        """The parts of the sum; a single object is its own only part."""
        return (self,)

    @abstractmethod
    def _identity(self) -> object:
        """Return what `==` and `hash` compare: tensors and functions by identity, numbers by value."""

    def __add__(self, other: object) -> Bias:
        """Apply both, the softcap first whatever the order of the terms.

        Raises:
            ArgumentError: The other is no bias object, or both are of one kind.
        """
        if not isinstance(other, Bias):
            raise _not_a_bias(other)
        parts = (*self.parts, *other.parts)
        softcaps = [part for part in parts if isinstance(part, Softcap)]
        rest = [part for part in parts if not isinstance(part, Softcap)]
        for alike in (softcaps, rest):
            if len(alike) > 1:
                raise _twice(*alike[:2])
        return Sum((*softcaps, *rest))

    def __radd__(self, other: object) -> Bias:
        """Refuse what is no bias object."""
        raise _not_a_bias(other)

    def __bool__(self) -> bool:
        """A bias is neither true nor false.

        Raises:
            ArgumentError: Always; ``and`` and ``or`` would drop a bias without a word.
        """
        to_do = "combine biases with +, and compare with `is None`"
        raise argument_error("bool(bias)", "a value that is true or false", repr(self), to_do)

    def __eq__(self, other: object) -> bool:
        """Tensors are equal when they are the same tensor."""
        return type(self) is type(other) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._identity()))


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Bias):
    """A float tensor added to the scores.

    Args:
        tensor: Any float dtype; broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) from 1, 2 or 4
            dimensions. Gets a gradient when it requires one.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        """Check the type; the shape is checked against a call."""
        _floats("bias Dense", self.tensor, "pass a bool tensor as mask")

    def _identity(self) -> object:
        return id(self.tensor)

    def __repr__(self) -> str:
        """Name the shape, not the values."""
        return f"Dense({tuple(self.tensor.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Bias):
    """Adds ``-slope * |i + seqlen_kv - seqlen_q - j|`` to the score of query i and key j.

    Args:
        slopes: Float tensor (num_heads_q,) or (batch, num_heads_q). Gets a gradient when it requires one.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        """Check the type; the shape is checked against a call."""
        _floats("bias ALiBi slopes", self.slopes, "pass one number per query head")

    def _identity(self) -> object:
        return id(self.slopes)

    def __repr__(self) -> str:
        """Name the shape, not the values."""
        return f"ALiBi({tuple(self.slopes.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class Function(Bias):
    """Any change of a score from its value and its place, as FlexAttention's score_mod.

    Args:
        score_mod: ``(score, batch, head, query index, key index) -> score``, written with torch operators
            over 0-D tensors, integers but for the score. It gets the score after scale and softcap. Tensors
            that it closes over may change between calls, and get gradients when they require them.
    """

    score_mod: ScoreMod

    def __post_init__(self) -> None:
        """It must be callable."""
        checks.function("bias Function", self.score_mod)

    def _identity(self) -> object:
        return id(self.score_mod)

    def __repr__(self) -> str:
        """Name the function."""
        return f"Function({getattr(self.score_mod, '__qualname__', self.score_mod)})"


@dataclass(frozen=True, eq=False, repr=False)
class Softcap(Bias):
    """Scores become ``value * tanh(score / value)``.

    Args:
        value: A finite number of at least 0; 0.0 = off.
    """

    value: float

    def __post_init__(self) -> None:
        """Check the number."""
        checks.softcap("bias Softcap", self.value, "Python number")

    def _identity(self) -> object:
        return self.value

    def __repr__(self) -> str:
        """Return the code that makes it."""
        return f"Softcap({self.value})"


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """A softcap and a bias, as `+` makes it; the softcap comes first."""

    terms: tuple[Bias, ...]

    @property
    def parts(self) -> tuple[Bias, ...]:
        """The terms."""
        return self.terms

    def _identity(self) -> object:
        return self.terms

    def __repr__(self) -> str:
        """Return the code that makes it."""
        return " + ".join(map(repr, self.terms))


def _floats(name: str, tensor: object, to_do: str) -> None:
    if not (checks.is_tensor(tensor) and tensor.is_floating_point()):
        got = tensor.dtype if checks.is_tensor(tensor) else checks.kind_of(tensor)
        raise argument_error(name, "a floating-point tensor", got, to_do)
    checks.strided(name, tensor)


def _not_a_bias(other: object) -> ArgumentError:
    required = "bias objects on both sides (ALiBi, Dense, Function, Softcap)"
    return argument_error("+ of biases", required, type(other).__name__, "put a tensor into biases.Dense")


def _twice(first: Bias, second: Bias) -> ArgumentError:
    required = "at most one Softcap and one of ALiBi, Dense and Function"
    to_do = "add the tensors, or write one function that does both"
    return argument_error("+ of biases", required, f"{first!r} and {second!r}", to_do)
