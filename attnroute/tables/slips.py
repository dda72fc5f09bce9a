"""Makes what a row would say after a slip: a bound one step off, a word, a hole or a condition lost.

The examples of a row must tell it from each of these, or nobody would notice the slip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast, get_args

from packaging.specifiers import Specifier
from packaging.version import Version

from attnroute.question.facts import FACTS
from attnroute.tables.conditions import Spec, Term, parse, render
from attnroute.tables.points import around, options_of
from attnroute.tables.schema import AnyOf, Box, Rule, boxes_of
from attnroute.tables.versions import bound_of, contains
from attnroute.vocabulary import Phase

Releases = Mapping[str, Sequence[str]]
"""The published releases of each distribution, ascending."""
_REAL_STEPS: Final = {"dropout_p": 0.1, "softcap": 1.0, "head_dims_ratio": 0.25}
"""Facts that are no whole numbers, and by how much a bound of theirs is off."""
_PRODUCTS_FROM: Final = 100_000
"""A larger number is a product of sizes, most of whose values no call has: it is off by a sixteenth."""


_OTHER: Final = {"<": ">", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_FOLLOW: Final = frozenset({"none", "square", "mixed", "unknown"})
"""Words for what follows from other facts: with one of them more, a condition seldom means another thing."""
Sizes = tuple[str, tuple[float, ...]] | None


class Slip(NamedTuple):
    """A row after a slip.

    Attributes:
        said: What it says now, and where, as a clause.
        rule: The row.
        sizes: Where a bound moved or was lost, the field and values of it that may tell the difference.
    """

    said: str
    rule: Rule
    sizes: Sizes = None


class _Changed(NamedTuple):
    """Boxes after a slip; `said` and `sizes` as in `Slip`."""

    said: str
    boxes: list[Box]
    sizes: Sizes


def slips(rule: Rule, releases: Releases) -> Iterator[Slip]:
    """Give what a row would say after each slip that changes what it means.

    Args:
        rule: The row.
        releases: Of each distribution that it names, those for which it can hold.
    """
    if rule.phase is not None:
        yield Slip(f"phase left out in place of {rule.phase}", _with(rule, phase=None))
        other = next(phase for phase in get_args(Phase) if phase != rule.phase)
        yield Slip(f"phase {other} in place of {rule.phase}", _with(rule, phase=other))
    for part in ("when", "requires"):
        for said, boxes, sizes in _boxes(boxes_of(getattr(rule, part))):
            # A guard without a condition always holds, a requirement without one rejects nothing.
            if boxes or part == "when":
                value: Box | AnyOf = AnyOf.model_construct(any_of=boxes) if len(boxes) > 1 else {}
                changed = boxes[0] if len(boxes) == 1 else value
                yield Slip(f"{part} {said}", _with(rule, **{part: changed}), sizes)
    for name, ranges in rule.versions.items():
        for said, options in _ranges(name, options_of(ranges), releases.get(name, ())):
            rest = {other: kept for other, kept in rule.versions.items() if other != name}
            versions = {**rest, name: options} if options else rest
            yield Slip(f"versions.{name} {said}", _with(rule, versions=versions))


def _with(rule: Rule, **changes: object) -> Rule:
    """Return a row with other fields, without what was compiled of the old ones."""
    fields = {name: getattr(rule, name) for name in Rule.model_fields}
    return Rule.model_construct(**{**fields, **changes})


def _boxes(boxes: list[Box]) -> Iterator[_Changed]:
    for place, box in enumerate(boxes):
        before, after = boxes[:place], boxes[place + 1 :]
        if before or after:
            text = " and ".join(render(field, spec) for field, spec in box.items())
            yield _Changed(f"without {text}", [*before, *after], None)
        for field, spec in box.items():
            without = {name: value for name, value in box.items() if name != field}
            if without or len(boxes) == 1:
                kept = [without] if without else []
                yield _Changed(
                    f"without {render(field, spec)}", [*before, *kept, *after], _sizes(field, spec)
                )
            for other, values in _specs(field, spec, box):
                said = f"{render(field, other)} in place of {render(field, spec)}"
                yield _Changed(said, [*before, {**box, field: other}, *after], values)


def _sizes(field: str, spec: Spec) -> Sizes:
    """Return the values at the bounds of a condition about a number."""
    if FACTS[field].kind != "number" or isinstance(spec, list):
        return None
    operands = [term.operand for term in parse(spec)] if isinstance(spec, str) else [spec]
    numbers = [number for number in operands if not isinstance(number, str)]
    return field, tuple(number + step for number in numbers for step in (0, 1, -1))


def _specs(field: str, spec: Spec, box: Box) -> Iterator[tuple[Spec, Sizes]]:
    if isinstance(spec, bool):
        yield not spec, None
    elif isinstance(spec, list):
        yield from ((values, None) for values in _lists(field, spec))
    elif isinstance(spec, str):
        yield from _texts(field, parse(spec), box)
    else:
        step = _step(field, spec, box)
        yield from ((other, (field, (spec, other))) for other in (spec - step, spec + step))


def _lists(field: str, values: Sequence[str | int]) -> Iterator[Spec]:
    if len(values) > 1:
        for place in range(len(values)):
            yield cast("Spec", [*values[:place], *values[place + 1 :]])
    for word in FACTS[field].words:
        if word not in values and word not in _FOLLOW:
            yield cast("Spec", [*values, word])


def _texts(field: str, terms: tuple[Term, ...], box: Box) -> Iterator[tuple[Spec, Sizes]]:
    for place, term in enumerate(terms):
        before, after = terms[:place], terms[place + 1 :]
        if before or after:
            yield _joined((*before, *after)), _sizes(field, _joined([term]))
        for other in _terms(field, term, box):
            values = [t.operand for t in (term, other) if not isinstance(t.operand, str)]
            yield _joined((*before, other, *after)), (field, tuple(values)) if values else None


def _terms(field: str, term: Term, box: Box) -> Iterator[Term]:
    number = term.operand
    if (isinstance(number, str) or not number) and term.op in _OTHER:
        yield Term(_OTHER[term.op], number)
    if isinstance(number, str) or (not number and field in _REAL_STEPS):
        return
    if term.op == "%":
        yield Term("%", number * 2)
        if number % 2 == 0:
            yield Term("%", number // 2)
        return
    step = _step(field, number, box)
    for other in (number - step, number + step):
        yield Term(term.op, round(other, 6))


def _joined(terms: Sequence[Term]) -> str:
    return ", ".join(f"{term.op}{term.operand}" for term in terms)


def _step(field: str, number: float, box: Box) -> float:
    """Return by how much a number is off: by one of what it counts."""
    if field in _REAL_STEPS:
        return _REAL_STEPS[field]
    if number >= _PRODUCTS_FROM:
        return int(number) // 16
    spec = box.get(field)
    terms = parse(spec) if isinstance(spec, str) else ()
    return next((term.operand for term in terms if term.op == "%" and not isinstance(term.operand, str)), 1)


def _ranges(name: str, options: list[str], releases: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Give other ranges of one distribution that differ for a release that is known; none for no range."""
    found: list[tuple[str, list[str]]] = [("left out", [])]
    for place, option in enumerate(options):
        before, after = options[:place], options[place + 1 :]
        if before or after:
            found.append((f"without {option}", [*before, *after]))
        others = _options(name, option, releases)
        found += [(f"{other} in place of {option}", [*before, other, *after]) for other in others]
    held = [contains(options, name, release) for release in releases]
    for said, changed in found:
        if held != [not changed or contains(changed, name, release) for release in releases]:
            yield said, changed


