"""`in_force.words`: what `override()` says here, read anew by each look at the attribute.

A compiled graph must not run under another override than the one it was made under. The override is a
ContextVar, as each thread and each task has its own, and dynamo can make no condition of a ContextVar. It can
of an attribute of a module, which it reads again before each run, in the thread and task of that run.
"""

from __future__ import annotations

from attnroute.scopes import words_in_force


def __getattr__(name: str) -> str:
    if name == "words":
        return words_in_force()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
