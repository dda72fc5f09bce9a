"""One thing that is wrong with the tables, as the lint says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnroute.tables.rows import OptionRow, RuleRow

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables
    from attnroute.tables.schema import Option, Rule


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the tables.

    Attributes:
        file: The file below its table folder, e.g. `sm_90/cudnn.toml`.
        rule: The name of the row, empty when it is not about one.
        field: The key that must change.
        sentence: What is required, what was got, and what to do.
    """

    file: str
    rule: str
    field: str
    sentence: str

    def __str__(self) -> str:
        """Say it on one line."""
        return ": ".join(part for part in (self.file, self.rule, self.field, self.sentence) if part)


def problem_of(row: RuleRow | OptionRow, field: str, sentence: str) -> Problem:
    """Return a problem of one row."""
    return Problem(f"{row.file.parent.name}/{row.file.name}", said_by(row).name, field, sentence)


def said_by(row: RuleRow | OptionRow) -> Rule | Option:
    """Return what a row says."""
    return row.rule if isinstance(row, RuleRow) else row.option


def stating(tables: Tables) -> Iterator[RuleRow | OptionRow]:
    """Give every row that states something about kernels, each once."""
    yield from tables.all_rows()
    yield from tables.all_options()
