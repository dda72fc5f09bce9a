"""Lengths that a compiled graph leaves open: it holds for all that a decision treats as it treated one.

A decision is made for the lengths of the call that is traced. Whatever a row or a declared order that could
change it asks about a length is then asked of the tracer's own lengths too, whose answers become conditions
of the graph: a length with another answer is traced anew, and no other one is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import SymInt

from attnroute.engine.evaluate import certainly_holds
from attnroute.facts import LENGTH_FACTS, Facts, facts_of, sizes_of
from attnroute.masks.normalize import normalize
from attnroute.tables import conditions
from attnroute.tables.schema import AnyOf, Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.call import Call
    from attnroute.engine.decision import Decision, Verdict
    from attnroute.masks.nodes import Extent
    from attnroute.tables.conditions import Spec
    from attnroute.tables.load import Tables
    from attnroute.tables.schema import Option, Order, Rule

OPEN: Final = frozenset({*LENGTH_FACTS, "batch"})
"""The fields that a tracer may leave open."""


class _Open:
    """A call whose batch and lengths are those of the tracer."""

    def __init__(self, call: Call, extent: Extent) -> None:
        self._call = call
        self.batch, _, self.seqlen_q, self.seqlen_kv, _ = extent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def hold(decision: Decision, extent: Extent, tables: Tables) -> None:
    """Make the answers to everything that could change a decision conditions of the graph.

    Args:
        decision: The decision, made with the lengths of the example.
        extent: The tracer's sizes.
        tables: The capability tables.
    """
    if not any(isinstance(n, SymInt) for n in extent[:4]):
        return
    call = normalize(decision.call)
    decision = decision.model_copy(update={"call": call})
    open_ = sizes_of(_Open(call, extent))  # type: ignore[arg-type]
    facts = {**facts_of(call), **{name: open_[name] for name in OPEN}}
    # Older versions of torch cannot compare an open answer with True.
    facts["seqlens_equal"] = bool(facts["seqlens_equal"])
    for field, spec in dict.fromkeys(_asked(decision, tables, facts_of(call))):
        conditions.evaluate(list(spec) if isinstance(spec, tuple) else spec, facts[field], facts)
    if call.mask and extent.seqlen_q > extent.seqlen_kv:
        # Which queries may attend no key depends on the lengths themselves.
        _close(extent)


def _asked(decision: Decision, tables: Tables, known: Facts) -> Iterator[tuple[str, Spec]]:
    """Yield every condition on an open field that could change the decision."""
    call, host, required = decision.call, decision.host, decision.policy.require
    for order in tables.arch(host.arch).order if required is None else ():
        yield from _open_conditions(order)
        # The first row that holds is used, and none behind it.
        if certainly_holds(order, call, known, host):
            break
    for verdict in decision.verdicts:
        rows = tables.rules(host.arch, verdict.backend) or ()
        if required not in (None, verdict.backend) or _is_out(verdict, {row.id: row.rule for row in rows}):
            continue
        for row in rows:
            yield from _open_conditions(row.rule)
        for option in tables.options(host.arch, verdict.backend):
            yield from _open_conditions(option.option)


def _is_out(verdict: Verdict, rules: dict[str, Rule]) -> bool:
    """Return whether a backend cannot run the call at any length: it is missing, or a row says so."""
    if verdict.missing:
        return True
    blocking = (rules.get(finding.rule) for finding in verdict.blocking)
    return any(rule is None or not any(_open_conditions(rule)) for rule in blocking)


def _open_conditions(row: Rule | Order | Option) -> Iterator[tuple[str, Spec]]:
    for part in (row.when, getattr(row, "requires", None)):
        for box in _boxes(part):
            for field, spec in box.items():
                terms = conditions.parse(spec) if isinstance(spec, str) else ()
                if {field, *(t.operand for t in terms if isinstance(t.operand, str))} & OPEN:
                    yield field, spec if not isinstance(spec, list) else tuple(spec)  # type: ignore[misc]


def _boxes(part: Box | AnyOf | str | None) -> list[Box]:
    if part is None or isinstance(part, str):
        return []
    return part.any_of if isinstance(part, AnyOf) else [part]


def open_lengths(call: Call, extent: Extent) -> Call:
    """Return the call with the lengths that the tracer leaves open stated as such."""
    sizes = {"batch": extent.batch, "seqlen_q": extent.seqlen_q, "seqlen_kv": extent.seqlen_kv}
    dynamic = tuple(name for name, size in sizes.items() if isinstance(size, SymInt))
    return call.with_(context=call.context.model_copy(update={"dynamic": dynamic}))


def _close(extent: Extent) -> None:
    """Make the lengths constants of the graph."""
    for length in (extent.seqlen_q, extent.seqlen_kv):
        int(length)
