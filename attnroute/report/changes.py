"""What changed between two states of the tables, row by row, as the changelog says it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attnroute.errors import printable

Rows = dict[str, dict[str, Any]]
"""The content of every row by its id."""
_KINDS: Final = ("rule", "option", "prefer")
_UNSAID: Final = frozenset(
    {"name", "files", "refuses", "takes", "not_for", "kernels", "evidence", "recheck_after"}
)
"""Keys that change no decision."""


def rows_of(files: Mapping[str, str]) -> Rows:
    """Return the rows of some table files.

    Args:
        files: The text of each, by `<folder>/<name>.toml`. Rows are read without their models, as those of
            an older state may have been others.
    """
    found: Rows = {}
    for path, text in files.items():
        place, data = path.removesuffix(".toml"), tomllib.loads(text)
        for row in (row for kind in _KINDS for row in data.get(kind, ())):
            found |= {f"{home}/{row['name']}": row for home in row.get("files", [place])}
        for name, answer in data.get("features", {}).items():
            found[f"{place}/feature-{name.replace('_', '-')}"] = answer
        if "backend" in data:
            found[f"{place}/versions-known"] = data["backend"]
        for name, release in data.get("untested", {}).items():
            found[f"releases/{name}/untested"] = {release: release}
    return found


def render_changes(before: Rows, after: Rows) -> str:
    """Return the section: what was added, changed, moved and removed, by backend or file."""
    groups: dict[str, list[str]] = {}
    for row_id, line in _lines(before, after):
        groups.setdefault(row_id.split("/")[1], []).append(line)
    if not groups:
        return "No row changed.\n"
    parts = ["### Capability data", ""]
    for home, lines in sorted(groups.items()):
        parts += [f"{home}:", "", *lines, ""]
    return printable("\n".join(parts))


def _lines(before: Rows, after: Rows) -> Iterator[tuple[str, str]]:
    gone = {row_id: row for row_id, row in before.items() if row_id not in after}
    for row_id, row in after.items():
        if row_id in before:
            keys = _changed(before[row_id], row)
            if keys:
                yield row_id, f"- `{row_id}`: other {', '.join(keys)}{_because(row)}"
            continue
        old = next((other for other, its in gone.items() if not _changed(its, row)), None)
        if old is None:
            yield row_id, f"- `{row_id}`: new{_because(row)}"
        else:
            del gone[old]
            yield row_id, f"- `{row_id}`: before, it was `{old}`"
    for row_id, row in gone.items():
        yield row_id, f"- `{row_id}`: gone{_because(row)}"


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    keys = dict.fromkeys((*before, *after))
    return [key for key in keys if key not in _UNSAID and before.get(key) != after.get(key)]


def _because(row: dict[str, Any]) -> str:
    return f" ({row['because']})" if "because" in row else ""
