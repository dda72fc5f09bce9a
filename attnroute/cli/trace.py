"""`attnroute trace -- python script.py`: run a script or module, and write which attention calls it made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnroute.cli._parser import Parser
from attnroute.cli._program import program

if TYPE_CHECKING:
    from attnroute.api.trace import Recording

CALLS_FILE: Final = "attnroute-calls.json"
"""Where `trace` writes the calls and `tune` reads them, in the current folder."""


def run(words: list[str]) -> int:
    """Run the script in this process with recording on; the exit code is the script's."""
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    required = "`-- python script.py ...` or `-- python -m module ...`"
    asked = program("trace", words[at + 1 :], required, "write it behind --")
    from attnroute.api.trace import trace

    recorded = trace(options.out)
    try:
        return asked.run(recorded)
    finally:
        print(_told(recorded.recording, options.out), file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(
        "trace",
        "Run a Python script or module, and write which attention calls it made, and how often.",
        "behind --: python script.py ARGUMENTS, or python -m MODULE ARGUMENTS. It runs in this process;\n"
        "processes that it starts are not seen.",
    )
    parser.usage = "attnroute trace [--out FILE] -- python script.py ..."
    parser.add_argument(
        "--out", type=Path, default=Path(CALLS_FILE), metavar="FILE", help=f"{CALLS_FILE} where left out"
    )
    return parser


def _told(recording: Recording, path: Path) -> str:
    count = sum(traced.count or 0 for traced in recording.calls)
    kinds = len(recording.calls)
    return f"attnroute: {count} calls of {kinds} kinds are in {path}; `attnroute tune` measures them."
