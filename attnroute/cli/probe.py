"""`attnroute probe`: this machine as JSON, for `--host` and for bug reports.

Installed packages are imported for it, so that what it prints is known to be true of each of them.
"""

from __future__ import annotations

import sys

from attnroute.cli._host import probed
from attnroute.cli._parser import Parser
from attnroute.cli._ranks import all_ranks
from attnroute.question.host import Host
from attnroute.report.json import escaped
from attnroute.settings import current
from attnroute.tables.folders import ANY, Tables
from attnroute.tables.load import load
from attnroute.tables.providers import libraries_of


def run(words: list[str]) -> int:
    """Print the host to stdout, and torch's own switches that are off to stderr; or all ranks of a job."""
    parser = Parser("probe", "Print this machine as JSON; torch's own switches that are off go to stderr.")
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="under torchrun: the device, packages and settings of every rank, and what differs",
    )
    parser.add_argument("--json", action="store_true", help="all ranks as JSON too")
    args = parser.parse_args(words)
    tables = load(current().tables)
    if args.all_ranks:
        return all_ranks(lambda: _host(tables), as_json=args.json)
    print(escaped(_host(tables).model_dump_json(indent=2)))
    for name in switched_off():
        clause = f"torch.backends.cuda.{name}() is False here, which binds torch's own selector only"
        print(f"attnroute: {clause}.", file=sys.stderr)
    return 0


def _host(tables: Tables) -> Host:
    probed(tables)
    check_installed(tables)
    return probed(tables)


def check_installed(tables: Tables) -> None:
    """Import every installed package that a backend rests on; what cannot be imported is then broken."""
    from attnroute.probes import imports

    backends = [libraries_of(tables, ANY, backend) for backend in tables.backends]
    imports.check_installed(backends, tables.providers)


def switched_off() -> list[str]:
    """Return torch's process-wide switches of attention kernels that are off."""
    import torch

    names = ("flash_sdp_enabled", "cudnn_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
    return [name for name in names if not getattr(torch.backends.cuda, name)()]
