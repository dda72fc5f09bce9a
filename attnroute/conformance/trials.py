"""A trial as plain data: one call that is run once and held against float64, and what came of it."""

from __future__ import annotations

import shlex
from typing import Literal

from attnroute.question.plain import Plain

Values = Literal["usual", "sharp", "low", "equal", "zeros", "garbage"]
"""What query, key and value hold: normal numbers; scores up to a hundred; scores of -100 and lower; keys that
are all the same; every third row zeros; NaN and infinities where padding leaves keys out."""
Status = Literal["right", "wrong", "refused", "crashed", "hung", "untested"]
"""`refused`: an error was raised, or another kernel ran in place of the named one. `untested`: the trial
could not be made here."""
FAILURES: frozenset[Status] = frozenset({"wrong", "refused", "crashed", "hung"})


class Trial(Plain):
    """One call that is run once.

    Attributes:
        line: The call, as `attnroute explain` reads it.
        device: "cpu" or "cuda".
        backend: Who must run it; None lets attnroute choose.
        memory: How the dimensions of query, key and value lie, the outermost first; empty: as usual.
        values: What they hold.
        past: Rows that do not count, so that the kernel gets a call that they keep from it.
    """

    line: str
    device: str
    backend: str | None = None
    memory: tuple[str, ...] = ()
    values: Values = "usual"
    past: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that runs this trial alone."""
        words = ["attnroute conformance", f"--call {shlex.quote(self.line)}"]
        words += [f"--backend {self.backend}"] if self.backend else []
        words += [f"--memory {','.join(self.memory)}"] if self.memory else []
        words += [f"--values {self.values}"] if self.values != "usual" else []
        words += [f"--past {','.join(self.past)}"] if self.past else []
        return " ".join([*words, f"--device {self.device}"])


class Outcome(Plain):
    """What came of a trial.

    Attributes:
        status: In one word.
        said: Why, or how far off.
        ran: The backend that ran; empty where none did.
        kernels: Names of kernels on the device, where somebody looked.
        seconds: What it took.
    """

    status: Status
    said: str = ""
    ran: str = ""
    kernels: tuple[str, ...] = ()
    seconds: float = 0.0
