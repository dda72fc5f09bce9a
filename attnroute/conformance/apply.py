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
    from attnroute.conformance.report import Entry, Report
    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import RuleRow


_ON_LINES: Final = re.compile(r"^(evidence = \[\n(?:    .*\n)+)\]", re.MULTILINE)
_ON_ONE: Final = re.compile(r"^(evidence = \[.*)\]", re.MULTILINE)


class Applied(NamedTuple):
    """What became of the rows of a report.

    Attributes:
        written: Those that got the evidence.
        known: Those that had it.
        others: Entries of rows that do not hold for every backend that was tried.
    """

    written: list[str]
    known: list[str]
    others: list[Entry]


def apply(report: Report, ref: str, tables: Tables) -> Applied:
    """Add evidence to every row that holds for each backend of a report; comments of the files stay.

    Args:
        report: The report.
        ref: The name under which it lies in `benchmarks/results`.
        tables: The tables, whose files are changed.

    Raises:
        ArgumentError: The evidence of a row is written in a form that nobody expected.
    """
    by_rule: dict[str, list[Entry]] = defaultdict(list)
    for entry in report.entries:
        by_rule[entry.rule].append(entry)
    # What a missing package kept from being tried says nothing against the row.
    tried = {rule: [e for e in entries if e.inside or e.outside] for rule, entries in by_rule.items()}
    holding = {rule for rule, found in tried.items() if found and all(e.verdict == "holds" for e in found)}
    rows = {row.id: row for row in tables.all_rows() if row.id in holding}
    applied = Applied([], [], [e for rule, found in by_rule.items() if rule not in rows for e in found])
    by_file: dict[Path, list[RuleRow]] = defaultdict(list)
    for row in rows.values():
        if any(e.kind == "measured" and e.ref == ref for e in row.rule.evidence):
            applied.known.append(row.id)
        else:
            by_file[row.file].append(row)
    for path, found in by_file.items():
        _write(path, found, ref, report.date)
        applied.written.extend(row.id for row in found)
    return applied


def _write(path: Path, rows: list[RuleRow], ref: str, day: str) -> None:
    parts = split(path.read_text(encoding="utf-8"))
    is_several = path.stem == SEVERAL and path.parent.name == ANY
    for row in rows:
        scope, file, name = row.id.split("/")
        for at, part in enumerate(parts):
            found = rule_in(part)
            if found.get("name") == name and (not is_several or f"{scope}/{file}" in found["files"]):
                place = f'file = "{scope}/{file}", ' if is_several else ""
                parts[at] = _with_evidence(
                    part, f'{{ {place}kind = "measured", ref = "{ref}", date = {day} }}'
                )
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
