"""Lifts rows of the tables by an overlay, so that a kernel gets what they keep from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from attnroute import settings
from attnroute.conformance.text import rule_in, split

_TABLES: Final = f"{settings.PREFIX}TABLES"
_FEATURE: Final = "feature-"
_EVIDENCE: Final = 'evidence = [{ kind = "own", ref = "attnroute/conformance/past.py" }]'
_NEVER: Final = (
    '\n[[rule]]\nname = "{}"\nversions = {{ torch = "<0.0.1" }}\nrequires = "never"\nbecause = "lifted"\n'
)
_YES: Final = "\n[features.{}]\nvalue = true\n"


@contextmanager
def past(rows: Iterable[str]) -> Iterator[None]:
    """Let some rows, by their ids, not apply to the calls inside the block."""
    rows = tuple(rows)
    if not rows:
        yield
        return
    before = os.environ.get(_TABLES)
    with TemporaryDirectory(prefix="attnroute-") as name:
        folder = Path(name) / "tables"
        overlay(folder, rows, settings.current().tables)
        # override() has no tables, and a block of it would be looked up in each call that repeats.
        os.environ[_TABLES] = str(folder)
        settings.reload()
        try:
            yield
        finally:
            del os.environ[_TABLES]
            os.environ.update({} if before is None else {_TABLES: before})
            settings.reload()


def overlay(folder: Path, rows: Iterable[str], below: Path | None) -> None:
    """Write an overlay in which rows never apply and features are there.

    Args:
        folder: Where to.
        rows: Ids of rows and of answers about features.
        below: An overlay that holds as well.
    """
    if below is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(below, folder)
    for row in rows:
        scope, file, name = row.split("/")
        _drop(folder / "any" / "several.toml", name)
        path = folder / scope / f"{file}.toml"
        path.parent.mkdir(exist_ok=True)
        _drop(path, name)
        feature = name.removeprefix(_FEATURE).replace("-", "_")
        form = _YES.format(feature) if name.startswith(_FEATURE) else _NEVER.format(name)
        with path.open("a", encoding="utf-8") as file_:
            file_.write(f"{form}{_EVIDENCE}\n")


def _drop(path: Path, name: str) -> None:
    """Take a row out of a file."""
    if not path.is_file():
        return
    parts = split(path.read_text(encoding="utf-8"))
    path.write_text("".join(part for part in parts if rule_in(part).get("name") != name), encoding="utf-8")
