"""What this process remembers: each memory has an owner, a bound, and a reason to go stale.

There are two kinds: `cached` is a `functools.lru_cache` of a function, `Memory` a map that its owner fills.
Neither has a lock, which a hit in every call would pay for, and which a fork could leave locked for ever:
each step is one operation on a dict, and those are atomic. An entry is made first and put in place then. Of
two threads that make the same one at once, both get what the first one put there.

Nothing is kept per thread, but the blocks of `override()`, `context_parallel()` and `route_sdpa()`, which end
with their block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

PURE: Final = "never: a function of its arguments"
REFUSED: Final = "when a kernel would no longer refuse the call: kept until reset()"
INSTALLED: Final = "with packages, devices, files or the environment, which are read once until reset()"
TABLES: Final = "with the tables, which are part of the key"

_DROPPED: Final = 8
"""A full memory drops one of so many entries at once, because finding them is a walk."""
KEEPER: Final = "_keeper"
"""The attribute in which an object holds what was made from it (`masks.kept`): not compared by `==`."""


@dataclass(frozen=True)
class Remembered:
    """One memory of this process.

    Attributes:
        owner: The module and the name of what fills it, without the leading "attnroute.".
        bound: The most entries that it keeps.
        stale: When an entry is no longer true, and what drops it then.
        size: Returns how many entries there are.
        forget: Drops all of them.
    """

    owner: str
    bound: int
    stale: str
    size: Callable[[], int]
    forget: Callable[[], None]


_REGISTERED: Final[dict[str, Remembered]] = {}


def register(owner: str, bound: int, stale: str, size: Callable[[], int], forget: Callable[[], None]) -> None:
    """Register what a module remembers; a module does so once, when it is imported."""
    owner = owner.removeprefix("attnroute.")
    _REGISTERED[owner] = Remembered(owner, bound, stale, size, forget)


def remembered() -> tuple[Remembered, ...]:
    """Return every memory of the modules that are imported so far, by owner."""
    return tuple(_REGISTERED[owner] for owner in sorted(_REGISTERED.copy()))


def reset() -> None:
    """Forget everything that attnroute remembers in this process.

    The next call reads the environment, the tables, the installed packages and the machine anew, decides
    anew, tries kernels again that refused a call, and compiles FlexAttention's functions anew. Blocks of
    `override()` that are entered stay in force. Graphs of `torch.compile` hold their decisions as constants:
    `torch.compiler.reset()` drops them.
    """
    for memory in remembered():
        memory.forget()


def cached(bound: int, stale: str = PURE) -> Callable[[Callable[..., Value]], _lru_cache_wrapper[Value]]:
    """Return a decorator that makes a function remember its latest results, as `functools.lru_cache` does.

    Args:
        bound: The most results that are kept.
        stale: When a result is no longer true, and what drops it then.
    """

    def decorate(function: Callable[..., Value]) -> _lru_cache_wrapper[Value]:
        kept = functools.lru_cache(maxsize=bound)(function)
        owner = f"{function.__module__}.{function.__qualname__}"
        register(owner, bound, stale, lambda: kept.cache_info().currsize, kept.cache_clear)
        return kept

    return decorate


class _Entry(Generic[Value]):
    __slots__ = ("used", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.used = False


class Memory(Generic[Key, Value]):
    """A map that keeps about `bound` entries, those that are used the longest.

    An entry that was used since the last time that room was needed is spared once (the "second chance"
    algorithm): nearly "least recently used", and a hit moves nothing.

    Attributes:
        entries: What is kept, each with whether it was used; for code that every call waits for, and nobody
            else.
    """

    __slots__ = ("_bound", "entries")

    def __init__(self, bound: int, owner: str = "", stale: str = "") -> None:
        """Start empty.

        Args:
            bound: The most entries; threads that add some at the same time may exceed it by one each.
            owner: The module and name of a memory of the process, which is registered; "" for a memory that
                goes with an object.
            stale: When an entry is no longer true, and what drops it then.
        """
        self._bound = bound
        self.entries: dict[Key, _Entry[Value]] = {}
        if owner:
            register(owner, bound, stale, self.__len__, self.forget)

    def get(self, key: Key) -> Value | None:
        """Return what is kept under a key, None where nothing is."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, in the place of what was kept under this key."""
        if len(self.entries) >= self._bound and key not in self.entries:
            self._make_room()
        self.entries[key] = _Entry(value)

    def keep(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return what is kept under a key, or make it and keep it."""
        entry = self.entries.get(key)
        if entry is None:
            made = _Entry(make())
            if len(self.entries) >= self._bound:
                self._make_room()
            entry = self.entries.setdefault(key, made)
        entry.used = True
        return entry.value

    def drop(self, is_stale: Callable[[Value], bool]) -> list[Value]:
        """Drop the entries whose value is stale, and return these values."""
        gone = []
        for key, entry in self.entries.copy().items():
            if is_stale(entry.value) and self.entries.pop(key, None) is not None:
                gone.append(entry.value)
        return gone

    def pop(self, key: Key) -> None:
        """Drop what is kept under a key, if anything is."""
        self.entries.pop(key, None)

    def items(self) -> dict[Key, Value]:
        """Return a copy of everything that is kept."""
        return {key: entry.value for key, entry in self.entries.copy().items()}

    def values(self) -> list[Value]:
        """Return everything that is kept."""
        return [entry.value for entry in self.entries.copy().values()]

    def forget(self) -> None:
        """Drop everything."""
        self.entries.clear()

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self.entries)

    def _make_room(self) -> None:
        wanted = max(1, self._bound // _DROPPED)
        entries = self.entries.copy()
        for key, entry in entries.items():
            # Taken out and put in again, an entry is the last one that is looked at next time.
            if self.entries.pop(key, None) is None:
                continue
            if entry.used:
                entry.used = False
                self.entries.setdefault(key, entry)
            else:
                wanted -= 1
            if wanted <= 0:
                return
        # All of them were used: the oldest ones go.
        for key in list(entries)[:wanted]:
            self.entries.pop(key, None)
