"""What packages do where they should answer: they raise anything, and some of them end the process."""

from __future__ import annotations

import signal
from types import CodeType
from typing import Final

_LONGEST: Final = 300
"""Characters of an error that are kept: some list every path that they tried."""


def is_of_the_user(error: BaseException) -> bool:
    """Return whether an error is no fault of the package that ran: an interrupt, or a signal's exit.

    `SystemExit` and other classes beside `Exception` are faults else: scripts that were installed as modules
    exit when they are imported, and a panic of Rust is no `Exception`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = _handlers()
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            return True
        step = step.tb_next
    return False


def _handlers() -> set[CodeType]:
    """Return the code of the functions that answer signals, which run in the middle of anything."""
    found = (getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def said_by(error: BaseException) -> str:
    """Return what an error says in one clause: its class and the first line of its text."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text of an error is code of the package too
        text = ""
    return f"{type(error).__name__}: {text}".partition("\n")[0].rstrip(": ")[:_LONGEST]
