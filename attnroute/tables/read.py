"""Find the shipped tables, read one file, and say in one sentence what is wrong with it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from attnroute.errors import ECHO, TableError, shortened
from attnroute.memory import INSTALLED, cached

_Model = TypeVar("_Model", bound=BaseModel)
_PACKAGED = Path(__file__).parent.parent / "_capability_tables"
_SIBLING = Path(__file__).parent.parent.parent / "capability_tables"


def shipped_folder() -> Path:
    """Return the folder of the tables that came with this installation.

    Raises:
        TableError: Neither the packaged nor the sibling folder is there.
    """
    for folder in (_PACKAGED, _SIBLING):
        if folder.is_dir():
            return folder
    msg = f"attnroute requires its capability tables at {_PACKAGED} or {_SIBLING}; got neither; reinstall it."
    raise TableError(msg)


@cached(4096, INSTALLED)
def read(path: Path, model: type[_Model]) -> _Model:
    """Return a file as its model. It is read once; `read.cache_clear()` lets it be read again.

    Raises:
        TableError: It cannot be read, is no TOML, or is not what the model says; the sentence names the row.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # Python's own limits of digits and of nesting are met before any row is seen.
        nests = isinstance(error, RecursionError)
        reason = "it nests too deeply" if nests else shortened(str(error), 2 * ECHO)
        msg = f"{path}: requires TOML; {reason}."
        raise TableError(msg) from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise TableError(_sentence(path, data, error)) from error


def _sentence(path: Path, data: dict[str, object], error: ValidationError) -> str:
    """Name the file, the rule and the field of the first problem."""
    file = f"{path.parent.name}/{path.name}"
    if path.name == "arch.toml" and "order" in data:
        # Tables that were written before there were preferences have orders of all backends.
        required = "requires [[prefer]] rows, of which each names in first the backends that come first"
        to_do = (
            "rename [[order]] to [[prefer]], and in each row order to first; backends left out come behind"
        )
        return f"{file}: {required}; got [[order]]; {to_do}."
    first = error.errors()[0]
    where = [shortened(str(part)) for part in first["loc"]]
    rows = (
        data.get(where[0]) if where and where[0] in ("rule", "option", "prefer", "order", "release") else None
    )
    if len(where) > 1 and isinstance(rows, list):
        row = rows[int(where[1])]
        name = row.get("name", f"number {int(where[1]) + 1}") if isinstance(row, dict) else where[1]
        where = [f"{where[0]} {shortened(str(name))}", ".".join(where[2:]) or "whole row"]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    got = shortened(repr(first["input"]), 2 * ECHO)
    return f"{file}: {': '.join(where)}: {first['msg'].rstrip('.')}; got {got}{more}."
