"""`attnroute matrix`: which backends take which standard calls."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from attnroute.cli._host import add_host, host_of
from attnroute.cli._parser import Parser, add_format
from attnroute.cli._terminal import GREEN, RED, YELLOW, columns, painted_symbols
from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report import matrix
from attnroute.report.json import document
from attnroute.report.layout import Line, laid_out
from attnroute.report.sentences import assumptions
from attnroute.settings import current
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.machines import machine

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
_STYLES: Final = {
    "selected": GREEN,
    "eligible": GREEN,
    "prepared": GREEN,
    "slow": YELLOW,
    "absent": YELLOW,
    "unknown": YELLOW,
    "rejected": RED,
    "fault": RED,
}
_ANY_WIDTH: Final = 10_000
_MORE: Final = "-v: the calls, and every cell in words; `attnroute explain CALL` says why"


def run(words: list[str]) -> int:
    """Print the matrix of one machine, or of every architecture with the newest known torch."""
    parser = Parser(
        "matrix", "Show which backends take which calls; every cell is a decision that `explain` explains."
    )
    add_host(parser)
    add_format(parser, "markdown")
    parser.add_argument("-v", "--verbose", action="store_true", help="the calls, and every cell in words")
    args = parser.parse_args(words)
    tables, policy = load(current().tables), current()
    is_one = bool(args.arch or args.host)
    hosts = [host_of(args, tables)] if is_one else [_host(args, arch, tables) for arch in tables.arch_names]
    machines = [decided(host, tables, policy) for host in hosts]
    print(_RENDER[args.format](machines, is_one, args.verbose))
    return 0


def decided(host: Host, tables: Tables, policy: Policy) -> matrix.Machine:
    """Return what each of the calls gets on a machine."""
    found = {name: decide(parse(line), host, tables, policy) for name, line in CALLS.items()}
    return matrix.Machine(host, found)


def every_machine(tables: Tables) -> list[matrix.Machine]:
    """Return each architecture of the tables with the newest known torch and no package besides."""
    hosts = [machine(arch, tables, argument="arch") for arch in tables.arch_names]
    return [decided(host, tables, Policy()) for host in hosts]


def _host(args: argparse.Namespace, arch: str, tables: Tables) -> Host:
    return host_of(argparse.Namespace(**{**vars(args), "arch": arch}), tables)


def _text(machines: list[matrix.Machine], is_one: bool, verbose: bool) -> str:
    width, plain = columns(_ANY_WIDTH), not _can_print("".join(s.symbol for s in matrix.SIGNS.values()))
    if is_one:
        styles = {s.plain if plain else s.symbol: _STYLES[s.word] for s in matrix.SIGNS.values()}
        parts = [painted_symbols(matrix.render_machine(machines[0], width, plain=plain), styles), ""]
    else:
        assumed = "; ".join(assumptions(machines[0].host))
        head = f"Which backend each call gets{f'; {assumed}' if assumed else ''}"
        parts = [laid_out([Line(head)], width), "", matrix.render_machines(machines, width), ""]
    if not verbose:
        return "\n".join([*parts, laid_out([Line(_MORE)], width)])
    longest = max(map(len, CALLS))
    lines = [f"{name:<{longest}}  {line}" for name, line in CALLS.items()]
    return "\n".join([*parts, *lines, "", *matrix.details(machines)])


def _markdown(machines: list[matrix.Machine], is_one: bool, verbose: bool) -> str:
    if is_one:
        parts = [matrix.markdown_machine(machines[0]), "", matrix.markdown_legend()]
    else:
        parts = [matrix.markdown_machines(machines)]
    calls = ["", *(f"* {name}: `{line}`" for name, line in CALLS.items())] if verbose else []
    return "\n".join([*parts, *calls])


def _json(machines: list[matrix.Machine], is_one: bool, verbose: bool) -> str:
    data = [matrix.machine_data(machine, verbose=verbose or is_one) for machine in machines]
    return document({"calls": CALLS, "machines": data})


_RENDER: Final = {"text": _text, "markdown": _markdown, "json": _json}


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
