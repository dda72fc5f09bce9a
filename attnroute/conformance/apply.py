"""Writes what a report says into the tables: rows that hold get the measurement as evidence."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.conformance.text import rule_in, split
from attnroute.errors import ArgumentError
from attnroute.tables.folders import ANY, SEVERAL

if TYPE_CHECKING:
    from attnroute.conformance.report import Entry, Report, Verdict
    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import RuleRow


_ON_LINES: Final = re.compile(r"^(evidence = \[\n(?:    .*\n)+)\]", re.MULTILINE)
_ON_ONE: Final = re.compile(r"^(evidence = \[.*)\]", re.MULTILINE)


class Applied(NamedTuple):
    """What became of the rows of a report.

    Attributes:
        written: Those that get the evidence.
        known: Those that had it.
        others: Entries of rows that do not hold for every backend that was tried.
        measured: Rows that apply to the machine and rest on a measurement, this one or another.
        unmeasured: Rows that apply to it and rest on none.
    """

    written: list[str]
    known: list[str]
    others: list[Entry]
    measured: list[str]
    unmeasured: list[str]


def apply(report: Report, ref: str, tables: Tables, *, write: bool = True) -> Applied:
    """Add evidence to every row that holds for each backend of a report; comments of the files stay.

    Args:
        report: The report.
        ref: The name under which it lies in `benchmarks/results`.
        tables: The tables, whose files are changed.
        write: Change them; else only say what would become of them.

    Raises:
        ArgumentError: The evidence of a row is written in a form that nobody expected.
    """
    by_rule: dict[str, list[Entry]] = defaultdict(list)
    for entry in report.entries:
        if entry.verdict != "not installed":
            by_rule[entry.rule].append(entry)
    rows = {row.id: row for row in tables.all_rows() if row.id in by_rule}
    notes = {rule: _note(by_rule[rule], is_argued=bool(row.rule.argued)) for rule, row in rows.items()}
    items: dict[Path, list[tuple[RuleRow, str]]] = defaultdict(list)
    applied = Applied([], [], [], [], [])
    for rule, row in rows.items():
        evidence = [e for e in row.rule.evidence if e.kind == "measured"]
        note = notes[rule]
        if note is None:
            applied.others.extend(by_rule[rule])
        elif any(e.ref == ref for e in evidence):
            applied.known.append(rule)
        else:
            applied.written.append(rule)
            items[row.file].append((row, f'ref = "{ref}", date = {report.date}{note}'))
        (applied.unmeasured if note is None and not evidence else applied.measured).append(rule)
    if write:
        for path, found in items.items():
            _write(path, found)
    return applied


def _note(entries: list[Entry], *, is_argued: bool) -> str | None:
    """Return what the evidence of a row says beside its report, as TOML; None where it does not hold.

    Args:
        entries: What a report says of the row.
        is_argued: The row says by now why it refuses what runs.
    """
    # What could not be tried of one backend says nothing against the row.
    tried = [entry for entry in entries if entry.inside or entry.outside]
    strict: set[Verdict] = {"argued", "too strict"} if is_argued else {"argued"}
    if not tried or any(entry.verdict not in ("holds", *strict) for entry in tried):
        return None
    if any(entry.verdict in strict for entry in tried):
        return ', note = "what it takes; what it refuses is right too"'
    sides = {"what it takes" if entry.inside else "what it refuses" for entry in tried if entry.reason}
    return f', note = "{" and ".join(sorted(sides))} alone"' if sides else ""


def _write(path: Path, items: list[tuple[RuleRow, str]]) -> None:
    parts = split(path.read_text(encoding="utf-8"))
    is_several = path.stem == SEVERAL and path.parent.name == ANY
    for row, item in items:
        scope, file, name = row.id.split("/")
        for at, part in enumerate(parts):
            found = rule_in(part)
            if found.get("name") == name and (not is_several or f"{scope}/{file}" in found["files"]):
                place = f'file = "{scope}/{file}", ' if is_several else ""
                parts[at] = _with_evidence(part, f'{{ {place}kind = "measured", {item} }}')
    path.write_text("".join(parts), encoding="utf-8")


def _with_evidence(part: str, item: str) -> str:
    """Return a row with one more item in its evidence, on a line of its own where the others have one."""
    before = rule_in(part)
    on_lines = _ON_LINES.sub(lambda found: f"{found[1]}    {item},\n]", part, count=1)
    changed = (
        on_lines if on_lines != part else _ON_ONE.sub(lambda found: f"{found[1]}, {item}]", part, count=1)
    )
    after = rule_in(changed)
    # Text is edited, so that nothing else of the file changes; what came of it is read to be sure.
    (added,) = tomllib.loads(f"x = [{item}]")["x"]
    if after != {**before, "evidence": [*before["evidence"], added]}:
        raise ArgumentError(
            f"the row {before['name']} requires evidence as the tables write it; add it by hand: {item}."
        )
    return changed
