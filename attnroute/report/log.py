"""Print decisions to stderr as they are made, where ATTNROUTE_EXPLAIN asks for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from attnroute.errors import printable
from attnroute.memory import register
from attnroute.question.line import render
from attnroute.report.sentences import selected, why_selected
from attnroute.report.text import render_decision

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision

Mode = Literal["off", "once", "changes", "all"]


@dataclass
class _Said:
    """What was announced so far in this process."""

    backends: set[str | None] = field(default_factory=set)
    last: str | None = None


_SAID = _Said()


def _forget() -> None:
    _SAID.backends.clear()
    _SAID.last = None


# One entry for each backend, and the one that was selected last.
register(f"{__name__}._SAID", 64, "never: what was printed was printed", lambda: len(_SAID.backends), _forget)


def announce(decision: Decision, mode: Mode) -> None:
    """Print a new decision to stderr as the mode has it.

    Args:
        decision: A decision that selected something; announced when it is made, not when it is looked up.
        mode: "off" prints nothing; "once" one line the first time that a backend is selected; "changes" one
            line whenever another backend is selected than the time before; "all" the whole explanation.
    """
    if mode == "off":
        return
    if mode == "all":
        print(render_decision(decision, verbose=True), file=sys.stderr)  # noqa: T201
        return
    known = decision.selected in _SAID.backends if mode == "once" else decision.selected == _SAID.last
    _SAID.backends.add(decision.selected)
    _SAID.last = decision.selected
    if not known:
        print(printable(log_line(decision)), file=sys.stderr)  # noqa: T201


def compiling(backend: str, structure: str, seconds: float | None, mode: Mode) -> None:
    """Say that a structure is being compiled, or that it was.

    Args:
        backend: Whose code it is.
        structure: What is compiled.
        seconds: None at the start, how long it took at the end.
        mode: "off" says it only where stderr is a terminal, because somebody is waiting there.
    """
    if mode == "off" and not sys.stderr.isatty():
        return
    state = "is compiling" if seconds is None else f"compiled in {seconds:.1f} s"
    print(printable(f"attnroute: {backend} {state}: {structure}"), file=sys.stderr)  # noqa: T201


def log_line(decision: Decision) -> str:
    """Say a decision that selected something in one line."""
    said = selected(decision)
    call = f"{'' if said == decision.selected else ','} for {render(decision.call)} on {decision.host.arch}"
    return f"attnroute: {said}{call}: {why_selected(decision)}{_failed(decision)}"


def _failed(decision: Decision) -> str:
    """Name the backends that would have come first, had their kernels not been refused."""
    failed = [v for v in decision.verdicts if v.excluded is not None and v.excluded.reason == "failed"]
    return "".join(
        f"; {v.backend} failed in this process ({v.excluded.origin})" for v in failed if v.excluded
    )
