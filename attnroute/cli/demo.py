"""`attnroute demo`: real calls here, each held against float64; on a CPU also what a GPU makes of them."""

from __future__ import annotations

import math
import os
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from attnroute.cli._host import probed
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError
from attnroute.question.line import render
from attnroute.report.layout import WIDTH, size
from attnroute.report.sentences import host_line
from attnroute.settings import current
from attnroute.tables.load import load

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from attnroute.cli._demo_run import Outcome, Report

FOUND_WRONG = 1
_TABLE_WIDTH: Final = 88
"""Columns of the tables with the longest names of kernels."""
WRONG: Final = "[bold red]wrong[/]"


def run(words: list[str]) -> int:
    """Run every case; 1 where another kernel ran than was named, or an error is too large."""
    parser = Parser(
        "demo", "Run real calls here, hold each against float64, and time stock attention beside."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, by default")
    args = parser.parse_args(words)
    if find_spec("torch") is None:
        raise ArgumentError("attnroute demo requires torch; got an environment without it; install torch.")
    # The profiler, which tells which kernels ran, would write a line to stderr at its begin and at its end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # torch says at its import that numpy, which nothing here needs, is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    probed(load(current().tables))
    return _run(args.device)


def _run(device_type: str | None) -> int:
    import torch
    from rich.console import Console

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and found != "cuda":
        raise ArgumentError("--device cuda requires a CUDA device; got none that torch sees; leave it out.")
    device = torch.device(device_type or found)
    console = Console(highlight=False)
    # In a narrower place rich would cut numbers.
    console.width = max(console.width if console.is_terminal else WIDTH, _TABLE_WIDTH)
    reports = _reports(device, console)
    problems = _print_here(reports, console)
    if device.type == "cpu":
        _print_recorded(console)
    console.print(f'\nWhy a kernel: attnroute explain "{render(reports[0].decision.call)}"', markup=False)
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
            reports.append(run_case(case, device))
            progress.advance(task)
    return reports


def _table(*columns: str) -> Table:
    """Return a table of narrow columns, those of numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        is_number = column in ("error", "ms", "gain", "predicted")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return table


def _print_here(reports: list[Report], console: Console) -> list[str]:
    """Print what ran here, and return what is wrong with it."""
    table = _table("call", "ran", "result", "error", "ms", "stock", "", "ms", "gain")
    for report in reports:
        ran, result, error, took = _columns(report.ours, report)
        stock_ran, stock_result, _, stock_took = _columns(report.stock, report)
        gain = "" if report.stock.failure else _times(report.stock.milliseconds, report.ours.milliseconds)
        table.add_row(report.case.title, ran, result, error, took, stock_ran, stock_result, stock_took, gain)
    console.print(f"Here: {host_line(reports[0].decision.host)}", markup=False)
    console.print(table, soft_wrap=True)
    problems = [f"{report.case.title}: {problem}" for report in reports for problem in report.problems]
    for problem in problems:
        console.print(f"wrong: {problem}", markup=False)
    right = sum(not report.problems for report in reports)
    console.print(
        f"{right} of {len(reports)} right: output and gradients near float64, by the kernel that was named."
        " stock: scaled_dot_product_attention; gain: how many times as fast."
    )
    for report in reports:
        if sentence := _without_mask(report):
            console.print(sentence, markup=False)
    return problems


def _without_mask(report: Report) -> str:
    """Say why a call is slower than stock, where a faster kernel would need a mask of every query and key."""
    decision, selected = report.decision, report.decision.selected
    if report.stock.failure or selected is None or report.ours.milliseconds <= report.stock.milliseconds:
        return ""
    built = {v.backend: v.quadratic_bytes for v in decision.verdicts}
    others = [name for name in decision.order if name in report.stock.backends and built[name]]
    if built[selected] or not others:
        return ""
    mask = size(built[others[0]])
    return (
        f"{report.case.title}: {selected} comes first for its memory; {others[0]} needs a mask of {mask}, "
        "four times as much at twice the length."
    )


def _columns(outcome: Outcome, report: Report) -> tuple[str, str, str, str]:
    if outcome.failure:
        return "", outcome.failure, "", ""
    is_right = not report.problems if outcome is report.ours else report.is_right(outcome)
    error = "not finite" if math.isinf(outcome.error) else f"{outcome.error:.0e}"
    ran = ", ".join(outcome.backends) or "not known"
    return ran, "[green]right[/]" if is_right else WRONG, error, _number(outcome.milliseconds)


def _print_recorded(console: Console) -> None:
    """Print what a GPU makes of the same calls at the size of models, which needs no GPU to be known."""
    from attnroute.cli._demo_cases import CASES
    from attnroute.cli._demo_recorded import measured

    found = measured(load(current().tables))
    table = _table("call", "stock", "torch", "gain", "packages", "ms", "gain", "predicted")
    for case in CASES:
        row = found.calls[case.recorded]
        right_ms = row.stock_ms if row.stock_is_right else None
        alone, everything = (
            (choice.backend or "none", _number(choice.recorded_ms), _times(right_ms, choice.recorded_ms))
            for choice in (row.alone, row.everything)
        )
        table.add_row(
            case.title,
            WRONG if right_ms is None else _number(right_ms),
            alone[0],
            alone[2],
            *everything,
            _number(row.everything.predicted_ms),
        )
    console.print(
        "\nOn a CPU torch has one fused kernel, so there is little to gain. The same calls at the size of "
        f"models on an {found.card}, measured on {found.date} in milliseconds: what is selected with torch "
        f"alone, and with packages ({found.versions}).",
        markup=False,
    )
    console.print(table, soft_wrap=True)


def _number(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _times(stock_ms: float | None, ms: float | None) -> str:
    return "" if stock_ms is None or ms is None else f"{stock_ms / ms:.1f}x"
