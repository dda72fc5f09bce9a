"""Order the candidates: eligibility first, then wishes, then the declared order, the slow tier last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.call import Call
from attnroute.engine.decision import Decision, Verdict
from attnroute.engine.evaluate import certainly_holds
from attnroute.facts import facts_of
from attnroute.host import Host
from attnroute.policy import Policy
from attnroute.tables.schema import Order
from attnroute.vocabulary import SLOW_TIER

if TYPE_CHECKING:
    from attnroute.tables.load import Tables

Place = tuple[int, bool, bool, bool, int, str]
"""Wished, not certain, slow tier, slow here, declared place, name: the least comes first."""


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
        verdict = verdicts[backend]
        return _place(backend, row, policy, certain=verdict.status == "eligible", slow=_is_slow(verdict))

    return tuple(sorted(able, key=place))


def may_precede(backend: str, decision: Decision, row: Order | None) -> bool:
    """Return whether a backend is selected, or would be if nothing in the tables spoke against it."""
    if decision.selected is None:
        return True
    chosen, policy = decision.verdict(decision.selected), decision.policy
    certain, slow = chosen.status == "eligible", _is_slow(chosen)
    best = _place(backend, row, policy, certain=True, slow=False)
    return best <= _place(chosen.backend, row, policy, certain=certain, slow=slow)


def _is_slow(verdict: Verdict) -> bool:
    return any(f.kind == "slow" and f.outcome == "fail" for f in verdict.findings)


def _place(backend: str, row: Order | None, policy: Policy, *, certain: bool, slow: bool) -> Place:
    wishes = [*policy.prefer, *(policy.allow or ())]
    wished = wishes.index(backend) if backend in wishes else len(wishes)
    declared = row.order if row else []
    known = declared.index(backend) if backend in declared else len(declared)
    return (wished, not certain, backend in SLOW_TIER, slow, known, backend)
