"""What one row says about one call, and the two sides of it in words: "requires X; got Y"."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from attnroute.question.facts import Facts
from attnroute.question.host import Host
from attnroute.tables import conditions
from attnroute.tables.rows import FeatureRow, RuleRow
from attnroute.tables.schema import AnyOf, Box, Rule, boxes_of
from attnroute.tables.versions import version_of
from attnroute.vocabulary import Feature, Outcome, Repair, RuleKind


class Finding(BaseModel):
    """A row held against a call.

    Attributes:
        rule: Id of the row: `<folder>/<backend>/<name>`.
        kind: limit, wrong_result, crash, hang or slow.
        outcome: pass, fail, unknown or not_applicable.
        requires: What must hold, as the table has it.
        got: What the call or host has.
        because: Why the row exists.
        repair: The preparation that would lift the row, if one can.
        repaired_by: The preparation that did lift it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    kind: RuleKind = "limit"
    outcome: Outcome
    requires: str
    got: str
    because: str = ""
    repair: Repair | None = None
    repaired_by: Repair | None = None

    @property
    def blocks(self) -> bool:
        """Whether this finding keeps the backend from being eligible."""
        return self.outcome in ("fail", "unknown") and self.kind != "slow" and self.repaired_by is None


def of_rule(row: RuleRow, outcome: Outcome, facts: Facts, host: Host) -> Finding:
    """Return the finding of a row; with what the call has only where that matters."""
    rule = row.rule
    return Finding(
        rule=row.id,
        kind=rule.kind,
        outcome=outcome,
        requires=_requires(rule),
        got=_got(rule, facts, host) if outcome in ("fail", "unknown") else "",
        because=rule.because,
        repair=rule.repair,
    )


def of_feature(row: FeatureRow, name: Feature, backend: str) -> Finding:
    """Return the finding of a backend's answer about a feature that the call needs."""
    words, value = name.replace("_", " "), row.answer.value
    outcome: Outcome = "unknown" if value == "unknown" else "pass" if value else "fail"
    cannot = "has no" if outcome == "fail" else "was not shown to have"
    return Finding(
        rule=row.id,
        outcome=outcome,
        requires=f"no {words}" if outcome == "fail" else f"a kernel with {words}",
        got=words,
        because="" if outcome == "pass" else f"{backend} {cannot} {words}",
        repair=row.answer.repair,
    )


def ranges_text(ranges: str | list[str]) -> str:
    """Return version ranges as the table has them."""
    return ranges if isinstance(ranges, str) else " or ".join(ranges)


def _requires(rule: Rule) -> str:
    if not isinstance(rule.requires, str):
        return _render_box(rule.requires)
    parts = [f"{name} outside {ranges_text(ranges)}" for name, ranges in rule.versions.items()]
    if any(boxes_of(rule.when)):
        parts.append(f"not ({_render_box(rule.when)})")
    if rule.phase is not None:
        parts.append("inference" if rule.phase == "training" else "training")
    return " or ".join(parts) or "another architecture"


def _render_box(box: Box | AnyOf) -> str:
    if isinstance(box, AnyOf):
        return " or ".join(f"({_render_box(option)})" for option in box.any_of)
    return " and ".join(conditions.render(field, spec) for field, spec in box.items())


def _got(rule: Rule, facts: Facts, host: Host) -> str:
    fields = [field for part in (rule.requires, rule.when) for box in boxes_of(part) for field in box]
    parts = [f"{name} = {_text(facts[name])}" for name in dict.fromkeys(fields)]
    if rule.phase is not None and isinstance(rule.requires, str):
        parts.append(rule.phase)
    parts += [f"{name} {version_of(name, host.versions) or 'not stated'}" for name in rule.versions]
    return ", ".join(parts) or host.arch


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