def _options(name: str, option: str, releases: Sequence[str]) -> Iterator[str]:
    """Give a range with one of its bounds at the release before, at the one behind it, or lost."""
    terms = [term.strip() for term in option.split(",")]
    for place, term in enumerate(terms):
        match = re.match(r"[<>=!~]+", term)
        if match is None or term.endswith(".*"):
            continue
        op, bound = match[0], bound_of(name, Specifier(term))
        others = [f"{op}{moved}" for moved in _moved(op, bound, releases)]
        for other in [*others, ""] if len(terms) > 1 else others:
            yield ", ".join(t for t in (*terms[:place], other, *terms[place + 1 :]) if t)


def _moved(op: str, bound: Version, releases: Sequence[str]) -> list[str]:
    """Return the bounds that let one published release more, or one less, into a range."""
    published = [Version(release) for release in releases]
    is_below: Callable[[Version], bool] = bound.__gt__ if op in ("<", ">=") else bound.__ge__
    below = [str(v) for v in published if is_below(v)]
    above = [str(v) for v in published if not is_below(v)]
    if op in ("<", ">="):
        more = above[1] if len(above) > 1 else str(around(bound)[1])
        return [*below[-1:], more]
    if op in ("<=", ">"):
        fewer = below[-2] if len(below) > 1 else str(around(bound)[2])
        return [*above[:1], fewer]
    return [*[v for v in below if v != str(bound)][-1:], *above[:1]]
