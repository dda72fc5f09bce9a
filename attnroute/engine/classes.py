"""Classes of calls that only their lengths tell apart and that are decided alike.

A decoding loop asks about a new key length at every step. Rules read a length only through a few conditions
(`==1`, `>0`, `128 divides it`), so two calls with the same answers to those and the same other fields get the
same backend and repairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from attnroute.engine.quadratic import may_grow
from attnroute.engine.repairs import apply
from attnroute.question.call import Call, DocumentsNode
from attnroute.question.facts import LENGTH_FACTS, empty_rows_of, facts_of
from attnroute.question.normalize import normalize, recognized
from attnroute.tables import conditions
from attnroute.tables.preferences import preferences
from attnroute.tables.schema import AnyOf, Box, boxes_of
from attnroute.vocabulary import GRID_LIMIT

if TYPE_CHECKING:
    from attnroute.tables.conditions import Spec
    from attnroute.tables.load import Tables

Condition = tuple[str, "Spec"]


def class_of(call: Call, arch: str, tables: Tables) -> Hashable | None:
    """Return a value that is equal only for calls that `decide` treats alike on one host with one policy.

    Returns:
        None where lengths take part in more than conditions: batches and heads that must be split.
    """
    if call.batch > GRID_LIMIT or call.num_heads_q > GRID_LIMIT:
        return None
    forms = [normalize(call)]
    if (seen := recognized(call)) is not None:
        forms.append(seen)
    return tuple(_form(form, arch, tables) for form in forms)


def _form(call: Call, arch: str, tables: Tables) -> Hashable:
    facts = facts_of(call)
    fixed = tuple(value if name not in LENGTH_FACTS else None for name, value in facts.items())
    asked = tuple(
        conditions.evaluate(spec, facts[field], facts) for field, spec in length_conditions(tables, arch)
    )
    nodes = tuple((n.kind, n.contiguous if isinstance(n, DocumentsNode) else None) for n in call.mask)
    # What a materialised mask is depends on these, through the repairs.
    rows = empty_rows_of(call.with_(bias=None)) if call.mask else None
    derived = (call.seqlen_q > 1, rows)
    return (fixed, asked, nodes, derived, _repaired(call), call.context, call.qkv_requires_grad)


def _repaired(call: Call) -> Hashable:
    """What repairs read in a mask and no row can ask: the side of padding, what a disjunction is made of."""
    tensor = apply("materialize_mask", call)
    built = None if tensor is None else (facts_of(tensor[0])["mask_has_query_dim"], may_grow(call))
    return apply("to_varlen", call) is None, apply("materialize_alibi", call) is None, built


def length_conditions(tables: Tables, arch: str) -> tuple[Condition, ...]:
    """Return every condition on a length that a row of an architecture has."""
    return conditions_on(LENGTH_FACTS, tables, arch)


@lru_cache(maxsize=64)
def conditions_on(fields: frozenset[str], tables: Tables, arch: str) -> tuple[Condition, ...]:
    """Return every condition on some fields that a row of an architecture has."""
    found: dict[str, Condition] = {}
    for box in _boxes(tables, arch):
        for field, spec in box.items():
            if conditions.fields_in(field, spec) & fields:
                found[f"{field} {spec}"] = (field, spec)
    return tuple(found.values())


def _boxes(tables: Tables, arch: str) -> Iterator[Box]:
    parts: list[Box | AnyOf | str] = [row.preference.when for row in preferences(tables, arch)]
    for backend in tables.backends:
        parts += [row.option.when for row in tables.options(arch, backend)]
        for row in tables.rules(arch, backend) or ():
            parts += [row.rule.when, row.rule.requires]
    for part in parts:
        yield from boxes_of(part)
