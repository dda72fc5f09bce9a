"""Announce that a kernel is compiled at its first call, and how many seconds that took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

from attnroute.memory import Memory

NOTABLE_SECONDS: Final = 0.3
"""A first call below this loaded what was compiled before."""

Listener = Callable[[str, str, float | None], None]
"""Gets the backend, what is compiled, and None at the start or the seconds that it took."""

_LISTENERS: dict[str, list[Listener]] = {}
_KEPT: Final = 4096
_SEEN: Memory[Hashable, object] = Memory(_KEPT, f"{__name__}._SEEN", "never: what was called was called")


def listen(backend: str, listener: Listener) -> None:
    """Call `listener` around the first calls of a backend's kernels from now on.

    The API does so for the backends whose tables say that they compile.
    """
    known = _LISTENERS.setdefault(backend, [])
    if listener not in known:
        known.append(listener)


def has_listener(backend: str) -> bool:
    """Return whether somebody listens to a backend."""
    return backend in _LISTENERS


def tell(backend: str, text: str, seconds: float | None) -> None:
    """Tell the listeners that something is compiled (None), or how many seconds it took."""
    for listener in _LISTENERS.get(backend, ()):
        listener(backend, text, seconds)


def is_first(backend: str, code: Hashable) -> bool:
    """Return whether a kernel was not called before; it counts as called then."""
    place, own = (backend, code), object()
    return _SEEN.get(place) is None and _SEEN.keep(place, lambda: own) is own


@contextmanager
def announced(backend: str, text: str) -> Iterator[None]:
    """Announce a first call, and keep what its compiler warns about its own code to itself.

    Args:
        backend: Whose kernel it is.
        text: What is compiled, for people.
    """
    tell(backend, text, None)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    seconds = time.perf_counter() - start
    if seconds >= NOTABLE_SECONDS:
        tell(backend, text, seconds)
