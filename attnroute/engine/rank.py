"""Orders the candidates: by policy, certainty and memory, then by predicted time, else by preferences.

Where a time is predicted from measurements on the same architecture it decides, and what a preference or a
row of kind "slow" says of that backend does not count; of versions that such a row names no time is
predicted. A backend without such a time keeps the place among the others that preferences give it: those with
one are put in order among the places that preferences give to them. Times that are inferred from another
architecture's card decide nothing: preferences there rest on what others measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

from attnroute.engine.costs import Cost
from attnroute.engine.decision import REST, Behind, Decision, Exclusion, Verdict
from attnroute.engine.evaluate import certainly_holds
from attnroute.question.call import Call
from attnroute.question.facts import Facts
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.preferences import in_order, placed, preferences
from attnroute.tables.rows import PreferenceRow
from attnroute.vocabulary import Status

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

Rows = tuple[PreferenceRow, ...]


class Standing(NamedTuple):
    """What the place of a backend depends on, but for its name.

    Attributes:
        is_certain: No row leaves it unknown.
        time_ms: Its predicted time with its share of the first call's compilation and of the shape's plan;
            None where none is predicted from measurements on this architecture.
        builds: It needs a mask built that makes memory quadratic and counts.
        is_slow: A row says that it is slow for this call.
    """

    is_certain: bool = True
    time_ms: float | None = None
    builds: bool = False
    is_slow: bool = False


class Place(NamedTuple):
    """Where a backend stands before times are looked at: the least comes first.

    Attributes:
        tier: Place in the policy, not certain, slow tier, large mask: nothing changes tiers by being fast.
        is_slow: A row says so, and no time was predicted.
        preferred: Place in the preferences.
        backend: Its name.
    """

    tier: tuple[int, bool, bool, bool]
    is_slow: bool
    preferred: int
    backend: str


class Ranked(Protocol):
    """What may be put in order: the judgement of a backend."""

    @property
    def status(self) -> Status:
        """The worst that applies."""

    @property
    def excluded(self) -> Exclusion | None:
        """Why policy keeps it out."""

    @property
    def standing(self) -> Standing:
        """What its place depends on."""


def time_ms(cost: Cost, call: Call) -> float:
    """Return the time of a call: the larger of host and device, in a CUDA graph the device's alone."""
    return cost.device_ms if call.context.cuda_graph else max(cost.device_ms, cost.host_ms)


def preferred(facts: Facts, host: Host, tables: Tables) -> Rows:
    """Return the preferences that apply to this call, the one that counts most first."""
    rows = preferences(tables, host.arch)
    return tuple(row for row in rows if certainly_holds(row.preference, facts, host))


def why(rows: Rows, order: tuple[str, ...], costs: Mapping[str, Cost | None]) -> str:
    """Say what made an order: predicted times with their sources, preferences, or both.

    Args:
        rows: The preferences that apply, the one that counts most first.
        order: The backends that may run.
        costs: Their costs, None of those that have none.

    Returns:
        "predicted times, measured on ...", and where a candidate has none "; for the rest " with what
        `why_placed` says; that alone where no two have one.
    """
    found = [cost for backend in order if (cost := costs[backend]) is not None and cost.kind != "inferred"]
    if not found[1:]:
        return why_placed(rows, order)
    sources = dict.fromkeys(f"{'by' if cost.kind == 'tuned' else 'on'} {cost.source}" for cost in found)
    kinds = "predicted times" if "measured" in {cost.kind for cost in found} else "times"
    times = f"{kinds}, measured {' and '.join(sources)}"
    return times if len(found) == len(order) else f"{times}{REST}{why_placed(rows, order)}"


def why_placed(rows: Rows, order: tuple[str, ...]) -> str:
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
    judgements: Mapping[str, Ranked], rows: Rows, policy: Policy, slow_tier: frozenset[str]
) -> tuple[str, ...]:
    """Return the backends that may run, best first."""
    usable = {"eligible", "unknown"} if policy.allow_unknown and not policy.strict else {"eligible"}
    able = [b for b, v in judgements.items() if v.status in usable and v.excluded is None]
    if not able[1:]:
        return tuple(able)
    declared, standings = in_order(rows), {b: judgements[b].standing for b in able}
    places = {b: _place(b, declared, policy, standings[b], slow_tier) for b in able}
    order: list[str] = []
    for _, tier in groupby(sorted(able, key=places.__getitem__), key=lambda b: places[b].tier):
        order += _by_time(list(tier), {b: standings[b].time_ms for b in able})
    return tuple(order)


def _by_time(backends: list[str], times: Mapping[str, float | None]) -> list[str]:
    """Put those with a time in order among the places that they have; of equal times the earlier stays so."""
    timed = [(time, at) for at, b in enumerate(backends) if (time := times[b]) is not None]
    fastest = iter(sorted(timed))
    return [b if times[b] is None else backends[next(fastest)[1]] for b in backends]


def behind(
    judgements: Mapping[str, Ranked],
    rows: Rows,
    policy: Policy,
    slow_tier: frozenset[str],
    pair: tuple[str, str],
) -> Behind:
    """Return what puts the second of two backends that may run behind the first."""
    declared, standings = in_order(rows), [judgements[b].standing for b in pair]
    first, second = (_place(b, declared, policy, s, slow_tier) for b, s in zip(pair, standings, strict=True))
    reasons: tuple[Behind, ...] = ("policy", "unknown", "quadratic", "mask")
    for reason, one, other in zip(reasons, first.tier, second.tier, strict=True):
        if one != other:
            return reason
    if all(standing.time_ms is not None for standing in standings):
        return "time"
    return "slow" if first.is_slow != second.is_slow else "preference"


def may_precede(
    backend: str, own_ms: float | None, decision: Decision, rows: Rows, slow_tier: frozenset[str]
) -> bool:
    """Return whether a backend is selected, or would be if no row ruled it out.

    Args:
        backend: The backend.
        own_ms: What it would then take; None where no time is predicted.
        decision: The decision.
        rows: The preferences that apply.
        slow_tier: The backends of the slow tier.
    """
    if decision.selected in (None, backend):
        return True
    declared, policy = in_order(rows), decision.policy

    def place(name: str, standing: Standing) -> Place:
        return _place(name, declared, policy, standing, slow_tier)

    own, chosen = place(backend, Standing(time_ms=own_ms)), decision.verdict(decision.selected or "")
    first = place(chosen.backend, _standing_of(chosen, decision.call))
    if own.tier != first.tier or chosen.ranked_ms is None:
        return own <= first
    if own_ms is not None:
        return own_ms <= chosen.ranked_ms
    timed = [v for v in map(decision.verdict, decision.order) if v.measured_ms is not None]
    return own <= min(place(v.backend, _standing_of(v, decision.call)) for v in timed)


def _standing_of(verdict: Verdict, call: Call) -> Standing:
    is_certain = verdict.status == "eligible"
    return Standing(is_certain, verdict.ranked_ms, verdict.counts_mask(call), verdict.is_slow)


def _place(
    backend: str, declared: tuple[str, ...], policy: Policy, standing: Standing, slow_tier: frozenset[str]
) -> Place:
    listed = [*policy.prefer, *(policy.allow or ())]
    in_policy = listed.index(backend) if backend in listed else len(listed)
    is_timed = standing.time_ms is not None
    tier = (in_policy, not standing.is_certain, backend in slow_tier, standing.builds)
    known = declared.index(backend) if backend in declared else len(declared)
    return Place(tier, standing.is_slow and not is_timed, known, backend)
