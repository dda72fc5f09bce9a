"""`attnroute trace -- python script.py`: run a script or module, and write which attention calls it made."""

from __future__ import annotations

import runpy
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, quoted

if TYPE_CHECKING:
    from attnroute.api.trace import Recording

CALLS_FILE: Final = "attnroute-calls.json"
"""Where `trace` writes the calls and `tune` reads them, in the current folder."""
SCRIPT_FAILED: Final = 1


def run(words: list[str]) -> int:
    """Run the script in this process with recording on; the exit code is the script's."""
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    run_name, arguments = _program(words[at + 1 :])
    from attnroute.api.trace import trace

    recorded = trace(options.out)
    # What a script sees in place of the words of this command; the interpreter ends behind it.
    sys.argv = arguments
    try:
        with recorded:
            if run_name is None:
                sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(run_name, run_name="__main__", alter_sys=True)
    except Exception:  # noqa: BLE001 - whatever the script raises is shown as Python shows it
        traceback.print_exc()
        return SCRIPT_FAILED
    finally:
        print(_told(recorded.recording, options.out), file=sys.stderr)
    return 0


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


def _program(command: list[str]) -> tuple[str | None, list[str]]:
    """Return the module to run, None for a script, and what `sys.argv` is for it.

    Raises:
        ArgumentError: It is no command that this Python can run in this process.
    """
    required = "attnroute trace requires `-- python script.py ...` or `-- python -m module ...`"
    if not command:
        raise ArgumentError(f"{required}; got no command; write it behind --.")
    if Path(command[0]).stem.startswith("python"):
        _check_python(command.pop(0))
    if command[:1] == ["-m"] and len(command) > 1:
        return command[1], command[1:]
    if not command or command[0].startswith("-") or not Path(command[0]).is_file():
        raise ArgumentError(f"{required}; got {quoted(' '.join(command))}; name a file or a module.")
    return None, command


def _check_python(named: str) -> None:
    found = shutil.which(named)
    if found is None or Path(found).resolve() != Path(sys.executable).resolve():
        raise ArgumentError(
            f"attnroute trace requires the Python that it runs in, {sys.executable}; got {quoted(named)}; "
            f"write `{named} -m attnroute trace -- {named} ...` with attnroute installed there."
        )


def _told(recording: Recording, path: Path) -> str:
    count = sum(traced.count or 0 for traced in recording.calls)
    kinds = len(recording.calls)
    return f"attnroute: {count} calls of {kinds} kinds are in {path}; `attnroute tune` measures them."
