"""Hold the rows of a backend against a call: every row is answered, none depends on another.

What the versions of a host say about a row is the same for every call, so it is worked out once (`Prepared`).
What conditions say about a call is kept with it (`Form`), because backends share conditions and repairs.
No sentence is made here before somebody reads it (`Evaluation.findings`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from attnroute.engine import repairs
from attnroute.engine.costs import Cost, cost_of
from attnroute.engine.finding import Finding, of_feature, of_rule, ranges_text
from attnroute.engine.rounding import rounded_call
from attnroute.errors import TableError
from attnroute.memory import TABLES, cached
from attnroute.question.call import Call
from attnroute.question.facts import Facts, needed_features
from attnroute.question.host import Host
from attnroute.tables.alternatives import alternatives, names_in, spare
from attnroute.tables.archs import Peak
from attnroute.tables.cards import peak_of
from attnroute.tables.conditions import Compiled, Tri, combine_and
from attnroute.tables.costs import Costs, costs_of
from attnroute.tables.folders import Tables
from attnroute.tables.rows import FeatureRow, OptionRow, RuleRow
from attnroute.tables.schema import BackendInfo, Option, Preference, Ranges, Rule
from attnroute.tables.versions import are_one, contains, same_as, version_of
from attnroute.vocabulary import Feature, Outcome, Phase, Repair, RuleKind

if TYPE_CHECKING:
    from collections.abc import Iterable

ROUTE_SCOPES = frozenset({"call", "operator"})
STOCK_SCOPES = frozenset({"call", "stock"})
_OUTCOMES: dict[Tri, Outcome] = {"true": "pass", "false": "fail", "varies": "fail", "unknown": "unknown"}
"""A length that varies must satisfy a requirement for every value."""


class Form:
    """A call as given or as a repair left it, with everything that was computed about it so far.

    Attributes:
        call: The call.
        facts: Its facts.
        answers: What compiled conditions gave.
    """

    __slots__ = ("_changes", "_features", "_rounded", "answers", "call", "facts")

    def __init__(self, call: Call) -> None:
        """Compute nothing yet."""
        self.call = call
        self.facts = Facts(call)
        self.answers: dict[Compiled, Tri] = {}
        self._features: tuple[Feature, ...] | None = None
        self._changes: dict[Repair, tuple[Form, int] | None] = {}
        self._rounded: Form | None = None

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that a kernel must have for the call."""
        if self._features is None:
            self._features = needed_features(self.facts)
        return self._features

    def repaired(self, repair: Repair) -> tuple[Form, int] | None:
        """Return the form after a repair and its extra bytes, None where the repair cannot be made."""
        if repair not in self._changes:
            change = repairs.apply(repair, self.call)
            self._changes[repair] = None if change is None else (Form(change[0]), change[1])
        return self._changes[repair]

    @property
    def rounded(self) -> Form:
        """The form at rounded lengths, for which backends are put in order."""
        if self._rounded is None:
            self._rounded = Form(rounded_call(self.call))
        return self._rounded


Blocker = tuple[str, RuleKind, Outcome, Repair | None]
"""A row that keeps a backend from being eligible: id, kind, outcome, and the repair that it names."""


class Active(NamedTuple):
    """A row that the versions of a host let apply.

    Attributes:
        place: Its place among the rows of the backend.
        row: The row.
        guard: When it applies.
        requirement: What must be true then.
        is_certain: The host states every version that the row is about.
    """

    place: int
    row: RuleRow
    guard: Compiled
    requirement: Compiled
    is_certain: bool


