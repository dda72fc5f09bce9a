"""What a decision asks about some fields: while the answers stay, so does the decision.

A compiled graph leaves lengths open. It holds for every length at which these questions have the answers
that they had when the graph was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.engine import repairs
from attnroute.engine.evaluate import ROUTE_SCOPES, certainly_holds, may_apply
from attnroute.engine.quadratic import SMALL_MASK
from attnroute.engine.rank import may_precede, preferred
from attnroute.question.facts import LENGTH_FACTS, Facts, facts_of
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

OPEN: Final = frozenset({*LENGTH_FACTS, "batch"})
"""The fields that a tracer may leave open."""

Condition = tuple[str, "Spec"]
Fields = frozenset[str]


class Asked(NamedTuple):
    """What one box asks about the fields.

    Attributes:
        conditions: Its conditions on them, those on other fields left out.
        settled: The others certainly hold, so that the box does where these do.
    """

    conditions: tuple[Condition, ...]
    settled: bool


class Question(NamedTuple):
    """What one row asks about the fields; a box that another field keeps from holding is not here.

    Attributes:
        when: The boxes of which one makes the row apply.
        requires: The boxes of which one must then hold.
        exact: A box whose first condition fails need not be asked for its others, nor a row that does not
            apply for what it requires.
    """

    when: tuple[Asked, ...]
    requires: tuple[Asked, ...]
    exact: bool


class _Open:
    """A call of other sizes, which may be numbers of a tracer."""

    def __init__(self, call: Call, batch: Any, seqlen_q: Any, seqlen_kv: Any) -> None:
        self._call, self.batch, self.seqlen_q, self.seqlen_kv = call, batch, seqlen_q, seqlen_kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def open_facts(call: Call, batch: Any, seqlen_q: Any, seqlen_kv: Any) -> dict[str, Any]:
    """Return the facts of a call, those that may be open computed from other sizes than its own."""
    sizes = Facts(_Open(call, batch, seqlen_q, seqlen_kv))
    return {**facts_of(call), **{name: sizes[name] for name in OPEN}}


def questions_of(decision: Decision, tables: Tables, fields: Fields) -> tuple[Question, ...]:
    """Return everything about some fields that could change a decision.

    Args:
        decision: A decision about a normalised call.
        tables: The capability tables that it was made with.
        fields: The fields whose values may change.
    """
    found = (question for question in _questions(decision, tables, fields) if question is not None)
    return tuple(q for q in found if any(box.conditions for box in (*q.when, *q.requires)))


def answer(question: Question, facts: conditions.Facts) -> None:
    """Evaluate what a question needs asked; with a tracer's numbers, the answers become its conditions."""
    applies = _answered(question.when, facts, stop=question.exact)
    if applies or not question.exact:
        _answered(question.requires, facts, stop=question.exact)


def _answered(boxes: tuple[Asked, ...], facts: conditions.Facts, *, stop: bool) -> bool:
    """Ask box after box until one certainly holds, and return whether any is not certainly false."""
    possible = False
    for box in boxes:
        held = _held(box.conditions, facts, stop=stop)
        possible = possible or held != "false"
        if stop and box.settled and held == "true":
            break
    return possible


def _held(asked: tuple[Condition, ...], facts: conditions.Facts, *, stop: bool) -> Tri:
    answers = (conditions.evaluate(spec, facts[field], facts) for field, spec in asked)
    return conditions.combine_and(answers if stop else list(answers))


def _questions(decision: Decision, tables: Tables, fields: Fields) -> Iterator[Question | None]:
    call = decision.call
    able = [verdict for verdict in decision.verdicts if not _is_kept_out(verdict)]
    rows = {verdict.backend: _rows_of(verdict, decision, tables) for verdict in able}
    possible = [verdict for verdict in able if not _is_out(verdict, rows[verdict.backend], fields)]
    yield from _about_order(decision, tables, fields, {verdict.backend for verdict in possible})
    if any(verdict.repairs and not BUILD_MASKS.isdisjoint(verdict.repairs) for verdict in decision.verdicts):
        # Whether a mask that is built is small decides who comes first.
        yield Question((Asked((SMALL_MASK,), settled=True),), (), exact=True)
    if isinstance(call.bias, AlibiBias):
        per_head = repairs.SMALL_BIAS // max(1, call.num_heads_q)
        yield Question((Asked((("mask_elements", f"<={per_head}"),), settled=True),), (), exact=True)
    holding = preferred(Facts(call), decision.host, tables)
    for verdict in possible:
        if may_precede(verdict.backend, decision, holding, tables.slow_tier):
            options = [row.option for row in tables.options(decision.host.arch, verdict.backend)]
            yield from _about(verdict, decision, rows[verdict.backend], options, fields)


