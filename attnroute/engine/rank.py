"""Order the candidates: eligibility first, then wishes, then the declared order, the slow tier last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.call import Call
from attnroute.engine.decision import Verdict
from attnroute.engine.evaluate import certainly_holds
from attnroute.facts import facts_of
from attnroute.host import Host
from attnroute.policy import Policy
from attnroute.tables.schema import Order
from attnroute.vocabulary import SLOW_TIER

if TYPE_CHECKING:
    from attnroute.tables.load import Tables


def declared_order(call: Call, host: Host, tables: Tables) -> Order | None:
    """Return the first declared order whose guard holds for this call."""
    facts = facts_of(call)
    orders = tables.arch(host.arch).order
    return next((row for row in orders if certainly_holds(row, call, facts, host)), None)


def ranked(verdicts: dict[str, Verdict], row: Order | None, policy: Policy) -> tuple[str, ...]:
    """Return the backends that may run, best first."""
    declared = {name: place for place, name in enumerate(row.order)} if row else {}
    wishes = [*policy.prefer, *(policy.allow or ())]
    usable = {"eligible", "unknown"} if policy.allow_unknown and not policy.strict else {"eligible"}
    able = [b for b, v in verdicts.items() if v.status in usable and v.excluded is None]

    def place(backend: str) -> tuple[int, bool, bool, bool, int, str]:
        verdict = verdicts[backend]
        slow = any(f.kind == "slow" and f.outcome == "fail" for f in verdict.findings)
        wished = wishes.index(backend) if backend in wishes else len(wishes)
        known = declared.get(backend, len(declared))
        return (wished, verdict.status != "eligible", backend in SLOW_TIER, slow, known, backend)

    return tuple(sorted(able, key=place))
