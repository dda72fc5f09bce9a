"""Finds the conditions on lengths that a decision depends on: while their results stay, so does the decision.

A compiled graph leaves lengths open. It serves every length at which these conditions have the results that
they had when the graph was made. Predicted times are no conditions: of the backends that have one, the
fastest at the lengths of the call that is traced stays, so that no graph is made anew for a length alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.engine import repairs
from attnroute.engine.evaluate import ROUTE_SCOPES, certainly_holds, may_apply, prepared
from attnroute.engine.quadratic import SMALL_MASK, tensor_bytes
from attnroute.engine.rank import may_precede, preferred, time_ms
from attnroute.question.facts import BATCH_FACTS, LENGTH_FACTS, Facts, facts_of
from attnroute.question.nodes import AlibiBias
from attnroute.tables import conditions
from attnroute.tables.preferences import preferences
from attnroute.tables.schema import AnyOf, Box, Rule, boxes_of
from attnroute.vocabulary import BUILD_MASKS, SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.engine.decision import Decision, Verdict
    from attnroute.question.call import Call
    from attnroute.tables.conditions import Spec, Tri
    from attnroute.tables.folders import Tables
    from attnroute.tables.schema import Option, Preference

OPEN: Final = LENGTH_FACTS | BATCH_FACTS
"""The fields that a tracer may leave open."""

Condition = tuple[str, "Spec"]
Fields = frozenset[str]


class OpenBox(NamedTuple):
    """The conditions of one box that read the fields.

    Attributes:
        conditions: These conditions, without those on other fields.
        decides: The other conditions are certainly true, so these decide whether the box is.
    """

    conditions: tuple[Condition, ...]
    decides: bool


class OpenRow(NamedTuple):
    """The conditions of one row that read the fields, without boxes that other fields make false.

    Attributes:
        when: The boxes of which one makes the row apply.
        requires: The boxes of which one must then be true.
        exact: Evaluation may stop early: at the first false condition of a box, and before `requires` where
            the row does not apply. False where it is unknown which repairs other lengths would need.
    """

    when: tuple[OpenBox, ...]
    requires: tuple[OpenBox, ...]
    exact: bool


class _Resized:
    """A call of other sizes, which may be numbers of a tracer."""

    def __init__(self, call: Call, batch: Any, seqlen_q: Any, seqlen_kv: Any) -> None:
        self._call, self.batch, self.seqlen_q, self.seqlen_kv = call, batch, seqlen_q, seqlen_kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def open_facts(call: Call, batch: Any, seqlen_q: Any, seqlen_kv: Any) -> dict[str, Any]:
    """Return the facts of a call, those that may be open computed from other sizes than its own."""
    sizes = Facts(_Resized(call, batch, seqlen_q, seqlen_kv))
    return {**facts_of(call), **{name: sizes[name] for name in OPEN}}


def open_rows(decision: Decision, tables: Tables, fields: Fields) -> tuple[OpenRow, ...]:
    """Return the conditions on some fields that could change a decision, row by row.

    Args:
        decision: A decision about a normalised call.
        tables: The capability tables that it was made with.
        fields: The fields whose values may change.
    """
    found = (row for row in _rows(decision, tables, fields) if row is not None)
    return tuple(row for row in found if any(box.conditions for box in (*row.when, *row.requires)))


def evaluate_row(row: OpenRow, facts: conditions.Facts) -> None:
    """Evaluate a row's conditions; on a tracer's sizes each result becomes a guard of the graph."""
    applies = _evaluate_boxes(row.when, facts, stop=row.exact)
    if applies or not row.exact:
        _evaluate_boxes(row.requires, facts, stop=row.exact)


def _evaluate_boxes(boxes: tuple[OpenBox, ...], facts: conditions.Facts, *, stop: bool) -> bool:
    """Evaluate box after box until one is certainly true; return whether any is not certainly false."""
    possible = False
    for box in boxes:
        result = _all_true(box.conditions, facts, stop=stop)
        possible = possible or result != "false"
        if stop and box.decides and result == "true":
            break
    return possible


def _all_true(box: tuple[Condition, ...], facts: conditions.Facts, *, stop: bool) -> Tri:
    results = (conditions.evaluate(spec, facts[field], facts) for field, spec in box)
    # Evaluation is lazy: a condition that is not reached becomes no guard of the graph.
    return conditions.combine_and(results if stop else list(results))


def _rows(decision: Decision, tables: Tables, fields: Fields) -> Iterator[OpenRow | None]:
    call = decision.call
    able = [verdict for verdict in decision.verdicts if not _is_excluded(verdict)]
    rows = {verdict.backend: _applicable_rules(verdict, decision, tables) for verdict in able}
    possible = [verdict for verdict in able if not _stays_out(verdict, rows[verdict.backend], fields)]
    times = {verdict.backend: _own_ms(verdict, decision, tables) for verdict in possible}
    yield from _of_preferences(decision, tables, fields, times)
    yield from _of_masks(decision)
    if isinstance(call.bias, AlibiBias):
        per_head = repairs.SMALL_BIAS // max(1, call.num_heads_q)
        yield _condition("mask_elements", f"<={per_head}")
    preferences_here = preferred(Facts(call), decision.host, tables)
    for verdict in possible:
        own = times[verdict.backend]
        if may_precede(verdict.backend, own, decision, preferences_here, tables.slow_tier):
            options = [row.option for row in tables.options(decision.host.arch, verdict.backend)]
            yield from _of_backend(verdict, decision, rows[verdict.backend], options, fields)


def _condition(field: str, spec: Spec) -> OpenRow:
    return OpenRow((OpenBox(((field, spec),), decides=True),), (), exact=True)


def _own_ms(verdict: Verdict, decision: Decision, tables: Tables) -> float | None:
    """Return what a backend takes, or would if no row ruled it out; None where no time is predicted."""
    if verdict.predicted_ms is not None:
        return verdict.ranked_ms
    call = decision.call
    cost = prepared(tables, decision.host)[verdict.backend].cost(call, call, (), ())
    return None if cost is None or cost.kind == "inferred" else time_ms(cost, call) + verdict.plan_share_ms


def _of_masks(decision: Decision) -> Iterator[OpenRow]:
    """Yield the conditions on the size of masks that are built, which decide who comes first."""
    builders = [verdict for verdict in decision.verdicts if not BUILD_MASKS.isdisjoint(verdict.repairs)]
    if any(v.measured_ms is None or not v.quadratic_bytes for v in builders):
        yield _condition(*SMALL_MASK)
    for verdict in builders:
        if verdict.backend == decision.selected and verdict.quadratic_bytes:
            # With both lengths tensors grow, and the mask with the product of both.
            elements = decision.call.seqlen_q * decision.call.seqlen_kv
            most = elements * tensor_bytes(decision.call) ** 2 // verdict.quadratic_bytes**2
            yield _condition("mask_elements", f"<={most}")


def _of_preferences(
    decision: Decision, tables: Tables, fields: Fields, possible: dict[str, float | None]
) -> Iterator[OpenRow | None]:
    """Yield the preference that puts the selected backend first, and those that could put another there.

    Those with a predicted time share the places that preferences give to them: it counts which of these comes
    first, and what without one could come before it.

    Args:
        decision: The decision.
        tables: The tables that it was made with.
        fields: The fields whose values may change.
        possible: The backends that may run, or may with other values; what each takes, where it is predicted.
    """
    call, selected, policy = decision.call, decision.selected, decision.policy
    if selected is None or selected in (policy.require, *policy.prefer, *(policy.allow or ())):
        # Nothing runs, or a backend that the user names, whatever the tables prefer.
        return
    first_ones, rivals = {selected}, possible.keys() - {selected}
    if possible.get(selected) is not None:
        first_ones = {backend for backend in decision.order if possible.get(backend) is not None}
        rivals = {backend for backend, own_ms in possible.items() if own_ms is None}
    if not rivals:
        return
    known = Facts(call)
    for row in (found.preference for found in preferences(tables, decision.host.arch)):
        at = next((place for place, name in enumerate(row.first) if name in first_ones), None)
        applies = certainly_holds(row, known, decision.host)
        named = at is not None
        matters = named if applies else not rivals.isdisjoint(row.first[:at])
        if matters and row.phase in (None, call.phase):
            yield _open_row(row, fields, [known])
        if applies and named:
            # Rows behind this one order what comes after the selected backend.
            return


def _applicable_rules(verdict: Verdict, decision: Decision, tables: Tables) -> dict[str, Rule]:
    """Return the rules of a backend that may apply to a call, whatever its sizes are."""
    call, host = decision.call, decision.host
    info = tables.info(host.arch, verdict.backend)
    rows = (row for row in tables.rules(host.arch, verdict.backend) or () if row.rule.scope in ROUTE_SCOPES)
    return {row.id: row.rule for row in rows if may_apply(row.rule, call, host, info)}


def _of_backend(
    verdict: Verdict, decision: Decision, rows: dict[str, Rule], options: list[Option], fields: Fields
) -> Iterator[OpenRow | None]:
    call = decision.call
    if not SPLITS.isdisjoint(verdict.repairs):
        # Rows are evaluated on a piece of the call, whose sizes are not the tracer's: the graph is for these
        # sizes alone.
        sizes = tuple((name, f"=={getattr(call, name)}") for name in ("batch", "seqlen_q", "seqlen_kv"))
        yield OpenRow((OpenBox(sizes, decides=True),), (), exact=True)
    forms, exact = _forms(verdict, decision, fields)
    found = {name: _open_row(rule, fields, forms, exact=exact) for name, rule in rows.items()}
    if exact and verdict.blocking and not any(row and rows[name].repair for name, row in found.items()):
        # No length brings about another repair, so the backend is out for as long as one row says so.
        yield found[verdict.blocking[0].rule]
        return
    yield from found.values()
    for option in options:
        yield _open_row(option, fields, forms, exact=exact)


def _is_excluded(verdict: Verdict) -> bool:
    """Return whether policy excludes a backend whatever its rows say; only "unknown" depends on its rows."""
    return verdict.excluded is not None and verdict.excluded.reason != "unknown"


def _stays_out(verdict: Verdict, rows: dict[str, Rule], fields: Fields) -> bool:
    """Return whether a backend is missing, or a row rejects the call whatever the fields are."""
    if verdict.missing:
        return True
    blocking = (rows.get(finding.rule) for finding in verdict.blocking)
    return any(row is None or not _reads_any(row, fields) for row in blocking)


def _forms(verdict: Verdict, decision: Decision, fields: Fields) -> tuple[list[Facts], bool]:
    """Return the facts of the call as given and after each repair.

    Returns:
        The forms, none of them where repairs were made in vain; and whether the fields are the same in all.
    """
    blocking = verdict.blocking
    if blocking and any(f.repaired_by or (f.repair and f in blocking) for f in verdict.findings):
        return [], False
    call = decision.call
    forms = [Facts(call)]
    for repair in verdict.repairs:
        change = repairs.apply(repair, call)
        if change is None:
            return [], False
        call = change[0]
        forms.append(Facts(call))
    return forms, all(form[name] == forms[0][name] for form in forms for name in fields)


def _open_row(
    row: Rule | Preference | Option, fields: Fields, forms: list[Facts], *, exact: bool = True
) -> OpenRow | None:
    when = _live_boxes(row.when, fields, forms)
    if not when:
        return None
    requires = _live_boxes(row.requires, fields, forms) if isinstance(row, Rule) else ()
    if any(box.decides and not box.conditions for box in requires):
        # It holds in every form, whatever the fields are.
        return None
    return OpenRow(when, requires, exact=exact)


def _live_boxes(part: Box | AnyOf | str, fields: Fields, forms: list[Facts]) -> tuple[OpenBox, ...]:
    """Return the boxes that other fields do not make false in every form, with their conditions on ours."""
    found = []
    for box in boxes_of(part):
        ours = tuple(
            (field, spec) for field, spec in box.items() if conditions.fields_in(field, spec) & fields
        )
        others = tuple(condition for condition in box.items() if condition not in ours)
        results = [_all_true(others, facts, stop=True) for facts in forms]
        if any(result != "false" for result in results) or not forms:
            found.append(OpenBox(ours, decides=bool(results) and set(results) == {"true"}))
    return tuple(found)


def _reads_any(rule: Rule, fields: Fields) -> bool:
    boxes = (*boxes_of(rule.when), *boxes_of(rule.requires))
    return any(conditions.fields_in(field, spec) & fields for box in boxes for field, spec in box.items())
