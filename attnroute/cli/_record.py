"""`attnroute tables record`: the data of a new release, for a checkout of attnroute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.audit import packages, te_choice
from attnroute.audit.record import SOURCES, companions, record
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError
from attnroute.report.layout import wrapped
from attnroute.settings import current
from attnroute.tables.load import load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_ACCEPTANCE = "acceptance"
_COMPILED = "compiled"
_TE_CHOICE = "te_choice"


def run(words: list[str]) -> int:
    """Record one release, and say what it takes."""
    args = parser().parse_args(words)
    if args.arch and args.of != _COMPILED:
        raise ArgumentError(f"--arch requires {_COMPILED}, which asks about one at a time; got {args.of}.")
    if args.of == "torch":
        print(companions(args.version or packages.released("torch", ">=0")[0]))
        return 0
    for line in _lines(args):
        print(*wrapped(line, "", "  "), sep="\n", flush=True)
    return 0


def _lines(args: argparse.Namespace) -> Iterable[str]:
    if args.of in SOURCES:
        package = SOURCES[args.of].package
        version = args.version or packages.released(package, ">=0")[0]
        return [f"{package} {version}: {line}" for line in record(args.of, version)]
    if args.version is not None:
        what = "about the release of the table" if args.of == _TE_CHOICE else "what is installed"
        msg = f"record {args.of} requires no --version, it asks {what}; got {args.version}."
        raise ArgumentError(msg)
    if args.of == _TE_CHOICE:
        return te_choice.record(load(current().tables))
    from attnroute.conformance import acceptance, compiled

    if args.of == _ACCEPTANCE:
        return acceptance.record()
    return compiled.record(tuple(args.arch or compiled.ARCHS))


def parser() -> Parser:
    """Return what reads the command line."""
    names = ("torch", _ACCEPTANCE, _COMPILED, _TE_CHOICE, *SOURCES)
    found = Parser(
        "tables record",
        "Write the data of a release into this checkout; of torch, print what its wheel brings along.\n"
        "`acceptance` asks the checks of the torch that runs it, on the GPUs that it sees.\n"
        "`compiled` compiles kernels of the flash-attn-4 beside it, without a GPU.\n"
        "`te_choice` asks TransformerEngine what it would pick, for `explain --as te`.",
    )
    of = found.add_argument("of", choices=names, help="whose release")
    of.metavar = "|".join(names)
    found.add_argument("--version", metavar="V", help="the release; the newest by default")
    found.add_argument("--arch", action="append", metavar="A", help="of compiled: for this architecture")
    return found
