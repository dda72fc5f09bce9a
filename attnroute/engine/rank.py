"""Order the candidates: wishes first, then certainty, then memory, then the declared order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.engine.decision import Decision, Verdict
from attnroute.engine.evaluate import certainly_holds
from attnroute.question.call import Call
from attnroute.question.facts import facts_of
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.schema import Order
from attnroute.vocabulary import SLOW_TIER

if TYPE_CHECKING:
    from attnroute.tables.load import Tables

Place = tuple[int, bool, bool, bool, bool, int, str]
"""Wished, not certain, slow tier, large mask, slow here, declared place, name: the least comes first."""


def declared_order(call: Call, host: Host, tables: Tables) -> Order | None:
    """Return the first declared order whose guard holds for this call."""
    facts = facts_of(call)
    orders = tables.arch(host.arch).order
    return next((row for row in orders if certainly_holds(row, call, facts, host)), None)


def ranked(verdicts: dict[str, Verdict], row: Order | None, policy: Policy) -> tuple[str, ...]:
    """Return the backends that may run, best first."""
    usable = {"eligible", "unknown"} if policy.allow_unknown and not policy.strict else {"eligible"}
    able = [b for b, v in verdicts.items() if v.status in usable and v.excluded is None]

    def place(backend: str) -> Place:
        return _place(backend, row, policy, verdicts[backend])

    return tuple(sorted(able, key=place))


def may_precede(backend: str, decision: Decision, row: Order | None) -> bool:
    """Return whether a backend is selected, or would be if nothing in the tables spoke against it."""
    if decision.selected is None:
        return True
    chosen, policy = decision.verdict(decision.selected), decision.policy
    return _place(backend, row, policy, None) <= _place(chosen.backend, row, policy, chosen)


def _is_slow(verdict: Verdict) -> bool:
    return any(f.kind == "slow" and f.outcome == "fail" for f in verdict.findings)


def _place(backend: str, row: Order | None, policy: Policy, verdict: Verdict | None) -> Place:
    """Return where a backend stands; without a verdict, where it would if no row spoke against it."""
    wishes = [*policy.prefer, *(policy.allow or ())]
    wished = wishes.index(backend) if backend in wishes else len(wishes)
    declared = row.order if row else []
    known = declared.index(backend) if backend in declared else len(declared)
    uncertain = builds = slow = False
    if verdict is not None:
        uncertain, slow = verdict.status != "eligible", _is_slow(verdict)
        builds = verdict.quadratic_bytes > 0
    return (wished, uncertain, backend in SLOW_TIER, builds, slow, known, backend)
