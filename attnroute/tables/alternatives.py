"""`needs` of a backend: each is one name, or several of which one is enough, as "flash-attn-3 | xformers"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attnroute.memory import cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OR: Final = " | "
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?\+*")


@cached(256)
def alternatives(need: str) -> tuple[str, ...]:
    """Return the names one of which a need asks for; most ask for one name only."""
    return tuple(need.split(_OR))


def names_in(needs: Iterable[str]) -> tuple[str, ...]:
    """Return every name that several needs ask for, each once."""
    return tuple(dict.fromkeys(name for need in needs for name in alternatives(need)))


def spare(needs: Iterable[str], has: Callable[[str], bool]) -> frozenset[str]:
    """Return the alternatives beside the first that is there: nothing of the backend comes from them."""
    found: set[str] = set()
    for names in map(alternatives, needs):
        used = next((name for name in names if has(name)), None)
        found.update(name for name in names if used not in (None, name))
    return frozenset(found)


def is_well_formed(need: str) -> bool:
    """Return whether a need is written as the tables write it: names apart by " | ", none of them twice."""
    names = alternatives(need)
    return len(set(names)) == len(names) and all(_NAME.fullmatch(name) for name in names)
