"""Render one row of the capability tables as text or JSON, as `attnroute rule ID` prints it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from attnroute.report.json import document
from attnroute.report.layout import WIDTH, Line, field, laid_out
from attnroute.report.sentences import words
from attnroute.tables.conditions import render
from attnroute.tables.points import options_of
from attnroute.tables.schema import (
    AnyOf,
    BackendInfo,
    Box,
    Evidence,
    FeatureAnswer,
    Option,
    Preference,
    Ranges,
    Rule,
)

SCOPES: Final = {
    "call": "torch's own selector and attnroute's direct call of the operator",
    "stock": "torch's own selector only",
    "operator": "attnroute's direct call of the operator only",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Anything that a finding, a verdict's options or the reason of an order may name.

    Attributes:
        id: What they name.
        file: Where it stands, below the folder of the tables.
        content: The row itself.
        page: Its entry on the reference pages; "" where it is not of the shipped tables.
    """

    id: str
    file: str
    content: Rule | Option | Preference | FeatureAnswer | BackendInfo
    page: str = ""


def row_json(row: Row) -> str:
    """Return a row as JSON: its id, its file and every key of the table."""
    fields = row.content.model_dump(mode="json", exclude_none=True)
    return document({"id": row.id, "file": row.file, **fields})


def render_row(row: Row, width: int = WIDTH) -> str:
    """Return a row as lines of label and text."""
    parts = [*_parts(row.content), ("file", row.file), ("page", row.page)]
    return laid_out([Line(row.id, wraps=False), *(field(*part) for part in parts if part[1])], width)


def _parts(content: Rule | Option | Preference | FeatureAnswer | BackendInfo) -> list[tuple[str, str]]:
    if isinstance(content, Option | Preference):
        return [*_guarded(content), *_evidence(content.evidence)]
    if isinstance(content, Rule):
        recheck = f"after {content.recheck_after}" if content.recheck_after else ""
        denied = [("not for", f"{backend}: {reason}") for backend, reason in content.not_for.items()]
        return [*_rule(content), *_evidence(content.evidence), *denied, ("recheck", recheck)]
    if isinstance(content, FeatureAnswer):
        answer = content.value if isinstance(content.value, str) else str(content.value).lower()
        return [("answer", answer), ("repair", content.repair or ""), *_evidence(content.evidence)]
    return [
        ("title", content.title),
        ("provider", content.provider),
        ("needs", ", ".join(content.needs)),
        ("known", versions_words(content.versions_known)),
        ("operators", ", ".join(content.operators)),
        ("kernels", ", ".join(content.kernels)),
        ("memory", f"{content.memory} in the sequence length"),
        ("first call", _seconds(content.first_call_seconds)),
    ]


def _seconds(span: tuple[float, float] | None) -> str:
    return "" if span is None else f"of each structure compiles, {span[0]:g} to {span[1]:g} s"


def _guarded(row: Option | Preference) -> list[tuple[str, str]]:
    effect = ("first", ", ".join(row.first)) if isinstance(row, Preference) else ("sets", options_words(row))
    return [
        ("versions", versions_words(row.versions)),
        ("phase", row.phase or ""),
        ("when", box_words(row.when)),
        effect,
        ("because", row.because),
    ]


def _rule(rule: Rule) -> list[tuple[str, str]]:
    return [
        ("kind", words(rule.kind)),
        ("binds", SCOPES[rule.scope]),
        ("versions", versions_words(rule.versions)),
        ("phase", rule.phase or ""),
        ("when", box_words(rule.when)),
        ("requires", rule.requires if isinstance(rule.requires, str) else box_words(rule.requires)),
        ("repair", rule.repair or ""),
        ("because", rule.because),
        *(("refuses", text) for text in options_of(rule.refuses or [])),
        *(("takes", text) for text in options_of(rule.takes or [])),
    ]


def _evidence(evidence: list[Evidence]) -> list[tuple[str, str]]:
    lines = []
    for item in evidence:
        details = [
            item.ref,
            item.version and f"version {item.version}",
            item.date and item.date.isoformat(),
            item.note,
        ]
        lines.append(("evidence", f"{item.kind}: {', '.join(d for d in details if d)}"))
    return lines


def options_words(option: Option) -> str:
    """Say what a row gives a kernel."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in option.set.items())


def versions_words(versions: dict[str, Ranges]) -> str:
    """Say ranges of versions."""
    return ", ".join(f"{name} {r if isinstance(r, str) else ' or '.join(r)}" for name, r in versions.items())


def box_words(box: Box | AnyOf) -> str:
    """Say a condition on a call."""
    if isinstance(box, AnyOf):
        return " or ".join(f"({box_words(option)})" for option in box.any_of)
    return " and ".join(render(name, spec) for name, spec in box.items())
