"""Groups calls that differ only in their lengths and get the same decision, for a cache of decisions.

A decoding loop has a new key length at every step. Rules read a length only through a few conditions
(`==1`, `>0`, `128 divides it`), and times are predicted for rounded lengths. So two calls with the same
results of those, the same rounded lengths and the same other fields get the same backend and repairs.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.engine.evaluate import ROUTE_SCOPES
from attnroute.engine.quadratic import may_grow
from attnroute.engine.repairs import SUMS_LIMIT, apply
from attnroute.engine.rounding import rounded, rounded_call
from attnroute.memory import TABLES, cached
from attnroute.question.call import Call, Context, Strides
from attnroute.question.facts import FACTS, LENGTH_FACTS, Facts, empty_rows_of
from attnroute.question.nodes import DocumentsNode, KeyPaddingNode, WindowNode
from attnroute.question.normalize import normalize, recognized
from attnroute.tables import conditions
from attnroute.tables.costs import costs_of
from attnroute.tables.preferences import preferences
from attnroute.tables.schema import AnyOf, Box, boxes_of
from attnroute.vocabulary import GRID_LIMIT

if TYPE_CHECKING:
    from attnroute.tables.conditions import Spec
    from attnroute.tables.folders import Tables

Condition = tuple[str, "Spec"]

_FIXED: Final = operator.attrgetter(
    *(
        "dtype",
        "batch",
        "num_heads_q",
        "num_heads_kv",
        "head_dim_qk",
        "head_dim_v",
        "layout",
        "phase",
        "scale",
    ),
    *("softcap", "sink", "dropout_p", "deterministic", "return_lse", "qkv_requires_grad"),
    *(f"strides.{name}" for name in Strides.model_fields),
    *(f"context.{name}" for name in Context.model_fields),
)
"""Every field of a call but its lengths, mask and bias."""
QUERY_FACTS: Final = frozenset(
    {
        *("seqlen_q", "seqlen_q_mod_128", "group_queries", "query_reach", "query_elements"),
        *("dq_accumulator_elements", "dq_accumulator_elements_wide", "dq_accumulator_row_elements"),
    }
)
"""Facts that read lengths, and not the number of keys."""
_SETTLED: Final = {"seqlens_equal", "mask_tensor_elements"}
"""Facts that are the same for any number of keys above that of queries, where no tensor takes part."""
RISING_FACTS: Final = frozenset({"seqlen_kv", "key_reach", "key_elements", "mask_elements", "score_elements"})
"""Facts that rise with the number of keys."""
_ORDERS: Final = frozenset({operator.lt, operator.le, operator.gt, operator.ge})
_KEYS_KEPT: Final = 2
"""A span reaches up to so many times its first number of keys."""
_LENGTHS: Final = {"seqlen_q", "seqlen_kv"}
_OF_NUMBER: Final = {"seqlen_kv", "seqlen_kv_mod_128"}
_OTHER_FACTS: Final = tuple(name for name in FACTS if name not in LENGTH_FACTS)


def class_of(call: Call, arch: str, tables: Tables) -> Hashable | None:
    """Return a value that is equal only for calls that `decide` treats alike on one host with one policy.

    Returns:
        None where lengths take part in more than conditions: batches and heads that must be split.
    """
    if call.batch > GRID_LIMIT or call.num_heads_q > GRID_LIMIT:
        return None
    given = _form(normalize(call), arch, tables)
    read = recognized(call) if call.mask else None
    return given if read is None else (given, _form(read, arch, tables))


def class_of_keys(call: Call, arch: str, tables: Tables) -> Hashable | None:
    """Return what of `class_of` changes with the number of keys alone, in a tenth of its time.

    Each step of decoding asks for it. Of two calls that differ only in that number, equal values mean equal
    classes.

    Returns:
        None where the number takes part in more: in a band, a tensor, a bias; where keys are few.
    """
    if call.batch > GRID_LIMIT or call.num_heads_q > GRID_LIMIT:
        return None
    # With more keys than queries, padding whose counts nobody states is normalized alike at every number.
    if not _is_padding(call) or call.seqlen_kv < _few_keys(call):
        return None
    facts = Facts(call)
    return (_answers(facts, _key_checks(tables, arch)), _size(call.seqlen_kv, arch, tables), _grows(facts))


def _size(number: int, arch: str, tables: Tables) -> int | None:
    """Return what a number of keys counts as where times put backends in order."""
    return rounded(number) if _has_costs(tables, arch) else None


def _grows(facts: Facts) -> Hashable:
    """Return whether a mask that is built for a call with padding is large, and sums of sequences are."""
    call = facts.call
    return call.mask and (may_grow(facts), call.batch * call.seqlen_kv <= SUMS_LIMIT)


class Span(NamedTuple):
    """Numbers of keys between which no condition of order changes its answer, nor a rounded length its value.

    Attributes:
        numbers: From a call's own number on.
        others: Other conditions that read the number itself.
    """

    numbers: range
    others: tuple[conditions.Check, ...]

    def answers(self, number: int) -> Hashable:
        """Return a value that two of these numbers share only where `class_of_keys` does too."""
        values = {"seqlen_kv": number, "seqlen_kv_mod_128": number % 128}
        return tuple([holds(values[field]) for field, holds, _ in self.others])  # type: ignore[misc] # each holds


def span_of(call: Call, arch: str, tables: Tables) -> Span | None:
    """Return numbers of keys from that of a call on whose classes are known by a few conditions.

    Returns:
        None where `class_of_keys` is, or where a condition is of another kind.
    """
    if class_of_keys(call, arch, tables) is None:
        return None
    checks = _key_checks(tables, arch)
    ordered = tuple(
        c for c in checks if c.field in RISING_FACTS and getattr(c.holds, "func", None) in _ORDERS
    )
    others = tuple(c for c in checks if c not in ordered)
    if any(c.holds is None or c.field not in _OF_NUMBER for c in others):
        return None

    def asked(number: int) -> Hashable:
        facts = Facts(call.changed(seqlen_kv=number))
        return _size(number, arch, tables), _answers(facts, ordered), _grows(facts)

    first = call.seqlen_kv
    now, numbers = asked(first), range(first, _KEYS_KEPT * first)
    return Span(numbers[: bisect_left(numbers, True, key=lambda n: asked(n) != now)], others)


def _form(call: Call, arch: str, tables: Tables) -> Hashable:
    facts = Facts(call)
    is_plain = not call.mask and call.bias is None
    mask = empty_rows_of(call) if is_plain else _mask(call, facts)
    answers = _answers(facts, _length_checks(tables, arch))
    # What times are predicted for.
    sizes = rounded_call(call) if _has_costs(tables, arch) else None
    return (_FIXED(call), mask, answers, sizes)


@cached(64, TABLES)
def _has_costs(tables: Tables, arch: str) -> bool:
    """Whether times put any backend of an architecture in order."""
    found = [costs_of(tables, arch, backend) for backend in tables.backends]
    return any(costs is not None and costs.is_own for costs in found)


def _mask(call: Call, facts: Facts) -> Hashable:
    """Return what decisions read in mask and bias, their sizes aside."""
    # Whether a mask that is built makes memory quadratic, and what it then is, depends on these.
    sizes = (may_grow(facts), call.seqlen_q > 1)
    if call.bias is None and facts["band_only"]:
        bands = [(n.left, n.right) if isinstance(n, WindowNode) else n.kind for n in call.mask]
        return (tuple(bands), facts["alignment"], empty_rows_of(call), sizes)
    like = _at_few_keys(call)
    return (_parts(call, facts) if like is None else _parts_at_few_keys(like), sizes)


def _at_few_keys(call: Call) -> Call | None:
    """Return a call with few keys of which `_parts` says the same; None where there may be none.

    Padding whose counts nobody states is the same at every number of keys above that of queries.
    """
    few = _few_keys(call)
    if not _is_padding(call) or call.seqlen_kv < few:
        return None
    return call.changed(seqlen_kv=few) if call.batch * call.seqlen_kv <= SUMS_LIMIT else None


def _is_padding(call: Call) -> bool:
    """Return whether keys are left out by padding alone, if at all, whose counts nobody states."""
    others = [n for n in call.mask if not isinstance(n, KeyPaddingNode) or n.lengths is not None]
    return not others and call.bias is None and not call.context.dynamic


def _few_keys(call: Call) -> int:
    """Return a number of keys that every larger one is like, for padding."""
    return call.seqlen_q + 2


@cached(256)
def _parts_at_few_keys(call: Call) -> Hashable:
    """Keep `_parts`, which takes hundreds of Python calls, for the steps of decoding."""
    return _parts(call, Facts(call))


def _parts(call: Call, facts: Facts) -> Hashable:
    nodes = tuple((n.kind, n.contiguous if isinstance(n, DocumentsNode) else None) for n in call.mask)
    rows = empty_rows_of(call.changed(bias=None)) if call.mask else None
    return (tuple(facts[name] for name in _OTHER_FACTS), nodes, rows, _repaired(call, facts))


def _repaired(call: Call, facts: Facts) -> Hashable:
    """Return what repairs read in a mask and no fact has: the side of padding, the parts of a disjunction."""
    tensor = apply("materialize_mask", call)
    built = None if tensor is None else (Facts(tensor[0])["mask_has_query_dim"], may_grow(facts))
    return apply("to_varlen", call) is None, apply("materialize_alibi", call) is None, built


def _answers(facts: Facts, checks: tuple[conditions.Check, ...]) -> Hashable:
    """Evaluate the conditions on lengths for a call, without a Python call for each."""
    found: list[object] = []
    for field, test, spec in checks:
        value = facts[field]
        if test is None or value.__class__ not in conditions.KNOWN:
            found.append(conditions.evaluate(spec, value, facts))
        else:
            found.append(test(value))
    return tuple(found)


@cached(64, TABLES)
def _length_checks(tables: Tables, arch: str) -> tuple[conditions.Check, ...]:
    """Return the conditions on lengths of an architecture, compiled, each term once."""
    return _compiled(length_conditions(tables, arch))


@cached(64, TABLES)
def _key_checks(tables: Tables, arch: str) -> tuple[conditions.Check, ...]:
    """Return those that the number of keys may change, where it is larger than that of queries."""
    found = length_conditions(tables, arch)
    return _compiled([(field, spec) for field, spec in found if _reads_keys(field, spec)])


def _reads_keys(field: str, spec: Spec) -> bool:
    compared = conditions.fields_in(field, spec)
    terms = conditions.parse(spec) if isinstance(spec, str) else ()
    is_order = len(compared) == len(terms) + 1 and all(term.op != "%" for term in terms)
    return bool(compared & (LENGTH_FACTS - QUERY_FACTS - _SETTLED)) and not (
        compared == _LENGTHS and is_order
    )


def _compiled(found: Iterable[Condition]) -> tuple[conditions.Check, ...]:
    boxes = [{field: spec} for field, spec in found]
    return tuple(check for box in conditions.compiled(boxes).boxes for check in box)


def length_conditions(tables: Tables, arch: str) -> tuple[Condition, ...]:
    """Return every condition on a length that a row of an architecture has."""
    found: dict[str, Condition] = {}
    for box in _boxes(tables, arch):
        for field, spec in box.items():
            if conditions.fields_in(field, spec) & LENGTH_FACTS:
                found[f"{field} {spec}"] = (field, spec)
    return tuple(found.values())


def _boxes(tables: Tables, arch: str) -> Iterator[Box]:
    parts: list[Box | AnyOf | str] = [row.preference.when for row in preferences(tables, arch)]
    for backend in tables.backends:
        rules = [row.rule for row in tables.rules(arch, backend) or () if row.rule.scope in ROUTE_SCOPES]
        if any(rule.is_absolute for rule in rules):
            # Without a kernel for the device it is rejected whatever its other rows say.
            continue
        parts += [row.option.when for row in tables.options(arch, backend)]
        for rule in rules:
            parts += [rule.when, rule.requires]
    for part in parts:
        yield from boxes_of(part)
