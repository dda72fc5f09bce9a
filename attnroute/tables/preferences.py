"""Which backends come first for which calls: the `[[prefer]]` rows of one architecture, strongest first.

They are read as one list: the rows of the architecture's own `arch.toml`, then those of the architecture that
it inherits from, then those of `any/`; all rows of an overlay stand before the shipped ones. Of the rows that
hold for a call each names its backends, and a backend stands where it is named first. A row without a
condition is a base order: it is the end of what most architectures say, and `any/` ends with one for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attnroute.errors import TableError
from attnroute.memory import TABLES, cached
from attnroute.tables.archs import ArchTable
from attnroute.tables.folders import ANY
from attnroute.tables.read import read
from attnroute.tables.rows import PreferenceRow

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables


@cached(64, TABLES)
def preferences(tables: Tables, arch: str) -> tuple[PreferenceRow, ...]:
    """Return every preference that may hold on an architecture, the one that counts most first.

    Raises:
        TableError: A row names a backend that the tables do not know, or a file is malformed.
    """
    scopes = dict.fromkeys((*tables.ancestors(arch), ANY))
    found: dict[str, PreferenceRow] = {}
    rows = (row for folder in reversed(tables.folders) for scope in scopes for row in _rows(folder, scope))
    for row in rows:
        where = f"{row.file.parent.name}/arch.toml: prefer {row.preference.name}: first"
        tables.check_known(where, row.preference.first)
        # A row of an overlay replaces a shipped one of the same id.
        found.setdefault(row.id, row)
    return tuple(found.values())


def all_preferences(tables: Tables) -> tuple[PreferenceRow, ...]:
    """Return every preference of every architecture once."""
    return tuple({row.id: row for arch in tables.arch_names for row in preferences(tables, arch)}.values())


def in_order(rows: Iterable[PreferenceRow]) -> tuple[str, ...]:
    """Return the backends that rows name, each where the first row that names it puts it."""
    return tuple(dict.fromkeys(name for row in rows for name in row.preference.first))


def placed(rows: Iterable[PreferenceRow], backends: Iterable[str]) -> tuple[str, ...]:
    """Return backends as rows put them; those that none of them names come last, by name."""
    wanted = sorted(backends)
    named = dict.fromkeys((*in_order(rows), *wanted))
    return tuple(name for name in named if name in wanted)


def _rows(folder: Path, scope: str) -> Iterator[PreferenceRow]:
    path = folder / scope / "arch.toml"
    names: set[str] = set()
    for preference in read(path, ArchTable).prefer if path.is_file() else ():
        if preference.name in names:
            where = f"{scope}/arch.toml: prefer {preference.name}"
            raise TableError(f"{where}: name requires a unique value; it stands twice.")
        names.add(preference.name)
        yield PreferenceRow(f"{scope}/arch/{preference.name}", preference, path)
