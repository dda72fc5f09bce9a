"""`attnroute tables record compiled`: which calls the installed flash-attn-4 compiles kernels for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from attnroute.audit.compare import question
from attnroute.audit.compiled import COMPILER, Audit, Record, lines, recorded, write
from attnroute.errors import ArgumentError
from attnroute.question.line import parse
from attnroute.question.normalize import normalize

if TYPE_CHECKING:
    from collections.abc import Iterator

ARCHS: Final = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120")
"""The architectures whose kernels differ."""


def record(archs: tuple[str, ...]) -> Iterator[str]:
    """Compile for each architecture, and write what came of it into this checkout.

    Args:
        archs: The architectures.

    Yields:
        A sentence for each.

    Raises:
        ArgumentError: This is no checkout, or the package is not installed as it should be.
    """
    release, compiler = _installed(Audit.package), _installed(COMPILER)
    for arch in archs:
        answers = compiled(arch, lines())
        new = Record(release, compiler, arch, answers)
        write([*(one for one in recorded() if one[:3] != new[:3]), new])
        failed = sum(map(bool, answers.values()))
        what = f"{Audit.package} {release} with {COMPILER} {compiler}, {arch}"
        yield f"{what}: {len(answers)} calls, {failed} do not compile"


def compiled(arch: str, calls: list[str]) -> dict[str, str]:
    """Return, by the line of each call, why its kernels do not compile, "" where they do."""
    answers: list[str] = []
    while len(answers) < len(calls):
        questions = [question(normalize(parse(line))) for line in calls[len(answers) :]]
        said, code, error = _asked(arch, questions)
        answers += said
        if len(answers) < len(calls):
            if not said and code > 0:
                required = "flash-attn-4 and all that it imports beside this torch"
                raise ArgumentError(f"record compiled requires {required}; got {error}; install it with pip.")
            answers.append(f"the compiler ended the process with code {code}")
    return dict(zip(calls, answers, strict=True))


def _asked(arch: str, questions: list[dict[str, Any]]) -> tuple[list[str], int, str]:
    """Return the answers up to where the process ended, its code, and its last words."""
    done = subprocess.run(  # noqa: S603 - this Python, a module of this package
        [sys.executable, "-m", "attnroute.conformance.compiling", arch],
        input="".join(f"{json.dumps(one)}\n" for one in questions),
        capture_output=True,
        text=True,
        check=False,
    )
    last = next(reversed(done.stderr.strip().splitlines()), "no word")
    return (
        [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')],
        done.returncode,
        last,
    )


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError as error:
        required = f"{Audit.package} and {COMPILER} in the environment of this Python"
        raise ArgumentError(
            f"record compiled requires {required}; got no {name}; install it with pip."
        ) from error
