"""Hold every row of a backend against a call: all findings are kept, none depends on another."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attnroute.engine.finding import Finding
from attnroute.engine.needs import needed_features
from attnroute.errors import TableError
from attnroute.question.call import Call
from attnroute.question.facts import Facts, facts_of
from attnroute.question.host import Host
from attnroute.tables import conditions
from attnroute.tables.alternatives import alternatives, names_in, spare
from attnroute.tables.schema import AnyOf, BackendInfo, Box, Option, Preference, Rule, boxes_of
from attnroute.tables.versions import contains, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnroute.tables.conditions import Tri
    from attnroute.tables.load import Tables
    from attnroute.tables.rows import RuleRow
    from attnroute.vocabulary import Outcome

ROUTE_SCOPES = frozenset({"call", "operator"})
STOCK_SCOPES = frozenset({"call", "stock"})


def evaluate(
    call: Call,
    host: Host,
    tables: Tables,
    backend: str,
    scopes: frozenset[str] = ROUTE_SCOPES,
) -> list[Finding]:
    """Return every finding about one backend: whether it is described here, its features, its rows."""
    info = tables.info(host.arch, backend)
    rows = tables.rules(host.arch, backend)
    if rows is None:
        return [_no_table(host.arch, backend)]
    facts = facts_of(call)
    found = [_versions_known(backend, info, host)]
    found.extend(_features(call, facts, tables, backend, host.arch))
    found.extend(evaluate_rows((r for r in rows if r.rule.scope in scopes), call, facts, host, info))
    return found


def evaluate_rows(
    rows: Iterable[RuleRow],
    call: Call,
    facts: Facts,
    host: Host,
    info: BackendInfo,
) -> list[Finding]:
    """Return one finding per row."""
    return [_row(row, call, facts, host, info) for row in rows]


def missing_needs(host: Host, info: BackendInfo) -> tuple[str, ...]:
    """Return what the backend needs and the host has not, or has broken: of alternatives, all of them."""
    return tuple(need for need in info.needs if not any(_has(host, name) for name in alternatives(need)))


def _has(host: Host, name: str) -> bool:
    return name not in host.broken and version_of(name, host.versions) is not None


def certainly_holds(row: Preference | Option, call: Call, facts: Facts, host: Host) -> bool:
    """Return whether every guard of a row holds: a version or a length that nobody knows is not enough."""
    if row.phase is not None and row.phase != call.phase:
        return False
    for name, ranges in row.versions.items():
        version = version_of(name, host.versions)
        if version is None or not contains(ranges, name, version):
            return False
    return _box(row.when, facts) == "true"


def _no_table(arch: str, backend: str) -> Finding:
    return Finding(
        rule=f"{arch}/{backend}/no-table",
        outcome="unknown",
        requires=f"a table that describes {backend} on {arch}",
        got="none",
        because="nobody has stated what this backend does on this architecture",
    )


def versions_known_id(backend: str) -> str:
    """Return the id of the finding that says whether the tables speak about the host's versions."""
    return f"any/{backend}/versions-known"


def versions_outside(info: BackendInfo, host: Host) -> dict[str, str]:
    """Return the versions of the host that a backend's tables make no statement about, by distribution."""
    present = {name: version_of(name, host.versions) for name in _asked_about(info, host)}
    return {
        name: version
        for name, version in present.items()
        if version is not None and not contains(info.versions_known[name], name, version)
    }


def _asked_about(info: BackendInfo, host: Host) -> list[str]:
    """Return the distributions whose versions must be known here."""
    unused = spare(info.needs, lambda name: _has(host, name))
    return [name for name in info.versions_known if name not in unused]


def _versions_known(backend: str, info: BackendInfo, host: Host) -> Finding:
    outside = versions_outside(info, host)
    said = outside or {n: version_of(n, host.versions) or "none" for n in _asked_about(info, host)}
    ranges = [f"{name} {_ranges(info.versions_known[name])}" for name in said]
    return Finding(
        rule=versions_known_id(backend),
        outcome="unknown" if outside else "pass",
        requires=", ".join(ranges) or "any version",
        got=", ".join(f"{name} {version}" for name, version in said.items()) or "any version",
        because="the tables make no statement about other versions",
    )


