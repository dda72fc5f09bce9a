"""What this process remembers: each memory has a bound, shows only what is complete, and can be forgotten.

There is no lock, which a hit in every call would pay for, and which a fork could leave locked for ever: each
step is one operation on a dict, and those are atomic. An entry is made first and put in place then. Of two
threads that make the same one at once, both get what the first one put there.

What is a function of plain arguments alone stays a `functools.lru_cache`, of which the same is true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_DROPPED: Final = 8
"""A full memory drops one of so many entries at once, because finding them is a walk."""
KEEPER: Final = "_keeper"
"""The attribute in which an object holds what was made from it (`masks.kept`): not compared by `==`."""


class _Entry(Generic[Value]):
    __slots__ = ("used", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.used = False


class Memory(Generic[Key, Value]):
    """A map that keeps about `bound` entries, those that are used the longest.

    An entry that was used since the last time that room was needed is spared once (the "second chance"
    algorithm): nearly "least recently used", and a hit moves nothing.
    """

    __slots__ = ("_bound", "_entries")

    def __init__(self, bound: int) -> None:
        """Start empty.

        Args:
            bound: Most entries; threads that add some at the same time may exceed it by one each.
        """
        self._bound = bound
        self._entries: dict[Key, _Entry[Value]] = {}

    def get(self, key: Key) -> Value | None:
        """Return what is kept under a key, None where nothing is."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, in the place of what was kept under this key."""
        if len(self._entries) >= self._bound and key not in self._entries:
            self._make_room()
        self._entries[key] = _Entry(value)

    def keep(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return what is kept under a key, or make it and keep it."""
        entry = self._entries.get(key)
        if entry is None:
            made = _Entry(make())
            if len(self._entries) >= self._bound:
                self._make_room()
            entry = self._entries.setdefault(key, made)
        entry.used = True
        return entry.value

    def drop(self, is_stale: Callable[[Value], bool]) -> list[Value]:
        """Drop the entries whose value is stale, and return these values."""
        gone = []
        for key, entry in self._entries.copy().items():
            if is_stale(entry.value) and self._entries.pop(key, None) is not None:
                gone.append(entry.value)
        return gone

    def pop(self, key: Key) -> None:
        """Drop what is kept under a key, if anything is."""
        self._entries.pop(key, None)

    def values(self) -> list[Value]:
        """Return everything that is kept."""
        return [entry.value for entry in self._entries.copy().values()]

    def forget(self) -> None:
        """Drop everything."""
        self._entries.clear()

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._entries)

    def _make_room(self) -> None:
        wanted = max(1, self._bound // _DROPPED)
        entries = self._entries.copy()
        for key, entry in entries.items():
            # Taken out and put in again, an entry is the last one that is looked at next time.
            if self._entries.pop(key, None) is None:
                continue
            if entry.used:
                entry.used = False
                self._entries.setdefault(key, entry)
            else:
                wanted -= 1
            if wanted <= 0:
                return
        # All of them were used: the oldest ones go.
        for key in list(entries)[:wanted]:
            self._entries.pop(key, None)


def forget_all() -> None:
    """Drop what every module of attnroute remembers: it goes on as if nothing had been called.

    That is each `Memory` and each `functools.lru_cache` that a module names.
    """
    for module in [module for name, module in sys.modules.copy().items() if _is_ours(name)]:
        for thing in vars(module).copy().values():
            if isinstance(thing, Memory):
                thing.forget()
            elif hasattr(thing, "cache_clear"):
                thing.cache_clear()


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == __name__.partition(".")[0]
