"""Run a script or module in this process, as Python runs it."""

from __future__ import annotations

import runpy
import shutil
import sys
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from attnroute.errors import ArgumentError, quoted

SCRIPT_FAILED: Final = 1


@dataclass(frozen=True)
class Program:
    """A script or module and its arguments.

    Attributes:
        module: The module to run, None for a script.
        arguments: What `sys.argv` is for it; that of a script begins with its path.
    """

    module: str | None
    arguments: list[str]

    def run(self, block: AbstractContextManager[Any, Any]) -> int:
        """Run it inside of a block; the exit code is the program's."""
        # What a script sees in place of the words of this command; the interpreter ends behind it.
        sys.argv = self.arguments
        try:
            with block:
                if self.module is None:
                    sys.path.insert(0, str(Path(self.arguments[0]).resolve().parent))
                    runpy.run_path(self.arguments[0], run_name="__main__")
                else:
                    sys.path.insert(0, str(Path.cwd()))
                    runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except Exception:  # noqa: BLE001 - whatever the script raises is shown as Python shows it
            traceback.print_exc()
            return SCRIPT_FAILED
        return 0


def program(name: str, command: list[str], required: str, hint: str) -> Program:
    """Return the program that a command line names.

    Args:
        name: The subcommand of attnroute.
        command: `script.py ...` or `-m module ...`, with or without `python` in front.
        required: What the subcommand takes.
        hint: What to do where it is empty.

    Raises:
        ArgumentError: It is no command that this Python can run in this process.
    """
    required = f"attnroute {name} requires {required}"
    if not command:
        raise ArgumentError(f"{required}; got no command; {hint}.")
    if Path(command[0]).stem.startswith("python"):
        _check_python(name, command[0])
        command = command[1:]
    if command[:1] == ["-m"] and len(command) > 1:
        return Program(command[1], command[1:])
    if not command or command[0].startswith("-") or not Path(command[0]).is_file():
        raise ArgumentError(
            f"{required}; got {quoted(' '.join(command))}; name a script that exists, or -m and a module."
        )
    return Program(None, command)


def _check_python(name: str, named: str) -> None:
    found = shutil.which(named)
    if found is None or Path(found).resolve() != Path(sys.executable).resolve():
        raise ArgumentError(
            f"attnroute {name} requires the Python that it runs in, {sys.executable}; got {quoted(named)}; "
            f"write `{named} -m attnroute {name} ...` with attnroute installed there."
        )
