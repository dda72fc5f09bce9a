"""From the name of a card, as people or drivers say it, to what the tables say of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attnroute.errors import ECHO, did_you_mean

if TYPE_CHECKING:
    from attnroute.question.host import Host
    from attnroute.tables.archs import Peak
    from attnroute.tables.folders import Tables

DEFAULT: Final = "default"
"""In place of a card's name: every card of the architecture that has none in the tables."""

_SHARED: Final = re.compile(r"nvidia|geforce|tesla|quadro|jetson|agx|rtx|dgx")
"""Words that many cards share."""
_VARIANT: Final = re.compile(r"(?<=\d)(?=ti|super|sxm|pcie|nvl)")
"""Where the name of a card ends and that of its variant begins."""
_CAPABILITY: Final = re.compile(r"(?:sm|compute|cc)?[ _.-]?(\d{1,2})[._]?(\d)[af]?")
_SPOKEN: Final = 4
"""Letters that name a card without its number: spark, thor, orin."""


def suggestion(word: str, tables: Tables) -> str:
    """Return the end of a sentence that refuses an architecture: the one that was meant, if that is clear."""
    arch = arch_of_card(word, tables) or _written_otherwise(word, tables)
    if arch is not None:
        return f'; did you mean "{arch}"?'
    # Of two numbers that look alike neither is nearly the other: 12.0 is not a bigger 10.0.
    return "." if re.search(r"\d", word) else did_you_mean(word, tables.arch_names) or "."


def arch_of_card(word: str, tables: Tables) -> str | None:
    """Return the architecture of the card that a word names; None where it names none, or several."""
    given, found = _tokens(word), dict[int, set[str]]()
    for arch in tables.arch_names:
        for card in tables.arch(arch).cards:
            found.setdefault(_in_common(given, _tokens(card)), set()).add(arch)
    most = max(found, default=0)
    return next(iter(found[most])) if most and len(found[most]) == 1 else None


def peak_of(tables: Tables, host: Host) -> Peak | None:
    """Return what a host's card can do at most.

    Args:
        tables: The tables.
        host: The host. Of the names in its architecture's table the longest in `device_name` counts.

    Returns:
        The numbers of that card, else the architecture's default; None where its table has no numbers. Those
        of an inherited architecture are not asked: they would be another card's.
    """
    peaks = tables.arch(host.arch).peak
    said = _runs(_tokens(host.device_name))
    named = {written: card for card in peaks if (written := "".join(_tokens(card))) in said}
    return peaks.get(named[max(named, key=len)] if named else DEFAULT)


def is_one_of(word: str, cards: list[str]) -> bool:
    """Return whether a name contains that of one of some cards."""
    runs = _runs(_tokens(word))
    return any("".join(_tokens(card)) in runs for card in cards)


def _in_common(given: list[str], card: list[str]) -> int:
    """Return how many letters name the card: its whole name in what was said, or that in its name."""
    name, word = "".join(card), "".join(given)
    if name in _runs(given):
        return len(name)
    is_telling = any(letter.isdigit() for letter in word) or len(word) >= _SPOKEN
    return len(word) if is_telling and word in _runs(card) else 0


def _runs(tokens: list[str]) -> set[str]:
    """Return every stretch of tokens, written as one."""
    ends = range(1, len(tokens) + 1)
    return {"".join(tokens[start:end]) for end in ends for start in range(end)}


def _tokens(name: str) -> list[str]:
    lower = _SHARED.sub(" ", re.sub(r"[^a-z0-9]+", " ", name.lower()[:ECHO]))
    return _VARIANT.sub(" ", lower).split()


def _written_otherwise(word: str, tables: Tables) -> str | None:
    """Read a compute capability in other spellings: sm90, 9.0, sm_90a, compute_90."""
    match = _CAPABILITY.fullmatch(word.lower().strip())
    arch = f"sm_{match[1]}{match[2]}" if match else ""
    return arch if arch in tables.arch_names else None
