"""The small condition grammar of the tables: parse, evaluate over four values, render.

Comma-joined terms `==x !=x <x <=x >x >=x %n` must all hold; x is a number, a bare word or another field. A
bool means equality, a list means one of. Nothing is ever executed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from attnroute.errors import did_you_mean, quoted, shortened
from attnroute.memory import PURE, Memory, cached
from attnroute.question.facts import FACTS, Unknown, Value, Varies

Facts = Mapping[str, Value]
Tri = Literal["true", "false", "varies", "unknown"]
Spec = bool | int | float | str | list[str] | list[int] | list[bool]

_TERM = re.compile(r"(==|!=|<=|>=|<|>|%)\s*(-?[\w.]+)", re.ASCII)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE]-?\d+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
_NUMBERS = {name for name, fact in FACTS.items() if fact.kind == "number"}
"""The fields that are numbers."""
_DIGITS = 30
"""A number with more characters is no size of anything."""


@dataclass(frozen=True, slots=True)
class Term:
    """One comparison of a field with a number, a word or another field."""

    op: str
    operand: int | float | str


@cached(4096)
def parse(text: str) -> tuple[Term, ...]:
    """Parse comma-joined terms.

    Raises:
        ValueError: A part is not an operator followed by a number or a word.
    """
    terms = []
    for part in text.split(","):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            msg = f'a condition requires terms like ">=8", "%8" or "==top_left"; got {quoted(part.strip())}.'
            raise ValueError(msg)
        term = Term(match[1], _operand(match[2]))
        if term.op == "%" and not (isinstance(term.operand, str) or _is_count(term.operand)):
            msg = f'a condition requires a whole number above 0 behind "%"; got {quoted(part.strip())}.'
            raise ValueError(msg)
        terms.append(term)
    return tuple(terms)


def check(field: str, spec: Spec) -> None:
    """Check that a condition says something about its field: a word that it can be, or a number.

    Raises:
        ValueError: The field is unknown, or can never have the value, or not be compared with it.
    """
    if field not in FACTS:
        near = did_you_mean(field, FACTS) or "."
        msg = f"a condition requires fields that attnroute.question.facts lists; got {quoted(field)}{near}"
        raise ValueError(msg)
    if spec == []:
        raise ValueError(f"{field} requires a list with something in it; got an empty one.")
    {"word": _check_word, "bool": _check_bool, "number": _check_number}[FACTS[field].kind](field, spec)


def _check_word(field: str, spec: Spec) -> None:
    words = FACTS[field].words
    terms = parse(spec) if isinstance(spec, str) else ()
    used = [t.operand for t in terms] if isinstance(spec, str) else spec if isinstance(spec, list) else [spec]
    wrong = [word for word in used if word not in words]
    if wrong or any(t.op not in ("==", "!=") for t in terms):
        required = f'"==", "!=" or a list with words among {", ".join(words)}'
        raise ValueError(f"{field} requires {required}; got {shortened(repr(spec))}.")


def _check_bool(field: str, spec: Spec) -> None:
    used = spec if isinstance(spec, list) else [spec]
    if not all(isinstance(value, bool) for value in used):
        raise ValueError(f"{field} requires true or false; got {shortened(repr(spec))}.")


def _check_number(field: str, spec: Spec) -> None:
    operands = [term.operand for term in parse(spec)] if isinstance(spec, str) else []
    used = spec if isinstance(spec, list) else operands or [spec]
    strange = [value for value in used if not (_is_number(value) or (operands and value in _NUMBERS))]
    if strange:
        near = (did_you_mean(strange[0], _NUMBERS) if isinstance(strange[0], str) else "") or "."
        got = quoted(strange[0]) if isinstance(strange[0], str) else str(strange[0]).lower()
        raise ValueError(f"{field} requires numbers or fields that are numbers; got {got}{near}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(operand: float) -> bool:
    return isinstance(operand, int) and operand > 0


def evaluate(spec: Spec, value: Value, facts: Facts) -> Tri:
    """Hold one field's value against its condition."""
    if isinstance(value, Unknown):
        return "unknown"
    if isinstance(spec, list):
        return "varies" if isinstance(value, Varies) else _tri(value in spec)
    if isinstance(spec, str):
        return combine_and(_term(term, value, facts) for term in parse(spec))
    return "varies" if isinstance(value, Varies) else _tri(value == spec)


class Check(NamedTuple):
    """One field of a box, or one term of its condition, prepared to be held against facts.

    Attributes:
        field: The field.
        holds: Takes a value that is known; None where the condition compares with another field.
        spec: The whole condition, for values that vary or that nobody stated.
    """

    field: str
    holds: Callable[[Any], Any] | None
    spec: Spec


class Compiled:
    """A `when` or a `requires`, compiled once: boxes of checks, all of one of which must hold.

    Equal parts of different rows are one object (`compiled`), so that each is answered once for a call.
    """

    __slots__ = ("boxes",)

    def __init__(self, boxes: Sequence[Mapping[str, Spec]]) -> None:
        """Compile boxes; none of them never holds."""
        self.boxes = tuple(
            tuple(check for field, spec in box.items() for check in _checks(field, spec)) for box in boxes
        )

    def answer(self, facts: Facts) -> Tri:
        """Return whether one of the boxes holds."""
        if len(self.boxes) == 1:
            return _held(self.boxes[0], facts)
        return combine_or(_held(box, facts) for box in self.boxes)


