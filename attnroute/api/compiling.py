"""What users see of a backend that compiles at its first call: progress, and how long it took."""

from __future__ import annotations

from attnroute.executors import first_call
from attnroute.report.log import compiling
from attnroute.settings import explain_mode


def show_progress(backend: str) -> None:
    """Say on stderr from now on when a structure of a backend is compiled, and for how long."""
    first_call.listen(backend, _say)


def _say(backend: str, text: str, seconds: float | None) -> None:
    compiling(backend, text, seconds, explain_mode())
