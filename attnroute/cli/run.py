"""`attnroute run script.py`: run a script or module with its attention routed, and say what it ran."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnroute.cli._parser import Parser
from attnroute.cli._program import program
from attnroute.cli._terminal import columns

if TYPE_CHECKING:
    from attnroute.api.trace import Trace

_VALUED: Final = ("--out",)


def run(words: list[str]) -> int:
    """Run the script in this process inside of `route_sdpa()`; the exit code is the script's."""
    at = _end_of_options(words)
    options = _parser().parse_args(words[:at])
    command = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    asked = program("run", command, "`script.py ...` or `-m module ...`", "write it behind run")
    from attnroute.api.sdpa_block import route_sdpa
    from attnroute.api.trace import trace

    with ExitStack() as blocks:
        recorded = trace(options.out) if options.trace or options.out else None
        if recorded is not None:
            # Called last, when the file is written.
            blocks.callback(_print, recorded)
        inside = ExitStack()
        if recorded is not None:
            inside.enter_context(recorded)
        if options.route:
            inside.enter_context(route_sdpa())
        return asked.run(inside)


def _print(recorded: Trace) -> None:
    from attnroute.api.recording_text import render_recording

    text = render_recording(recorded.recording, columns(stream=sys.stderr))
    print(text, file=sys.stderr)


def _end_of_options(words: list[str]) -> int:
    """Return where the command begins: it has options of its own."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("--", "-m"):
        at += 2 if words[at] in _VALUED else 1
    return min(at, len(words))


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Run a Python script or module; its calls of scaled_dot_product_attention run on attnroute.",
        "It runs in this process. Threads and processes that it starts are not routed.\n"
        "`attnroute run --trace --no-route script.py` says which attention a script uses as it is.",
    )
    parser.usage = (
        "attnroute run [--trace] [--no-route] [--out FILE] SCRIPT [ARGUMENTS]\n"
        "       attnroute run [...] -m MODULE [ARGUMENTS]"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="print to stderr at the end which kernel ran in each module, how often and for how long",
    )
    parser.add_argument(
        "--no-route", dest="route", action="store_false", help="leave torch's own function as it is"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="trace, and write the calls as JSON, for attnroute tune"
    )
    return parser