@dataclass(frozen=True, eq=False)
class Prepared:
    """The rows of one backend on one host.

    Attributes:
        backend: Its name.
        host: The machine.
        info: What the tables say of the backend here.
        rows: Every row in scope; None where no table describes the backend here.
        features: Its answers about features.
        options: Its rows of options.
        costs: What its kernels were measured to take, here or on an architecture that this one inherits.
        peak: What the card can do at most.
    """

    backend: str
    host: Host
    info: BackendInfo
    rows: tuple[RuleRow, ...] | None
    features: dict[str, FeatureRow] = field(default_factory=dict)
    options: tuple[OptionRow, ...] = ()
    costs: Costs | None = None
    peak: Peak | None = None

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """What the backend needs and the host has not."""
        return missing_needs(self.host, self.info)

    @cached_property
    def outside(self) -> dict[str, str]:
        """The versions of the host that the tables say nothing about."""
        return versions_outside(self.info, self.host)

    @cached_property
    def active(self) -> tuple[Active, ...]:
        """The rows that can apply here."""
        return tuple(_active(self.rows or (), self.host, self.info))

    @cached_property
    def always(self) -> tuple[Blocker, ...]:
        """What blocks every call here: nobody describes the backend, or these versions of it."""
        if self.rows is None:
            return ((_no_table_id(self), "limit", "unknown", None),)
        return ((versions_known_id(self.backend), "limit", "unknown", None),) if self.outside else ()

    @cached_property
    def never_runs(self) -> bool:
        """Whether a row rejects every call on this host, so that nobody has to ask the others."""
        return any(row.rule.is_absolute for row in self.rows or ())

    def plan_ms(self, phase: Phase) -> float:
        """Return the milliseconds of the plan for a new shape; 0 where none is made or measured."""
        host = None if self.costs is None else self.costs.table.host.get(phase)
        return 0.0 if host is None else host.plan_ms

    def cost(
        self, given: Call, final: Call, repairs: tuple[Repair, ...], sizes: tuple[int, ...]
    ) -> Cost | None:
        """Predict the time of a call, None where nothing was measured that speaks about it.

        Args:
            given: The call, normalised.
            final: The call as the kernel gets it.
            repairs: What made the one of the other.
            sizes: What each of these allocates, in bytes.
        """
        if self.costs is None or self.peak is None:
            return None
        return cost_of(given, final, repairs, sizes, self.costs, self.peak)


@cached(256, TABLES)
def prepared(tables: Tables, host: Host, scopes: frozenset[str] = ROUTE_SCOPES) -> dict[str, Prepared]:
    """Return what is the same for every call on one host, by backend."""
    return {name: _prepared(tables, host, name, scopes) for name in tables.backends}


def _prepared(tables: Tables, host: Host, backend: str, scopes: frozenset[str]) -> Prepared:
    rows = tables.rules(host.arch, backend)
    scoped = None if rows is None else tuple(row for row in rows if row.rule.scope in scopes)
    info, features = tables.info(host.arch, backend), tables.features(host.arch, backend)
    options, costs = tables.options(host.arch, backend), costs_of(tables, host.arch, backend)
    return Prepared(backend, host, info, scoped, features, options, costs, peak_of(tables, host))


def _active(rows: Iterable[RuleRow], host: Host, info: BackendInfo) -> Iterable[Active]:
    for place, row in enumerate(rows):
        held = _versions_hold(row.rule, host, info)
        if held != "false":
            yield Active(place, row, row.rule.guard, row.rule.requirement, held == "true")


def outcomes_of(rows: Prepared, form: Form) -> list[Outcome]:
    """Return the outcome of each row of a backend; most do not apply to a call."""
    outcomes: list[Outcome] = ["not_applicable"] * len(rows.rows or ())
    phase, facts, answers = form.call.phase, form.facts, form.answers
    for place, row, guard, requirement, is_certain in rows.active:
        if row.rule.phase is not None and row.rule.phase != phase:
            continue
        applies = answers.get(guard)
        if applies is None:
            applies = answers[guard] = guard.answer(facts)
        if applies == "false":
            continue
        held = answers.get(requirement)
        if held is None:
            held = answers[requirement] = requirement.answer(facts)
        outcome = _OUTCOMES[held]
        if outcome != "pass" and (applies == "unknown" or not is_certain):
            outcome = "unknown"
        outcomes[place] = outcome
    return outcomes


class Evaluation:
    """The rows of a backend held against one form of a call.

    Attributes:
        rows: The rows of the backend.
        form: The call.
        outcomes: One for each row; empty where no table describes the backend.
    """

    __slots__ = ("blocking", "form", "outcomes", "rows", "slow")

    def __init__(self, rows: Prepared, form: Form) -> None:
        """Answer every row.

        Raises:
            TableError: The backend's table says nothing about a feature that the call needs.
        """
        self.rows, self.form = rows, form
        self.outcomes = outcomes_of(rows, form)
        self.blocking: list[Blocker] = list(rows.always)
        self.slow: list[RuleRow] = []
        if rows.rows is not None:
            self._answer_features()
            self._sort_rows()

    def _answer_features(self) -> None:
        features = self.rows.features
        for name in self.form.features:
            row = features.get(name)
            if row is None:
                sentence = f'features.{name} requires true, false or "unknown"; got no answer; write one.'
                raise TableError(f"any/{self.rows.backend}.toml: {sentence}")
            if row.answer.value is not True:
                outcome: Outcome = "unknown" if row.answer.value == "unknown" else "fail"
                self.blocking.append((row.id, "limit", outcome, row.answer.repair))

    def _sort_rows(self) -> None:
        for place, row, *_ in self.rows.active:
            outcome, rule = self.outcomes[place], row.rule
            if rule.kind == "slow":
                self.slow += [row] if outcome == "fail" else []
            elif outcome in ("fail", "unknown"):
                self.blocking.append((row.id, rule.kind, outcome, rule.repair))

    def findings(self) -> list[Finding]:
        """Return every row as a finding: whether the backend is described here, its features, its rows."""
        rows = self.rows
        if rows.rows is None:
            return [_no_table(rows)]
        found = [_versions_known(rows)]
        found += [of_feature(rows.features[name], name, rows.backend) for name in self.form.features]
        pairs = zip(rows.rows, self.outcomes, strict=True)
        return found + [of_rule(row, outcome, self.form.facts, rows.host) for row, outcome in pairs]


