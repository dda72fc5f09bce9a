"""The command line. Each subcommand is a module, imported when it is asked for; none decides anything itself.

Exit codes: 0 a fused kernel is selected, or the command did what it was asked; 1 demo, tune, conformance or
an audit found something wrong, or ranks differ; 2 the question is malformed; 3 only the slow tier can run the
call; 4 nothing can; 5 a capability table is malformed; 6 what was found out could not be written; 7 pip could
not give a package; 130 the user ended it. A reader that closes the pipe early changes none.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Final

from attnroute._version import __version__
from attnroute.cli._examples import EXAMPLES
from attnroute.cli._outlet import outlets
from attnroute.cli._terminal import columns
from attnroute.errors import ArgumentError, AttnRouteError, OutputError, did_you_mean, quoted
from attnroute.report.layout import Line, laid_out

COMMANDS: Final[dict[str, str]] = {
    "explain": "say which backend a call gets, and why not the others",
    "why-not": "say what keeps a backend from a call, and what would select it",
    "rule": "print one row of the capability tables",
    "matrix": "show which backends take which calls, per architecture",
    "tables": "check the capability tables, or print their schema",
    "probe": "print this machine as JSON",
    "demo": "run real calls here and show what ran, how exact and how fast",
    "run": "run a script with its attention routed, and say which kernels ran",
    "tune": "measure these calls here, and choose by that from now on",
    "conformance": "hold the rows of the tables against the kernels of this machine",
    "completion": "print what makes a shell complete these commands",
}
"""Subcommand to what it does; `attnroute.cli.<name>.run` runs it, "_" for "-"."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name; `sys.argv` by default.

    Returns:
        The exit code. What is wrong with the question or the tables is one sentence on stderr.
    """
    with outlets():
        return _guarded(sys.argv[1:] if argv is None else argv)


def _guarded(words: list[str]) -> int:
    try:
        return _flushed(words)
    except AttnRouteError as error:
        # Nobody may be left to tell.
        with suppress(OutputError):
            sys.stdout.flush()
        with suppress(OutputError):
            print(f"attnroute: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _flushed(words: list[str]) -> int:
    """Run, and learn here whether the output could be written, not when Python ends."""
    try:
        code = _main(words)
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"attnroute {__version__}")
        return 0
    return _run(words[0], words[1:])


def _run(command: str, words: list[str]) -> int:
    if command not in COMMANDS:
        near = did_you_mean(command, COMMANDS) or "."
        raise ArgumentError(f"attnroute requires one of {', '.join(COMMANDS)}; got {quoted(command)}{near}")
    # Looking for pydantic's plugins reads the metadata of every distribution: a third of a short run.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code: int = import_module(f"attnroute.cli.{command.replace('-', '_')}").run(words)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, does in COMMANDS.items()]
    head = "usage: attnroute COMMAND ...   (attnroute COMMAND --help says more)"
    start = f"To begin with: attnroute {EXAMPLES['explain'][0][0]}"
    codes = laid_out([Line(" ".join((__doc__ or "").splitlines()[2:]))], columns())
    return "\n".join([head, "", *lines, "", start, "", codes])
