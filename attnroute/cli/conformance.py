"""`attnroute conformance`: hold the rows of the tables against the kernels of this machine, on both sides."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnroute.cli._host import add_host, host_of, probed
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.question.line import parse
from attnroute.report.sentences import host_line
from attnroute.settings import current
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

if TYPE_CHECKING:
    from attnroute.conformance.points import Points
    from attnroute.conformance.report import Report
    from attnroute.question.host import Host
    from attnroute.tables.folders import Tables

FOUND_WRONG: Final = 1
INTERRUPTED: Final = 130
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SHOWN: Final = 20


def run(words: list[str]) -> int:
    """Run; 1 where a row is too loose or a call is wrong, 130 where the user ended it."""
    args = _parser().parse_args(words)
    if args.call is not None:
        return _one(args)
    tables = load(current().tables)
    if args.apply is not None:
        return _apply(args.apply, tables, write=not args.dry_run)
    return _dry_run(args, tables) if args.dry_run else _rows(args, tables)


def _parser() -> Parser:
    parser = Parser(
        "conformance",
        "Hold every row of the capability tables that applies to this machine against its kernels: calls\n"
        "just inside must be right in every memory layout, calls just outside must be refused or wrong.",
    )
    parser.add_argument("--backend", metavar="B", help="only this backend")
    parser.add_argument("--rule", type=_names, default=(), metavar="IDS", help="only these rows")
    parser.add_argument(
        "--budget", type=_span, default=float("inf"), metavar="20m", help="begin nothing after so long"
    )
    parser.add_argument("--resume", action="store_true", help="go on from what an interrupted run finished")
    parser.add_argument(
        "--out", type=Path, default=Path("conformance.json"), metavar="REPORT", help="conformance.json"
    )
    parser.add_argument("--processes", type=_count, metavar="N", help="how many work side by side")
    parser.add_argument(
        "--apply", type=Path, metavar="REPORT", help="write it as evidence into the rows that hold"
    )
    parser.add_argument("--fuzz", type=_count, metavar="N", help="run so many drawn calls instead of rows")
    parser.add_argument("--seed", type=int, default=0, help="of drawn calls; 0")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the calls, running nothing, which needs no GPU; with --apply write nothing",
    )
    add_host(parser)
    one = parser.add_argument_group("one call, as reports name it")
    one.add_argument("--call", metavar="LINE", help="run this call and hold it against float64")
    one.add_argument(
        "--memory", type=_names, default=(), metavar="ORDERS", help="of query, key and value: bshd,bshd,bshd"
    )
    one.add_argument(
        "--values",
        choices=("usual", "sharp", "low", "equal", "zeros", "garbage"),
        default="usual",
        help="what tensors hold",
    )
    one.add_argument("--past", type=_names, default=(), metavar="IDS", help="rows that do not count")
    one.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    return parser


def _span(text: str) -> float:
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"requires a time like 20m, 90s or 2h; got {quoted(text)}")
    return float(found[1]) * _SECONDS[found[2]]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"requires a number of at least 1; got {quoted(text)}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _plan(args: argparse.Namespace, tables: Tables, host: Host) -> list[Points]:
    """Return the points of the rows that the flags name.

    Raises:
        ArgumentError: They name none.
    """
    from attnroute.conformance.campaign import planned

    backends = _backends(args, tables)
    plan = planned(tables, host, backends, args.rule)
    if not plan:
        known = {row.id for backend in backends for row in tables.rules(host.arch, backend) or ()}
        near = did_you_mean(args.rule[0] if args.rule else "", known) or "."
        got = quoted(", ".join(args.rule)) if args.rule else "none"
        raise ArgumentError(
            f"attnroute conformance requires a row that applies to {host.arch}; got {got}{near}"
        )
    return plan


def _backends(args: argparse.Namespace, tables: Tables) -> tuple[str, ...]:
    """Return the backend that is named, or all."""
    if args.backend is None:
        return tuple(tables.backends)
    if args.backend not in tables.backends:
        near = did_you_mean(args.backend, tables.backends) or "."
        required = f"one of {', '.join(tables.backends)}"
        raise ArgumentError(f"--backend requires {required}; got {quoted(args.backend)}{near}")
    return (args.backend,)


def _dry_run(args: argparse.Namespace, tables: Tables) -> int:
    host = host_of(args, tables)
    plan = _plan(args, tables, host)
    print(f"on {host_line(host)}")
    for points in plan:
        reason = f": not testable here: {points.reason}" if points.reason else ""
        print(f"{points.row.id} for {points.backend}{reason}")
        for name, side in (("inside", points.inside), ("outside", points.outside)):
            if points.reason:
                continue
            lines = dict.fromkeys(trial.line for trial in side.trials)
            print(*(f"    {name:7}  {line}" for line in lines or [side.reason]), sep="\n")
    trials = sum(len(p.inside.trials) + len(p.outside.trials) for p in plan)
    print(f"{len(plan)} rows, {trials} calls with all memory layouts and values")
    return 0


def _rows(args: argparse.Namespace, tables: Tables) -> int:
    if args.arch or args.host or args.given or args.without:
        flags = "--arch, --host, --with and --without"
        raise ArgumentError(f"{flags} require --dry-run; got none: rows are held against this machine.")
    host = probed(tables)
    from attnroute.conformance.campaign import Campaign, processes
    from attnroute.conformance.pool import Pool
    from attnroute.question.host import device_of

    count = args.processes or processes(device_of(host.arch))
    if args.fuzz is not None:
        return _drawn(args, tables, host, count)
    plan = _plan(args, tables, host)
    print(f"on {host_line(host)}, {len(plan)} rows, {count} processes", flush=True)
    campaign = Campaign(args.out, host, _say, resume=args.resume)
    try:
        campaign.run(plan, Pool(count, time.monotonic() + args.budget))
    except KeyboardInterrupt:
        _summary(campaign.report(plan), args.out)
        print("interrupted; --resume goes on from here")
        return INTERRUPTED
    report = campaign.report(plan)
    _summary(report, args.out)
    return FOUND_WRONG if any(entry.verdict == "too loose" for entry in report.entries) else 0


def _apply(path: Path, tables: Tables, *, write: bool) -> int:
    """Write a report of `benchmarks/results` into the tables, and list the rows that got nothing.

    Raises:
        ArgumentError: The report lies elsewhere, where evidence names none.
    """
    from attnroute.conformance.apply import apply
    from attnroute.conformance.report import Report

    results = shipped_folder().parent / "benchmarks" / "results"
    if path.absolute().parent != results:
        raise ArgumentError(f"--apply requires a report in {results}; got {path}; copy it there.")
    applied = apply(Report.read(path), path.stem, tables, write=write)
    for entry in applied.others:
        print(f"{entry.verdict}: {entry.rule} for {entry.backend}: {entry.reason}")
    got = "got" if write else "would get"
    counts = f"{len(applied.written)} rows {got} evidence, {len(applied.known)} had it"
    print(f"{counts}, {len(applied.others)} entries are of rows that got none")
    measured, bare = len(applied.measured), len(applied.unmeasured)
    share = measured / max(1, measured + bare)
    print(f"{measured} of {measured + bare} rows that apply to the machine are measured ({share:.0%})")
    if bare:
        print(f"not measured: {', '.join(applied.unmeasured)}")
    return 0


def _drawn(args: argparse.Namespace, tables: Tables, host: Host, count: int) -> int:
    """Run drawn calls; 1 where one failed."""
    from attnroute.conformance.campaign import report_of
    from attnroute.conformance.draw import jobs
    from attnroute.conformance.fuzz import fuzz
    from attnroute.conformance.pool import Pool

    began = time.monotonic()
    print(f"on {host_line(host)}, {args.fuzz} calls of seed {args.seed}, {count} processes", flush=True)
    backends = _backends(args, tables)
    try:
        found = fuzz(
            jobs(tables, host, backends, args.fuzz, args.seed),
            args.fuzz,
            Pool(count, began + args.budget),
            _say,
        )
    except KeyboardInterrupt:
        print("interrupted")
        return INTERRUPTED
    report_of(host, began, drawn=found).write(args.out)
    for result in found.failures:
        print(f"{result.outcome.status}: {result.outcome.said}\n    {result.command}")
    print(", ".join(f"{number} {status}" for status, number in found.counts.items()))
    print(", ".join(f"{backend} {number} right" for backend, number in sorted(found.right.items())))
    print(f"in {args.out}, after {time.monotonic() - began:.0f} s")
    return FOUND_WRONG if found.failures else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _summary(report: Report, path: Path) -> None:
    counts = Counter(entry.verdict for entry in report.entries)
    for verdict in ("not testable here", "argued", "too strict", "too loose"):
        found = [entry for entry in report.entries if entry.verdict == verdict]
        for entry in found[:_SHOWN]:
            print(f"{verdict}: {entry.rule} for {entry.backend}: {entry.reason}")
        if len(found) > _SHOWN:
            print(f"{verdict}: {len(found) - _SHOWN} more in {path}")
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    print(f"in {path}, after {report.seconds:.0f} s")


def _one(args: argparse.Namespace) -> int:
    """Run one call in a process of its own, and say what came of it."""
    import torch

    from attnroute.conformance.pool import LIMIT, Worker
    from attnroute.conformance.trials import Trial

    parse(args.call)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: getattr(args, name) for name in ("backend", "memory", "values", "past")}
    worker = Worker()
    outcome = worker.ask(Trial(line=args.call, device=device, **given), LIMIT[device])
    worker.end()
    parts = [outcome.status, *([f"on {outcome.ran}"] if outcome.ran else [])]
    print(" ".join(parts) + (f": {outcome.said}" if outcome.said else ""))
    return 0 if outcome.status == "right" else FOUND_WRONG
