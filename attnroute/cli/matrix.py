"""`attnroute matrix`: which backends take which standard calls."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from attnroute.cli._host import add_host, host_of
from attnroute.cli._parser import Parser
from attnroute.engine.decide import decide
from attnroute.errors import printable
from attnroute.question.line import parse
from attnroute.report.sentences import assumptions
from attnroute.settings import current
from attnroute.tables.folders import Tables
from attnroute.tables.load import load

if TYPE_CHECKING:
    from rich.table import Table

    from attnroute.engine.decision import Decision, Verdict

CALLS: Final[dict[str, str]] = {
    "prefill": "bf16 b1 hq32 hkv8 sq4096 skv4096 d128 causal",
    "training": "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train",
    "decode": "bf16 b16 hq32 hkv8 sq1 skv4096 d128",
    "float32": "fp32 b1 hq16 hkv16 sq2048 skv2048 d64 causal train",
    "mask tensor": "bf16 b1 hq16 hkv16 sq4096 skv4096 d64 dense=1x1x4096x4096 train",
    "sliding window": "bf16 b1 hq16 hkv8 sq16384 skv16384 d128 window=4095,0 train",
    "packed documents": "bf16 b1 hq16 hkv16 sq8192 skv8192 d128 causal documents=4096,4096 train",
    "prefix": "bf16 b1 hq16 hkv8 sq8192 skv8192 d128 prefix=1000 train",
    "score function": "bf16 b1 hq16 hkv8 sq4096 skv4096 d128 causal function_bias train",
    "head dim 256": "bf16 b1 hq16 hkv8 sq4096 skv4096 d256 causal train",
    "head dim 512": "bf16 b1 hq8 hkv4 sq4096 skv4096 d512 causal train",
    "MLA": "bf16 b1 hq16 hkv16 sq4096 skv4096 d192/128 causal train",
    "softcap": "bf16 b1 hq16 hkv8 sq4096 skv4096 d128 causal softcap=50 train",
    "bias gradient": "bf16 b1 hq8 hkv8 sq1024 skv1024 d64 bias=bf16:1x8x1024x1024:grad train",
}
"""The standard calls: what models ask for, one per kind of limit."""
_FILE_WIDTH: Final = 300
"""Columns of a file or pipe: no cell is folded there."""


def run(words: list[str]) -> int:
    """Print the matrix of one machine, or of every architecture with the newest known torch."""
    parser = Parser(
        "matrix", "Show which backends take which calls; every cell is a decision that `explain` explains."
    )
    add_host(parser)
    args = parser.parse_args(words)
    tables = load(current().tables)
    _print(_one(args, tables) if args.arch or args.host else _every(args, tables))
    return 0


def _one(args: argparse.Namespace, tables: Tables) -> list[Table | str]:
    """Rows are calls, columns are backends, a cell is a verdict with its first reason."""
    host = host_of(args, tables)
    table = _table(f"{host.arch}: verdicts", ["call", *tables.backends])
    for name, line in CALLS.items():
        decision = decide(parse(line), host, tables, current())
        table.add_row(name, *(_cell(v, decision) for v in decision.verdicts))
    return [table, *_legend(), *assumptions(host)]


def _every(args: argparse.Namespace, tables: Tables) -> list[Table | str]:
    """First which backend each call gets, then how many of the calls each backend takes."""
    selected = _table("selected backend", ["call", *tables.arch_names])
    taken = _table(f"how many of these {len(CALLS)} calls a backend takes", ["backend", *tables.arch_names])
    columns = {arch: _decisions(args, arch, tables) for arch in tables.arch_names}
    for place, name in enumerate(CALLS):
        selected.add_row(name, *(decisions[place].selected or "none" for decisions in columns.values()))
    for backend in tables.backends:
        verdicts = ([d.verdict(backend) for d in decisions] for decisions in columns.values())
        taken.add_row(backend, *(_count(column) for column in verdicts))
    return [selected, taken, *_legend(), *_assumed(args, tables)]


def _decisions(args: argparse.Namespace, arch: str, tables: Tables) -> list[Decision]:
    host = host_of(argparse.Namespace(**{**vars(args), "arch": arch}), tables)
    return [decide(parse(line), host, tables, current()) for line in CALLS.values()]


def _assumed(args: argparse.Namespace, tables: Tables) -> list[str]:
    cards = next(arch for arch in tables.arch_names if arch != "cpu")
    return assumptions(host_of(argparse.Namespace(**{**vars(args), "arch": cards}), tables))


def _cell(verdict: Verdict, decision: Decision) -> str:
    return printable(_cell_text(verdict, decision))


def _cell_text(verdict: Verdict, decision: Decision) -> str:
    status = "selected" if verdict.backend == decision.selected else verdict.status
    if verdict.repairs:
        return f"{status} + {' + '.join(verdict.repairs)}"
    if verdict.blocking:
        return f"{status}: {verdict.blocking[0].rule.rpartition('/')[2]}"
    return f"{status}: needs {verdict.missing[0]}" if verdict.missing else status


def _count(column: list[Verdict]) -> str:
    if all(v.status == "unknown" for v in column):
        return "unknown"
    return str(sum(v.status == "eligible" for v in column))


def _legend() -> list[str]:
    width = max(map(len, CALLS))
    return ["", *(f"{name:<{width}}  {line}" for name, line in CALLS.items())]


def _table(title: str, columns: list[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(parts: list[Table | str]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
