"""Ask the code of a release questions, in a process of its own: it runs there with stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attnroute.errors import PackageError


def ask(module: str, folder: Path, questions: list[dict[str, Any]]) -> list[str]:
    """Ask a release.

    Args:
        module: The module of this package that runs there; it reads and writes a line of JSON per question.
        folder: The release's Python.
        questions: What to ask.

    Returns:
        Why the release refuses, for each question, "" where it does not.

    Raises:
        PackageError: The release's code does not run with stand-ins.
    """
    done = subprocess.run(  # noqa: S603 - this Python, a module of this package
        [sys.executable, "-m", f"attnroute.audit.{module}", str(folder)],
        input="\n".join(map(json.dumps, questions)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = next(reversed(done.stderr.strip().splitlines()), "no word")
        required = "the code of the release to run with stand-ins"
        msg = f"an audit requires {required}; got {said}; extend attnroute/audit/{module}.py."
        raise PackageError(msg)
    return [json.loads(line) for line in done.stdout.splitlines()]
