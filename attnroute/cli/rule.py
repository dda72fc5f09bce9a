"""`attnroute rule ID`: one row, with its versions, guard and evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnroute.cli._parser import Parser, add_format
from attnroute.cli._terminal import columns, painted
from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.memory import TABLES, cached
from attnroute.report.pages import places
from attnroute.report.rules import Row, render_row, row_json
from attnroute.settings import current
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.preferences import all_preferences
from attnroute.tables.read import shipped_folder


def run(words: list[str]) -> int:
    """Print the row that a finding names."""
    parser = Parser("rule", "Print one row of the capability tables: versions, guard, condition, evidence.")
    parser.add_argument(
        "id", metavar="ID", help="as explanations print it in brackets: any/flash/head-dims-equal"
    )
    add_format(parser)
    args = parser.parse_args(words)
    row = _find(args.id, load(current().tables))
    print(row_json(row) if args.format == "json" else painted(render_row(row, columns())))
    return 0


def _find(wanted: str, tables: Tables) -> Row:
    rows = _by_id(tables)
    if wanted not in rows:
        near = did_you_mean(wanted, rows) or "; `attnroute explain -v` prints ids in brackets."
        raise ArgumentError(f"ID requires the id of a row; got {quoted(wanted)}{near}")
    # An overlay's rows are on no page.
    page = places(Tables((shipped_folder(),))).get(wanted, "")
    return replace(rows[wanted], page=f"docs/reference/{page}" if page else "")


@cached(4, TABLES)
def _by_id(tables: Tables) -> dict[str, Row]:
    return {row.id: row for row in _rows(tables)}


def _rows(tables: Tables) -> Iterator[Row]:
    """Everything that an explanation may name; where two folders say the same id, the later holds."""
    for row in tables.all_rows():
        yield Row(row.id, f"{row.file.parent.name}/{row.file.name}", row.rule)
    for option in tables.all_options():
        yield Row(option.id, f"{option.file.parent.name}/{option.file.name}", option.option)
    for preference in all_preferences(tables):
        yield Row(preference.id, f"{preference.file.parent.name}/arch.toml", preference.preference)
    for backend, info in tables.backends.items():
        yield Row(f"any/{backend}/versions-known", f"any/{backend}.toml", info)
        for arch in tables.arch_names:
            if (wrong_device := tables.device_row(arch, backend)) is not None:
                yield Row(wrong_device.id, f"any/{backend}.toml", wrong_device.rule)
            if tables.rules(arch, backend) is None:
                yield Row(f"{arch}/{backend}/no-table", f"any/{backend}.toml", info)
            for answer in tables.features(arch, backend).values():
                yield Row(answer.id, f"{answer.id.partition('/')[0]}/{backend}.toml", answer.answer)