def _about_order(
    decision: Decision, tables: Tables, fields: Fields, possible: set[str]
) -> Iterator[Question | None]:
    """Ask about the preference that puts the selected backend first, and those that could put another there.

    Args:
        decision: The decision.
        tables: The tables that it was made with.
        fields: The fields whose values may change.
        possible: The backends that may run, or might with other values.
    """
    call, selected, policy = decision.call, decision.selected, decision.policy
    if selected is None or selected in (policy.require, *policy.prefer, *(policy.allow or ())):
        # Nothing runs, or what the user names does, whatever the tables prefer.
        return
    known = Facts(call)
    for row in (found.preference for found in preferences(tables, decision.host.arch)):
        first, named = row.first, selected in row.first
        holds = certainly_holds(row, known, decision.host)
        before = first[: first.index(selected)] if named else first
        matters = named if holds else not possible.isdisjoint(before)
        if matters and row.phase in (None, call.phase):
            yield _on(row, fields, [known])
        if holds and named:
            # Rows behind this one order what comes after the selected backend.
            return


def _rows_of(verdict: Verdict, decision: Decision, tables: Tables) -> dict[str, Rule]:
    """Return the rules of a backend that may apply to a call, whatever its sizes are."""
    call, host = decision.call, decision.host
    info = tables.info(host.arch, verdict.backend)
    rows = (row for row in tables.rules(host.arch, verdict.backend) or () if row.rule.scope in ROUTE_SCOPES)
    return {row.id: row.rule for row in rows if may_apply(row.rule, call, host, info)}


def _about(
    verdict: Verdict, decision: Decision, rows: dict[str, Rule], options: list[Option], fields: Fields
) -> Iterator[Question | None]:
    call = decision.call
    if not SPLITS.isdisjoint(verdict.repairs):
        # Rows are held against a piece of the call, whose sizes nobody asks the tracer about.
        sizes = tuple((name, f"=={getattr(call, name)}") for name in ("batch", "seqlen_q", "seqlen_kv"))
        yield Question((Asked(sizes, settled=True),), (), exact=True)
    forms = _forms(verdict, decision, fields)
    asked = {name: _on(rule, fields, forms) for name, rule in rows.items()}
    if forms and verdict.blocking and not any(q and rows[name].repair for name, q in asked.items()):
        # No length brings about another repair, so the backend is out for as long as one row says so.
        yield asked[verdict.blocking[0].rule]
        return
    yield from asked.values()
    for option in options:
        yield _on(option, fields, forms)


def _is_kept_out(verdict: Verdict) -> bool:
    """Return whether a wish keeps a backend out, whatever its rows say; only what is unknown may change."""
    return verdict.excluded is not None and verdict.excluded.reason != "unknown"


def _is_out(verdict: Verdict, rows: dict[str, Rule], fields: Fields) -> bool:
    """Return whether a backend is missing, or a row rejects the call whatever the fields are."""
    if verdict.missing:
        return True
    blocking = (rows.get(finding.rule) for finding in verdict.blocking)
    return any(row is None or not _reads_any(row, fields) for row in blocking)


def _forms(verdict: Verdict, decision: Decision, fields: Fields) -> list[Facts]:
    """Return the facts of the call as given and after each repair.

    Returns:
        None of them where repairs were made in vain, or change what the fields are.
    """
    blocking = verdict.blocking
    if blocking and any(f.repaired_by or (f.repair and f in blocking) for f in verdict.findings):
        return []
    call = decision.call
    forms = [Facts(call)]
    for repair in verdict.repairs:
        change = repairs.apply(repair, call)
        if change is None:
            return []
        call = change[0]
        forms.append(Facts(call))
    changed = any(form[name] != forms[0][name] for form in forms for name in fields)
    return [] if changed else forms


def _on(row: Rule | Preference | Option, fields: Fields, forms: list[Facts]) -> Question | None:
    when = _possible(row.when, fields, forms)
    if not when:
        return None
    requires = _possible(row.requires, fields, forms) if isinstance(row, Rule) else ()
    return Question(when, requires, exact=bool(forms))


def _possible(part: Box | AnyOf | str, fields: Fields, forms: list[Facts]) -> tuple[Asked, ...]:
    """Return what is asked by every box that the other fields let hold in one of the forms."""
    found = []
    for box in boxes_of(part):
        asked = tuple(
            (field, spec) for field, spec in box.items() if conditions.fields_in(field, spec) & fields
        )
        others = tuple(condition for condition in box.items() if condition not in asked)
        held = [_held(others, facts, stop=True) for facts in forms]
        if any(answer != "false" for answer in held) or not forms:
            found.append(Asked(asked, settled=bool(held) and set(held) == {"true"}))
    return tuple(found)


def _reads_any(rule: Rule, fields: Fields) -> bool:
    boxes = (*boxes_of(rule.when), *boxes_of(rule.requires))
    return any(conditions.fields_in(field, spec) & fields for box in boxes for field, spec in box.items())
