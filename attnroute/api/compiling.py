"""What users see of a backend that compiles at its first call: progress, and how long it took."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnroute.executors import first_call
from attnroute.report.log import compiling
from attnroute.settings import explain_mode

if TYPE_CHECKING:
    from attnroute.executors.inputs import Inputs, Plan


def show_progress() -> None:
    """Say on stderr from now on when a structure is compiled, and for how long."""
    first_call.listen(_say)


def _say(backend: str, text: str, seconds: float | None) -> None:
    compiling(backend, text, seconds, explain_mode())


def has_compiled() -> bool:
    """Return whether flex compiled something in this process. Asking imports no compiler."""
    loaded = sys.modules.get("attnroute.executors.flex.compile")
    # Another thread may be importing it just now.
    return bool(getattr(loaded, "entries", tuple)())


def seconds(inputs: Inputs, plan: Plan) -> float | None:
    """Return how long the structure of a call took to compile in this process, None where it was not."""
    # Importing these imports dynamo.
    from attnroute.executors.flex import compile as flex_compile
    from attnroute.executors.flex import run as flex

    found = flex_compile.compiled(flex.key(inputs, plan))
    return None if found is None or not found.seconds else sum(found.seconds)