def evaluate(
    call: Call,
    host: Host,
    tables: Tables,
    backend: str,
    scopes: frozenset[str] = ROUTE_SCOPES,
) -> list[Finding]:
    """Return every finding about one backend on a call as it is, no repair made."""
    return Evaluation(prepared(tables, host, scopes)[backend], Form(call)).findings()


def missing_needs(host: Host, info: BackendInfo) -> tuple[str, ...]:
    """Return what the backend needs and the host has not, or has broken: of alternatives, all of them."""
    return tuple(need for need in info.needs if not any(_has(host, name) for name in alternatives(need)))


def _has(host: Host, name: str) -> bool:
    return name not in host.broken and version_of(name, host.versions) is not None


def certainly_holds(row: Preference | Option, facts: Facts, host: Host) -> bool:
    """Return whether every guard of a row holds: a version or a length that nobody knows is not enough."""
    if row.phase is not None and row.phase != facts["phase"]:
        return False
    for name, ranges in row.versions.items():
        version = version_of(name, host.versions)
        if version is None or not contains(ranges, name, version):
            return False
    return row.guard.answer(facts) == "true"


def may_apply(rule: Rule, call: Call, host: Host, info: BackendInfo) -> bool:
    """Return whether phase and versions let a row apply, whatever the fields of the call are."""
    return rule.phase in (None, call.phase) and _versions_hold(rule, host, info) != "false"


def _versions_hold(rule: Rule, host: Host, info: BackendInfo) -> Tri:
    parts: list[Tri] = []
    for name, ranges in rule.versions.items():
        version = version_of(name, host.versions)
        if version is None:
            # What is needed and missing makes the backend unavailable, or something else stands in for it:
            # its version rows say nothing then.
            parts.append("false" if name in names_in(info.needs) else "unknown")
        else:
            parts.append("true" if contains(ranges, name, version) else "false")
    return combine_and(parts)


def versions_known_id(backend: str) -> str:
    """Return the id of the finding that says whether the tables speak about the host's versions."""
    return f"any/{backend}/versions-known"


def versions_outside(info: BackendInfo, host: Host) -> dict[str, str]:
    """Return the versions of the host that a backend's tables make no statement about, by distribution."""
    present = {name: version_of(name, host.versions) for name in _distributions(info, host)}
    return {
        name: version
        for name, version in present.items()
        if version is not None and not _is_known(info.versions_known[name], name, version, host)
    }


def _is_known(ranges: Ranges, name: str, version: str, host: Host) -> bool:
    other = same_as(ranges)
    if other is None:
        return contains(ranges, name, version)
    beside = version_of(other, host.versions)
    return beside is None or are_one(version, beside)


def _distributions(info: BackendInfo, host: Host) -> list[str]:
    """Return the distributions whose versions must be known here."""
    used = set(names_in(info.needs)) - spare(info.needs, lambda name: _has(host, name))
    return [name for name in info.versions_known if name in used]


def _versions_known(rows: Prepared) -> Finding:
    info, versions = rows.info, rows.host.versions
    shown = rows.outside or {n: version_of(n, versions) or "none" for n in _distributions(info, rows.host)}
    ranges = [f"{name} {ranges_text(info.versions_known[name])}" for name in shown]
    return Finding(
        rule=versions_known_id(rows.backend),
        outcome="unknown" if rows.outside else "pass",
        requires=", ".join(ranges) or "any version",
        got=", ".join(f"{name} {version}" for name, version in shown.items()) or "any version",
        because="the tables make no statement about other versions",
    )


def _no_table_id(rows: Prepared) -> str:
    return f"{rows.host.arch}/{rows.backend}/no-table"


def _no_table(rows: Prepared) -> Finding:
    return Finding(
        rule=_no_table_id(rows),
        outcome="unknown",
        requires=f"a table about {rows.backend} on {rows.host.arch}",
        got="none",
        because="nobody has looked at it there",
    )
