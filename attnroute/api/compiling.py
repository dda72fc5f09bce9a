"""What users see of a backend that compiles at its first call: progress, and how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.executors import _first_call, _flex_compile, flex
from attnroute.report.log import compiling
from attnroute.settings import explain_mode

if TYPE_CHECKING:
    from attnroute.executors._flex_compile import Compiled
    from attnroute.executors._inputs import Inputs, Plan


def show_progress() -> None:
    """Say on stderr from now on when a structure is compiled, and for how long."""
    _flex_compile.listen(_say)
    _first_call.listen(_say_first)


def _say(found: Compiled, seconds: float | None) -> None:
    compiling(found.backend, found.name, seconds, explain_mode())


def _say_first(backend: str, text: str, seconds: float | None) -> None:
    compiling(backend, text, seconds, explain_mode())


def seconds(inputs: Inputs, plan: Plan) -> float | None:
    """Return how long the structure of a call took to compile in this process, None where it was not."""
    if not _flex_compile.entries():
        return None
    found = _flex_compile.compiled(flex.key(inputs, plan))
    return None if found is None or not found.seconds else sum(found.seconds)
