"""`attnroute tables audit`: hold the tables against what published releases say of themselves."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Final

from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, quoted
from attnroute.report.layout import wrapped
from attnroute.settings import current
from attnroute.tables.load import load

if TYPE_CHECKING:
    import argparse

    from attnroute.audit.compare import Comparison, Difference
    from attnroute.audit.fresh import State
    from attnroute.tables.folders import Tables

FOUND_WRONG: Final = 1
FRESH: Final = "fresh"
RELEASES: Final = ("cudnn", "fa4", "te", "te_choice", "torch")
"""Audits that run the code of releases; `attnroute.audit.<name>` has each."""
COMPILED: Final = "fa4"
_SHOWN: Final = 20


def run(words: list[str]) -> int:
    """Run one audit; 1 where it found something wrong."""
    args = parser().parse_args(words)
    if args.of == FRESH:
        return _fresh(load(current().tables))
    if args.of not in RELEASES:
        known = ", ".join((FRESH, *RELEASES))
        raise ArgumentError(f"audit requires one of {known}; got {quoted(args.of)}.")
    if args.compile and args.of != COMPILED:
        raise ArgumentError(f"--compile requires {COMPILED}, whose kernels are compiled; got {args.of}.")
    return _releases(args, load(current().tables))


def parser() -> Parser:
    """Return what reads the command line."""
    found = Parser(
        "tables audit",
        "Hold the tables against what published releases say of themselves. No GPU is needed; wheels come\n"
        "through pip into the user's cache folder.",
    )
    found.add_argument(
        "of",
        metavar="|".join((FRESH, *RELEASES)),
        help="which releases are published, or what those of a package take",
    )
    found.add_argument(
        "--version", action="append", metavar="V", help="this release; the newest known one by default"
    )
    found.add_argument(
        "--compile", action="store_true", help="of fa4: beside what was recorded to compile; see record"
    )
    found.add_argument("--all", action="store_true", help="every release that the tables know")
    return found


def _fresh(tables: Tables) -> int:
    """Print which releases are published that nobody looked at; 1 where there are any."""
    from attnroute.audit.fresh import states

    stale = False
    for state in states(tables):
        print(*_state_lines(state), sep="\n", flush=True)
        stale |= state.is_stale
    return FOUND_WRONG if stale else 0


def _state_lines(state: State) -> list[str]:
    if not state.newest:
        return wrapped(f"{state.package}: not on the index that pip is set to", "", "  ")
    parts = [f"{state.package}: the newest of {state.published} is {state.newest}"]
    if state.inside:
        parts.append(f"nobody looked at {', '.join(state.inside)}, which the tables take for known")
    if state.beyond:
        parts.append(f"nobody looked at {', '.join(state.beyond)}, with which backends are unknown")
    return wrapped("; ".join(parts) if state.is_stale else f"{parts[0]}, and all are known", "", "  ")


def _releases(args: argparse.Namespace, tables: Tables) -> int:
    """Hold the tables against releases, one line each; of one alone also the rows that are stricter."""
    module = "compiled" if args.compile else args.of
    audit = import_module(f"attnroute.audit.{module}").Audit(tables)
    versions = args.version or (audit.versions() if args.all else audit.versions()[:1])
    wrong = 0
    for version in versions:
        found: Comparison = audit.release(version)
        print(f"{audit.package} {version}: {_counts(found)}", flush=True)
        lines = _loose(found.loose) + _undecided(found.undecided)
        if len(versions) == 1:
            lines += _strict(found.strict, tables)
        for line in lines:
            print(line)
        wrong += len(found.loose)
    return FOUND_WRONG if wrong else 0


def _counts(found: Comparison) -> str:
    undecided = found.undecided.total()
    total = found.agree + len(found.loose) + len(found.strict) + undecided
    counts = f"{found.agree} judged alike, {len(found.loose)} too loose, {len(found.strict)} stricter"
    return f"{total} answers, {counts}" + (f", {undecided} undecided" if undecided else "")


def _loose(found: list[Difference]) -> list[str]:
    """Return calls that the tables accept and the release refuses."""
    shown = (f"{each}: {each.said}" for each in found[:_SHOWN])
    lines = [line for text in shown for line in wrapped(text, "  too loose  ", " " * 13)]
    return [*lines, f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else lines


def _strict(found: list[Difference], tables: Tables) -> list[str]:
    """Return the rows that refuse what the release takes: how often, how often alone, why, and one call."""
    rules = {row.id: row.rule for row in tables.all_rows()}
    refused = Counter(row for each in found for row in each.rows)
    alone = Counter(row for each in found for row in each.rows if len(each.rows) == 1)
    first = {row: each for each in reversed(found) for row in each.rows}
    lines = []
    for row, count in refused.most_common():
        kinds = (
            [rules[row].kind, *dict.fromkeys(e.kind for e in rules[row].evidence)]
            if row in rules
            else ["feature"]
        )
        text = f"{row} ({', '.join(kinds)}): {count} calls, {alone[row]} of them alone; {first[row]}"
        lines += wrapped(text, "  stricter  ", " " * 12)
    return lines


def _undecided(found: Counter[str]) -> list[str]:
    """Return where the code of the release did not come to an answer."""
    return [
        line
        for what, n in found.most_common(_SHOWN)
        for line in wrapped(f"{what}: {n} calls", "  undecided  ", " " * 13)
    ]
