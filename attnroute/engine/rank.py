"""Orders the candidates: by policy, then certainty, then memory, then the preferences of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from attnroute.engine.decision import Decision, Exclusion
from attnroute.engine.evaluate import certainly_holds
from attnroute.question.facts import Facts
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.preferences import in_order, placed, preferences
from attnroute.tables.rows import PreferenceRow
from attnroute.vocabulary import Status

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

Place = tuple[int, bool, bool, bool, bool, int, str]
"""Place in the policy, not certain, slow tier, large mask, slow here, preferred place, name: least first."""

Rows = tuple[PreferenceRow, ...]


class Ranked(Protocol):
    """What a backend's place depends on: its verdict, or the judgement that this is made of."""

    @property
    def status(self) -> Status:
        """The worst that applies."""

    @property
    def excluded(self) -> Exclusion | None:
        """Why policy keeps it out."""

    @property
    def quadratic_bytes(self) -> int:
        """The bytes of a mask that is built and makes memory quadratic."""

    @property
    def is_slow(self) -> bool:
        """Whether a row says that it is slow for this call."""


def preferred(facts: Facts, host: Host, tables: Tables) -> Rows:
    """Return the preferences that apply to this call, the one that counts most first."""
    rows = preferences(tables, host.arch)
    return tuple(row for row in rows if certainly_holds(row.preference, facts, host))


def why(rows: Rows, order: tuple[str, ...]) -> str:
    """Name the preferences that made an order, and give the reason of the first.

    Args:
        rows: Those that apply, the one that counts most first.
        order: The backends that may run.

    Returns:
        The id of the row that puts its backend first, then the ids of those without which the order would be
        another, a colon, and the reason of the first.
    """
    able = set(order)
    naming = tuple(row for row in rows if not able.isdisjoint(row.preference.first))
    if not naming:
        return "no preference applies"
    needed, wanted = naming, placed(naming, order)
    for row in naming[1:]:
        others = tuple(other for other in needed if other is not row)
        if placed(others, order) == wanted:
            needed = others
    return f"{', '.join(row.id for row in needed)}: {naming[0].preference.because}"


def ranked(
    verdicts: Mapping[str, Ranked], rows: Rows, policy: Policy, slow_tier: frozenset[str]
) -> tuple[str, ...]:
    """Return the backends that may run, best first."""
    declared = in_order(rows)
    usable = {"eligible", "unknown"} if policy.allow_unknown and not policy.strict else {"eligible"}
    able = [b for b, v in verdicts.items() if v.status in usable and v.excluded is None]

    def place(backend: str) -> Place:
        return _place(backend, declared, policy, verdicts[backend], slow_tier)

    return tuple(sorted(able, key=place))


def may_precede(backend: str, decision: Decision, rows: Rows, slow_tier: frozenset[str]) -> bool:
    """Return whether a backend is selected, or would be if no row ruled it out."""
    if decision.selected is None:
        return True
    chosen, policy, declared = decision.verdict(decision.selected), decision.policy, in_order(rows)
    own = _place(backend, declared, policy, None, slow_tier)
    return own <= _place(chosen.backend, declared, policy, chosen, slow_tier)


def _place(
    backend: str,
    declared: tuple[str, ...],
    policy: Policy,
    verdict: Ranked | None,
    slow_tier: frozenset[str],
) -> Place:
    """Return the sort key of a backend; without a verdict, the key that it has if no row is against it."""
    listed = [*policy.prefer, *(policy.allow or ())]
    in_policy = listed.index(backend) if backend in listed else len(listed)
    known = declared.index(backend) if backend in declared else len(declared)
    uncertain = builds = slow = False
    if verdict is not None:
        uncertain, slow = verdict.status != "eligible", verdict.is_slow
        builds = verdict.quadratic_bytes > 0
    return (in_policy, uncertain, backend in slow_tier, builds, slow, known, backend)
