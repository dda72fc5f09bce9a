"""`attnroute tables record`: the data of a new release, for a checkout of attnroute."""

from __future__ import annotations

from attnroute.audit import packages
from attnroute.audit.record import SOURCES, companions, record
from attnroute.cli._parser import Parser
from attnroute.report.layout import wrapped


def run(words: list[str]) -> int:
    """Record one release, and say what it takes."""
    args = parser().parse_args(words)
    package = "torch" if args.of == "torch" else SOURCES[args.of].package
    version = args.version or packages.released(package, ">=0")[0]
    if args.of == "torch":
        print(companions(version))
        return 0
    for line in record(args.of, version):
        print(*wrapped(f"{package} {version}: {line}", "", "  "), sep="\n")
    return 0


def parser() -> Parser:
    """Return what reads the command line."""
    names = ("torch", *SOURCES)
    found = Parser(
        "tables record",
        "Write the data of a release into this checkout; of torch, print what its wheel brings along.",
    )
    of = found.add_argument("of", choices=names, help="whose release")
    of.metavar = "|".join(names)
    found.add_argument("--version", metavar="V", help="the release; the newest by default")
    return found
