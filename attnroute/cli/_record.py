"""`attnroute tables record`: the data of a new release, for a checkout of attnroute."""

from __future__ import annotations

from attnroute.audit import packages
from attnroute.audit.record import SOURCES, companions, record
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError
from attnroute.report.layout import wrapped

_ACCEPTANCE = "acceptance"


def run(words: list[str]) -> int:
    """Record one release, and say what it takes."""
    args = parser().parse_args(words)
    if args.of == _ACCEPTANCE:
        lines = _acceptance(args.version)
    else:
        package = "torch" if args.of == "torch" else SOURCES[args.of].package
        version = args.version or packages.released(package, ">=0")[0]
        if args.of == "torch":
            print(companions(version))
            return 0
        lines = [f"{package} {version}: {line}" for line in record(args.of, version)]
    for line in lines:
        print(*wrapped(line, "", "  "), sep="\n")
    return 0


def _acceptance(version: str | None) -> list[str]:
    """Record what the checks of the torch accept that runs here."""
    from attnroute.conformance import acceptance

    if version is not None:
        msg = f"record acceptance requires no --version, it asks the torch that runs it; got {version}."
        raise ArgumentError(msg)
    return acceptance.record()


def parser() -> Parser:
    """Return what reads the command line."""
    names = ("torch", _ACCEPTANCE, *SOURCES)
    found = Parser(
        "tables record",
        "Write the data of a release into this checkout; of torch, print what its wheel brings along.\n"
        "`acceptance` asks the checks of the torch that runs it, on the GPUs that it sees.",
    )
    of = found.add_argument("of", choices=names, help="whose release")
    of.metavar = "|".join(names)
    found.add_argument("--version", metavar="V", help="the release; the newest by default")
    return found