def _held(box: tuple[Check, ...], facts: Facts) -> Tri:
    """Return whether all checks of a box hold, as `combine_and` says it of the conditions."""
    result: Tri = "true"
    for field, holds, spec in box:
        value = facts[field]
        # Comparing in C costs a new class of calls no Python call for each of some hundred checks.
        if holds is not None and value.__class__ in KNOWN:
            if not holds(value):
                return "false"
        elif (found := evaluate(spec, value, facts)) == "false":
            return "false"
        elif found == "unknown" or (found == "varies" and result == "true"):
            result = found
    return result


KNOWN: Final = frozenset({bool, int, float, str})
_COMPILED: Final[Memory[str, Compiled]] = Memory(8192, f"{__name__}._COMPILED", PURE)


def compiled(boxes: Sequence[Mapping[str, Spec]]) -> Compiled:
    """Return boxes compiled; equal ones give the same object."""
    return _COMPILED.keep(repr(boxes), lambda: Compiled(boxes))


def _checks(field: str, spec: Spec) -> list[Check]:
    if isinstance(spec, list):
        return [Check(field, spec.__contains__, spec)]
    if not isinstance(spec, str):
        return [Check(field, partial(operator.eq, spec), spec)]
    terms = parse(spec)
    if any(term.operand in FACTS for term in terms):
        return [Check(field, None, spec)]
    return [Check(field, partial(_SWAPPED[term.op], term.operand), spec) for term in terms]


def fields_in(field: str, spec: Spec) -> set[str]:
    """Return the field of a condition and every other field that it is compared with."""
    terms = parse(spec) if isinstance(spec, str) else ()
    return {field, *(t.operand for t in terms if isinstance(t.operand, str) and t.operand in FACTS)}


def combine_and(parts: Iterable[Tri]) -> Tri:
    """All must hold: one false decides, and nothing behind it is looked at; then what is not certain."""
    return _combine(parts, decides="false", otherwise="true")


def combine_or(parts: Iterable[Tri]) -> Tri:
    """One must hold: one true decides, and nothing behind it is looked at; then what is not certain."""
    return _combine(parts, decides="true", otherwise="false")


def _combine(parts: Iterable[Tri], *, decides: Tri, otherwise: Tri) -> Tri:
    result = otherwise
    for part in parts:
        if part == decides:
            return decides
        if part == "unknown" or (part == "varies" and result == otherwise):
            result = part
    return result


def render(field: str, spec: Spec) -> str:
    """Say a condition as the table has it: `head_dim_qk >=8, <=256`."""
    if isinstance(spec, bool):
        return f"{field} = {str(spec).lower()}"
    if isinstance(spec, list):
        return f"{field} one of {', '.join(str(s) for s in spec)}"
    if isinstance(spec, str):
        return f"{field} {spec}"
    return f"{field} = {spec}"


def _operand(text: str) -> int | float | str:
    """Read what stands behind an operator: a number that can be compared, or a word."""
    if _WORD.fullmatch(text):
        return text
    if _NUMBER.fullmatch(text) and len(text) <= _DIGITS and math.isfinite(float(text)):
        return int(text) if text.removeprefix("-").isdecimal() else float(text)
    msg = f"a condition requires a word, or a finite number of at most {_DIGITS} digits; got {quoted(text)}."
    raise ValueError(msg)


def _tri(value: bool) -> Tri:
    return "true" if value else "false"


def _term(term: Term, value: Value, facts: Facts) -> Tri:
    operand: Value = term.operand
    if isinstance(operand, str) and operand in FACTS:
        operand = facts[operand]
    if isinstance(operand, Unknown) or isinstance(value, Unknown):
        return "unknown"
    if isinstance(operand, Varies):
        return "varies"
    if isinstance(value, Varies):
        return _varying(term.op, value.low, operand)
    if isinstance(value, str) or isinstance(operand, str):
        if term.op in ("==", "!="):
            return _tri((value == operand) is (term.op == "=="))
        msg = f'the operator "{term.op}" requires numbers; got {value!r} and {operand!r}.'
        raise TypeError(msg)
    return _tri(_SWAPPED[term.op](operand, value))


def _varying(op: str, low: int, operand: bool | float | str) -> Tri:
    """An integer from `low` up against a fixed operand: certain only below `low`."""
    if isinstance(operand, str):
        return "varies"
    below = operand < low
    if op in ("==", "<", "<="):
        certain = below or (op == "<" and operand <= low)
        return "false" if certain else "varies"
    if op in ("!=", ">"):
        return "true" if below else "varies"
    if op == ">=":
        return "true" if operand <= low else "varies"
    return "true" if operand == 1 else "varies"


def _divides(divisor: float, value: float) -> bool:
    return value % divisor == 0 if divisor else value == 0


_SWAPPED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.gt,
    "<=": operator.ge,
    ">": operator.lt,
    ">=": operator.le,
    "%": _divides,
}
"""What each operator asks, the operand first and the value behind it."""