def _features(call: Call, facts: Facts, tables: Tables, backend: str, arch: str) -> list[Finding]:
    answers = tables.features(arch, backend)
    found = []
    for name in needed_features(call, facts):
        row = answers.get(name)
        if row is None:
            sentence = f'features.{name} requires true, false or "unknown"; got no answer; write one.'
            raise TableError(f"any/{backend}.toml: {sentence}")
        words = name.replace("_", " ")
        value = row.answer.value
        outcome: Outcome = "unknown" if value == "unknown" else "pass" if value else "fail"
        found.append(
            Finding(
                rule=row.id,
                outcome=outcome,
                requires=f"a kernel with {words}" if outcome != "fail" else f"no {words}",
                got=words,
                because="" if outcome == "pass" else f"{backend} {_cannot(outcome)} {words}",
                repair=row.answer.repair,
            ),
        )
    return found


def _cannot(outcome: str) -> str:
    return "has no" if outcome == "fail" else "was not shown to have"


def _row(row: RuleRow, call: Call, facts: Facts, host: Host, info: BackendInfo) -> Finding:
    rule = row.rule
    applies = _applies(rule, call, facts, host, info)
    outcome: Outcome = "not_applicable"
    if applies != "false":
        outcome = _outcome(rule.requires, facts)
    if applies == "unknown" and outcome != "pass":
        outcome = "unknown"
    if outcome not in ("fail", "unknown"):
        return _without_objection(row, outcome)
    return _finding(row, outcome, _got(rule, facts, host))


@lru_cache(maxsize=8192)
def _without_objection(row: RuleRow, outcome: Outcome) -> Finding:
    """Of the rows of a backend nearly all say nothing against a call: these findings are made once."""
    return _finding(row, outcome, "")


def _finding(row: RuleRow, outcome: Outcome, got: str) -> Finding:
    rule = row.rule
    return Finding(
        rule=row.id,
        kind=rule.kind,
        outcome=outcome,
        requires=_requires(rule),
        got=got,
        because=rule.because,
        repair=rule.repair,
    )


def may_apply(rule: Rule, call: Call, host: Host, info: BackendInfo) -> bool:
    """Return whether phase and versions let a row apply, whatever the fields of the call are."""
    return rule.phase in (None, call.phase) and _versions_hold(rule, host, info) != "false"


def _applies(rule: Rule, call: Call, facts: Facts, host: Host, info: BackendInfo) -> Tri:
    if rule.phase is not None and rule.phase != call.phase:
        return "false"
    guard = _box(rule.when, facts)
    if guard == "false":
        return "false"
    return conditions.combine_and([_versions_hold(rule, host, info), guard])


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
    return conditions.combine_and(parts)


def _box(box: Box | AnyOf, facts: Facts) -> Tri:
    if isinstance(box, AnyOf):
        return conditions.combine_or(_box(option, facts) for option in box.any_of)
    return conditions.combine_and(
        conditions.evaluate(spec, facts[field], facts) for field, spec in box.items()
    )


def _outcome(requires: Box | AnyOf | str, facts: Facts) -> Outcome:
    if isinstance(requires, str):
        return "fail"
    # A length that varies must satisfy a requirement for every value.
    table: dict[Tri, Outcome] = {"true": "pass", "false": "fail", "varies": "fail", "unknown": "unknown"}
    return table[_box(requires, facts)]


def _fields(box: Box | AnyOf | str) -> list[str]:
    return [field for option in boxes_of(box) for field in option]


def _render_box(box: Box | AnyOf) -> str:
    if isinstance(box, AnyOf):
        return " or ".join(f"({_render_box(option)})" for option in box.any_of)
    return " and ".join(conditions.render(field, spec) for field, spec in box.items())


def _ranges(ranges: str | list[str]) -> str:
    return ranges if isinstance(ranges, str) else " or ".join(ranges)


def _requires(rule: Rule) -> str:
    if not isinstance(rule.requires, str):
        return _render_box(rule.requires)
    parts = [f"{name} outside {_ranges(ranges)}" for name, ranges in rule.versions.items()]
    if any(boxes_of(rule.when)):
        parts.append(f"not ({_render_box(rule.when)})")
    if rule.phase is not None:
        parts.append("inference" if rule.phase == "training" else "training")
    return " or ".join(parts) or "another architecture"


def _got(rule: Rule, facts: Facts, host: Host) -> str:
    names = dict.fromkeys([*_fields(rule.requires), *_fields(rule.when)])
    parts = [f"{name} = {_word(facts[name])}" for name in names]
    if rule.phase is not None and isinstance(rule.requires, str):
        parts.append(rule.phase)
    parts += [f"{name} {version_of(name, host.versions) or 'not stated'}" for name in rule.versions]
    return ", ".join(parts) or host.arch


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
