"""The registry of facts: what a row of the capability tables may ask about a call.

A row never computes. Where one needs arithmetic, a function marked with `@fact` computes it, and the row
names that function. The table grammar, the lint and the docs read this registry. A fact of a call is computed
when a row first reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar

from attnroute.vocabulary import Feature


@dataclass(frozen=True, slots=True)
class Varies:
    """An integer that may be anything from `low` up."""

    low: int = 1

    def __str__(self) -> str:
        """Say it as a reader meets it in a finding."""
        return "varies"


class Unknown:
    """A value that nobody stated."""

    def __str__(self) -> str:
        """Say it as a reader meets it in a finding."""
        return "unknown"


UNKNOWN: Final = Unknown()
Value = bool | int | float | str | Varies | Unknown
Kind = Literal["bool", "number", "word"]
Compute = TypeVar("Compute", bound=Callable[[Any], "Value"])


@dataclass(frozen=True, slots=True)
class Fact:
    """One field that rows may ask about.

    Attributes:
        doc: What it is.
        kind: What its values are.
        words: Every value, of a fact that is a word.
        reads_length: The value changes with nearly every length, so that calls are sorted by what rows ask
            about it instead of by the value.
        feature: What a kernel must have where the fact is true.
        compute: Computes it.
    """

    doc: str
    kind: Kind
    words: tuple[str, ...]
    reads_length: bool
    feature: Feature | None
    compute: Callable[[Any], Value]


FACTS: Final[dict[str, Fact]] = {}
"""Every fact by its name."""


def fact(
    kind: Kind = "bool",
    *,
    words: tuple[str, ...] = (),
    reads_length: bool = False,
    feature: Feature | None = None,
) -> Callable[[Compute], Compute]:
    """Register a function as the fact of its name; its docstring is what the fact is.

    Args:
        kind: What the values are; a fact that has `words` is a word.
        words: As in `Fact`.
        reads_length: As in `Fact`.
        feature: As in `Fact`.
    """

    def register(compute: Compute) -> Compute:
        doc = " ".join((compute.__doc__ or "").split()).removesuffix(".")
        _register(
            compute.__name__, Fact(doc, "word" if words else kind, words, reads_length, feature, compute)
        )
        return compute

    return register


def field(
    path: str,
    doc: str,
    kind: Kind = "bool",
    *,
    name: str | None = None,
    words: tuple[str, ...] = (),
    feature: Feature | None = None,
) -> None:
    """Register a field of the call as it stands.

    Args:
        path: Its place in the call, such as "strides.packed".
        doc: What it is.
        kind: What its values are; a fact that has `words` is a word.
        name: The name of the fact; that of the field by default.
        words: As in `Fact`.
        feature: As in `Fact`.
    """
    kind = "word" if words else kind
    _register(name or path.rpartition(".")[2], Fact(doc, kind, words, False, feature, attrgetter(path)))


def _register(name: str, new: Fact) -> None:
    if name in FACTS:
        raise ValueError(f"the fact {name} requires a name of its own; it is registered already.")
    FACTS[name] = new


class Facts(dict[str, Value]):
    """The facts of one call by name. Only what was read is in the dict; `facts[name]` computes the rest."""

    __slots__ = ("call",)

    def __init__(self, call: Any) -> None:
        """Compute nothing yet.

        Args:
            call: A `Call`, or the sizes of a tracer in its form.
        """
        self.call = call

    def __missing__(self, name: str) -> Value:
        """Compute a fact and keep it."""
        value = self[name] = FACTS[name].compute(self.call)
        return value


def facts_of(call: Any) -> dict[str, Value]:
    """Compute every fact of a call, in the order of the registry."""
    facts = Facts(call)
    return {name: facts[name] for name in FACTS}
