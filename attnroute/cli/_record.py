"""`attnroute tables record`: the data of a new release, for a checkout of attnroute."""

from __future__ import annotations

from attnroute.audit import packages
from attnroute.audit.record import SOURCES, companions, record
from attnroute.cli._parser import Parser
from attnroute.report.layout import wrapped


def run(words: list[str]) -> int:
    """Record one release, and say what is left to do."""
    names = ("torch", *SOURCES)
    parser = Parser(
        "tables record",
        "Write the data of a release into this checkout; of torch, print what its wheel brings along.",
    )
    of = parser.add_argument("of", choices=names, help="whose release")
    of.metavar = "|".join(names)
    parser.add_argument("--version", metavar="V", help="the release; the newest by default")
    args = parser.parse_args(words)
    package = "torch" if args.of == "torch" else SOURCES[args.of].package
    version = args.version or packages.released(package, ">=0")[0]
    if args.of == "torch":
        print(companions(version))
        return 0
    for line in record(args.of, version):
        print(*wrapped(f"{package} {version}: {line}", "", "  "), sep="\n")
    return 0
