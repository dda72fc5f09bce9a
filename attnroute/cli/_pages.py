"""`attnroute tables pages` and `attnroute tables changes`: what people read about the tables."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from attnroute.cli._parser import Parser
from attnroute.cli.matrix import CALLS, every_machine
from attnroute.errors import ArgumentError, TableError, quoted, shortened
from attnroute.report import matrix
from attnroute.report.changes import Rows, render_changes, rows_of
from attnroute.report.pages import MARK, ORDERS, backend_page, index_page, orders_page
from attnroute.report.sentences import assumptions
from attnroute.settings import current
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import FILE


def pages(words: list[str]) -> int:
    """Write the reference pages of the tables in use, or say which of them are not as the tables say."""
    parser = Parser("tables pages", "Write the reference pages: one per backend, orders, and a matrix.")
    parser.add_argument("--out", type=Path, default=Path("docs/reference"), help="folder of the pages")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a page is not current"
    )
    args = parser.parse_args(words)
    tables = load(current().tables)
    if args.check:
        stale = [name for name, text in texts(tables) if not _holds(args.out / name, text)]
        if stale:
            sentence = f"requires what the tables say in {', '.join(stale)}; got something else"
            raise TableError(f"{args.out} {sentence}; run `attnroute tables pages`.")
        print(f"{args.out} is what the tables say")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts(tables):
        (args.out / name).write_text(text, encoding="utf-8")
    return 0


def changes(words: list[str]) -> int:
    """Print which rows changed since a commit or tag, or between two."""
    parser = Parser(
        "tables changes", "Print which rows changed, as the changelog's section on capability data."
    )
    parser.add_argument(
        "since", metavar="REF", help="a commit or tag, or two as A..B; the second is what is there"
    )
    args = parser.parse_args(words)
    before, _, after = args.since.partition("..")
    print(render_changes(_rows_at(before), _rows_at(after) if after else _rows_here()), end="")
    return 0


def texts(tables: Tables) -> Iterator[tuple[str, str]]:
    """Give every page with its name."""
    yield "index.md", index_page(tables)
    yield "matrix.md", _matrix(tables)
    yield f"{ORDERS}.md", orders_page(tables)
    for backend in tables.backends:
        yield f"{backend}.md", backend_page(tables, backend)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _matrix(tables: Tables) -> str:
    """Return the page of what each architecture gets, with the newest known torch and no package besides."""
    machines = every_machine(tables)
    (clause,) = assumptions(machines[0].host)
    lines = ["# What each architecture gets", "", MARK, ""]
    lines += [f"On machines with torch alone, {clause}; `attnroute matrix` asks about others.", ""]
    lines += [matrix.markdown_machines(machines), "", "## The calls", ""]
    lines += [f"* {name}: `{line}`" for name, line in CALLS.items()]
    lines += ["", "## What else could run", "", f"{matrix.markdown_legend()}."]
    for machine in machines:
        lines += ["", f"### {machine.host.arch}", "", matrix.markdown_machine(machine)]
    return "\n".join(lines) + "\n"


def _rows_here() -> Rows:
    folder = shipped_folder()
    paths = [*sorted(folder.glob("*/*.toml")), folder / FILE]
    return rows_of({p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in paths})


def _rows_at(ref: str) -> Rows:
    """Read the shipped tables as they were.

    Raises:
        ArgumentError: git is not there, knows no such commit, or this is no checkout.
    """
    folder = shipped_folder()
    command = ["git", "-C", str(folder), "archive", "--format=tar", "--", ref]
    try:
        done = subprocess.run(command, capture_output=True, check=True)  # noqa: S603 - git, with a path and a ref
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        reason = shortened(said.decode(errors="replace").strip())
        raise ArgumentError(f"REF requires a commit of a checkout; got {quoted(ref)} ({reason}).") from error
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        members = [
            m for m in tar if m.isfile() and (m.name == FILE or re.fullmatch(r"[^/]+/[^/]+\.toml", m.name))
        ]
        files = {m.name: found.read().decode() for m in members if (found := tar.extractfile(m))}
    return rows_of(files)
