"""The compilers that torch.compile and Triton start as programs. They are asked once; nothing is imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Final, NamedTuple

from attnroute.memory import INSTALLED, cached

CXX: Final = "c++"
"""What the tables call the C++ compiler that torch.compile needs for CPUs."""
_SECONDS: Final = 30
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)+|\d+")


class Found(NamedTuple):
    """A compiler that was looked for: its version, or why it cannot be used."""

    version: str | None = None
    problem: str = ""


def switched_off() -> str:
    """Return why torch.compile compiles nothing in this process, empty where it does."""
    named = [n for n in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(n, "0") == "1"]
    return f"torch.compile is switched off by {' and '.join(named)}" if named else ""


@cached(1, INSTALLED)
def cxx() -> Found:
    """Return the C++ compiler that inductor would start: CXX where that is set, else the platform's own.

    Returns:
        Its version as it says it, or the reason why it cannot be used.
    """
    named = os.environ.get("CXX")
    name = named or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    if path is None:
        origin = f"CXX names {name}" if named else f"CXX is not set, and {name} is the default"
        return Found(problem=f"{origin}, which is not on PATH")
    return _asked(path)


@cached(1, INSTALLED)
def c_for_triton() -> Found:
    """Return the C compiler with which Triton builds what launches its kernels: CC, gcc or clang."""
    named = os.environ.get("CC")
    paths = [shutil.which(name) for name in ([named] if named else ["gcc", "clang"])]
    path = next((path for path in paths if path is not None), None)
    if path is not None:
        return Found(version="present")
    problem = f"CC names {named}, which is not on PATH" if named else "neither gcc nor clang is on PATH"
    return Found(problem=f"it needs a C compiler, and {problem}")


def _asked(path: str) -> Found:
    try:
        # The user chose the program in CXX, as for torch.compile, which starts it too.
        done = subprocess.run(  # noqa: S603
            [path, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Found(problem=f"{path} --version fails: {error}")
    number = _NUMBER.search(done.stdout.partition("\n")[0])
    return Found(version=number[0] if number else "present")
