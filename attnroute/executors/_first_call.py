"""Tell whoever listens that a kernel is compiled at its first call, and how long that took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

NOTABLE_SECONDS: Final = 0.3
"""A first call below this loaded what was compiled before."""

Listener = Callable[[str, str, float | None], None]
"""Told the backend, what is compiled, and None at the start or the seconds that it took."""

_LISTENERS: list[Listener] = []
_SEEN: set[Hashable] = set()


def listen(listener: Listener) -> None:
    """Call `listener` around every first call from now on."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)


def forget() -> None:
    """Start anew, as if nothing had been called."""
    _SEEN.clear()


def is_first(backend: str, code: Hashable) -> bool:
    """Return whether a kernel was not called before; it counts as called then."""
    place = (backend, code)
    if place in _SEEN:
        return False
    _SEEN.add(place)
    return True


@contextmanager
def announced(backend: str, text: str) -> Iterator[None]:
    """Announce a first call, and keep what its compiler warns about its own code to itself.

    Args:
        backend: Whose kernel it is.
        text: What is compiled, for people.
    """
    for listener in _LISTENERS:
        listener(backend, text, None)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    seconds = time.perf_counter() - start
    if seconds >= NOTABLE_SECONDS:
        for listener in _LISTENERS:
            listener(backend, text, seconds)
