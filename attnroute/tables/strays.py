"""Files of a table folder that nothing reads: a row in one of them would be lost without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from attnroute.errors import TableError, did_you_mean
from attnroute.question.host import ARCH
from attnroute.tables.costs import FOLDER as COSTS
from attnroute.tables.folders import ANY, NO_BACKEND, SHARED, Tables
from attnroute.tables.read import shipped_folder

_RELEASES: Final = "releases.toml"
_BESIDE: Final = frozenset({"schema.json"})
_TABLE: Final = ".toml"


class Stray(NamedTuple):
    """A file or folder, below its table folder, and what is wrong with it."""

    file: str
    sentence: str


def check_overlay(folder: Path, tables: Tables) -> None:
    """Refuse an overlay with a file that nothing reads.

    Raises:
        TableError: It has one, or a file cannot be read.
    """
    try:
        stray = next(strays(folder, tables), None)
    except OSError as error:
        raise TableError(f"{folder} requires files that can be read; got: {error.strerror}.") from error
    if stray is not None:
        raise TableError(f"{folder / stray.file}: {stray.sentence}")


def strays(folder: Path, tables: Tables) -> Iterator[Stray]:
    """Give every file of a folder that nothing reads; hidden files and pages (*.md) aside.

    Args:
        folder: One of the folders of the tables.
        tables: The tables.

    Raises:
        TableError: A file that must be read to know that is malformed.
    """
    for path in _visible(folder):
        if path.is_dir():
            yield from _in_folder(path, tables)
        elif path.suffix != ".md" and path.name not in _BESIDE and not _is_releases(path):
            known = ", ".join(_scopes(tables))
            yield Stray(path.name, f"requires a folder around it, one of {known}; nothing reads it here.")


def _is_releases(path: Path) -> bool:
    """Only the shipped file says what wheels of torch bring along; a copy of it says nothing else."""
    shipped = shipped_folder() / _RELEASES
    return path.name == _RELEASES and path.read_bytes() == shipped.read_bytes()


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _in_folder(folder: Path, tables: Tables) -> Iterator[Stray]:
    scope, paths = folder.name, [p for p in _visible(folder) if p.suffix != ".md"]
    if scope not in _scopes(tables) or (scope not in (ANY, SHARED) and not re.fullmatch(ARCH, scope)):
        near = did_you_mean(scope, _scopes(tables)) or f"; known folders are {', '.join(_scopes(tables))}."
        for path in paths or [folder]:
            file = f"{scope}/{path.name}" if paths else scope
            yield Stray(file, f"requires {scope}/arch.toml beside it, for an architecture; got none{near}")
        return
    for path in paths:
        file = f"{scope}/{path.name}"
        if path.name == COSTS and path.is_dir() and scope not in (ANY, SHARED):
            yield from _in_costs(path, scope, tables)
        elif path.is_dir() or path.suffix != _TABLE:
            near = did_you_mean(path.name, [f"{stem}{_TABLE}" for stem in _stems(scope, tables)]) or "."
            yield Stray(file, f"requires a file whose name ends in {_TABLE}, as nothing reads another{near}")
        elif path.stem not in _stems(scope, tables):
            yield Stray(file, _unread(scope, path.stem, tables))


def _in_costs(folder: Path, scope: str, tables: Tables) -> Iterator[Stray]:
    for path in _visible(folder):
        if path.suffix != _TABLE or path.stem not in tables.backends:
            near = did_you_mean(path.stem, tables.backends) or f"; backends are {', '.join(tables.backends)}."
            yield Stray(f"{scope}/{COSTS}/{path.name}", f"requires a backend's name and {_TABLE}{near}")


def _scopes(tables: Tables) -> list[str]:
    return [ANY, SHARED, *tables.arch_names]


def _stems(scope: str, tables: Tables) -> list[str]:
    if scope == SHARED:
        return _included(tables)
    return [*tables.backends, *(NO_BACKEND if scope == ANY else ["arch"])]


def _unread(scope: str, stem: str, tables: Tables) -> str:
    near = did_you_mean(stem, _stems(scope, tables))
    if scope == SHARED:
        return f"requires a file that includes it; got none; remove it{near or '.'}"
    known = ", ".join(tables.backends)
    return f"requires a backend's name, one of {known}; got {stem}{near or '.'}"


def _included(tables: Tables) -> list[str]:
    """Return the files of shared/ that some file includes."""
    read = [place for place in tables.places if place[0] in _scopes(tables)]
    named = {name for place in read for table in tables.files(*place) for name in table.include}
    return sorted(name.partition("/")[2] for name in named if name.startswith(f"{SHARED}/"))
