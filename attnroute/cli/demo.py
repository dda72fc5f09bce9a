"""`attnroute demo`: real calls here; what ran, why the others did not, how exact and how fast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnroute.cli._host import probed
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError
from attnroute.question.line import render
from attnroute.report.layout import WIDTH
from attnroute.report.sentences import host_line
from attnroute.report.text import render_others
from attnroute.settings import current
from attnroute.tables.load import load

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from attnroute.cli._demo_run import Outcome, Report

FOUND_WRONG = 1


def run(words: list[str]) -> int:
    """Run every case; 1 where another kernel ran than was named, or an error is too large."""
    parser = Parser(
        "demo", "Run real calls here: what ran, why not the others, how exact, how fast beside stock."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    args = parser.parse_args(words)
    probed(load(current().tables))
    return _run(args.device)


def _run(device_type: str | None) -> int:
    import torch
    from rich.console import Console

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and found != "cuda":
        raise ArgumentError("--device cuda requires a CUDA device; got none that torch sees; leave it out.")
    device = torch.device(device_type or found)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    reports = _reports(device, console)
    _summary(reports, console)
    problems = [f"{report.case.title}: {problem}" for report in reports for problem in report.problems]
    for problem in problems:
        console.print(f"wrong: {problem}", markup=False)
    return FOUND_WRONG if problems else 0


def _reports(device: torch.device, console: Console) -> list[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from attnroute.cli._demo_cases import CASES
    from attnroute.cli._demo_run import run_case

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    reports: list[Report] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(CASES))
        for case in CASES:
            progress.update(task, description=case.title)
            report = run_case(case, device)
            if not reports:
                console.print(f"on {host_line(report.decision.host)}", markup=False)
            reports.append(report)
            console.print(_told(report), markup=False)
            progress.advance(task)
    return reports


def _told(report: Report) -> str:
    decision, ours, stock = report.decision, report.ours, report.stock
    lines = [
        "",
        report.case.title,
        f"call       {render(decision.call)}",
        f"ran        {', '.join(ours.backends)}, {_numbers(ours)}",
        f"stock ran  {', '.join(stock.backends) or 'nothing known'}, {_numbers(stock)}",
        render_others(decision),
    ]
    return "\n".join(lines)


def _numbers(outcome: Outcome) -> str:
    if outcome.failure:
        return outcome.failure
    return f"error {_error(outcome)}, {outcome.milliseconds:.3g} ms"


def _error(outcome: Outcome) -> str:
    return "not finite" if math.isinf(outcome.error) else f"{outcome.error:.1e}"


def _summary(reports: list[Report], console: Console) -> None:
    from rich.table import Table

    table = Table(
        title="errors against float64, of output and gradients; times in milliseconds", title_justify="left"
    )
    for column in ("call", "", "ran", "error", "time", "stock ran", "error", "time", "gain"):
        table.add_column(column)
    for report in reports:
        phase = "train" if report.case.train else "forward"
        gain = report.stock.failure or f"{report.stock.milliseconds / report.ours.milliseconds:.1f}x"
        table.add_row(report.case.title, phase, *_columns(report.ours), *_columns(report.stock), gain)
    console.print()
    console.print(table)


def _columns(outcome: Outcome) -> tuple[str, str, str]:
    if outcome.failure:
        return "", "", ""
    return ", ".join(outcome.backends), _error(outcome), f"{outcome.milliseconds:.3g}"
