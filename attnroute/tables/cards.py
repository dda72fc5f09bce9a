"""From the name of a card, as people or drivers say it, to what the tables say of it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from attnroute.errors import ECHO, ArgumentError, did_you_mean, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnroute.question.host import Host
    from attnroute.tables.archs import Peak
    from attnroute.tables.folders import Tables

T = TypeVar("T")

DEFAULT: Final = "default"
"""In place of a card's name: every card of the architecture that has none in the tables."""

_SHARED: Final = re.compile(r"nvidia|geforce|tesla|quadro|jetson|agx|rtx|dgx")
"""Words that many cards share."""
_VARIANT: Final = re.compile(r"(?<=\d)(?=ti|super|sxm|pcie|nvl)")
"""Where the name of a card ends and that of its variant begins."""
_CAPABILITY: Final = re.compile(r"(?:sm|compute|cc)?[ _.-]?(\d{1,2})[._]?(\d)[af]?")
_NUMBER: Final = re.compile(r"(?:sm|compute|cc)?[ _.-]?[\d.]+[af]?")
_SPOKEN: Final = 4
"""Letters that name a card without its number: spark, thor, orin."""


class Named(NamedTuple):
    """What a word names: an architecture and, where the word is the name of a card, that card."""

    arch: str
    card: str = ""


def named(word: str, tables: Tables, argument: str) -> Named:
    """Return the architecture that a word names, by its own name or by that of a card: "sm_90", "h100".

    Args:
        word: What somebody wrote.
        tables: The tables.
        argument: Where it was written, for the error.

    Raises:
        ArgumentError: It names no architecture of the tables, or cards of several.
    """
    arch = word if word in tables.arch_names else _written_otherwise(word, tables)
    if arch is not None:
        return Named(arch)
    found = _cards_of(word, tables)
    archs = {card.arch for card in found}
    if len(archs) == 1:
        (arch,) = archs
        return Named(arch, _variant(word, tables.arch(arch).peak) or found[0].card)
    known = f"one of {', '.join(tables.arch_names)} or the name of a card, like h100"
    raise ArgumentError(f"{argument} requires {known}; got {quoted(word)}{_near(word, found, tables)}")


def _cards_of(word: str, tables: Tables) -> list[Named]:
    """Return the cards that share the most letters with a word."""
    given, found = _tokens(word), dict[int, list[Named]]()
    for card in _all_cards(tables):
        found.setdefault(_in_common(given, _tokens(card.card)), []).append(card)
    most = max(found, default=0)
    return found[most] if most else []


def _variant(word: str, names: Iterable[str]) -> str:
    """Return the longest of some names that a word contains: H100 PCIe, where an H100 was found."""
    runs = _runs(_tokens(word))
    return max((name for name in names if "".join(_tokens(name)) in runs), key=len, default="")


def _near(word: str, found: list[Named], tables: Tables) -> str:
    """Return the end of a sentence that refuses a word: what was clearly meant, or what is alike."""
    if found:
        return f"; that is several cards: {_list(found)}."
    if _NUMBER.fullmatch(word.lower().strip()):
        # Of two numbers that look alike neither is nearly the other: 12.0 is not a bigger 10.0.
        return "."
    if near := did_you_mean(word, tables.arch_names):
        return near
    cards = {"".join(_tokens(card.card)): card for card in _all_cards(tables)}
    alike = get_close_matches("".join(_tokens(word)), cards, n=3)
    return f"; known and alike: {_list([cards[name] for name in alike])}." if alike else "."


def _list(cards: list[Named]) -> str:
    return ", ".join(f"{name} ({arch})" for arch, name in cards)


def _all_cards(tables: Tables) -> Iterator[Named]:
    for arch in tables.arch_names:
        yield from (Named(arch, card) for card in tables.arch(arch).cards)


def peak_of(tables: Tables, host: Host) -> Peak | None:
    """Return what a host's card can do at most.

    Args:
        tables: The tables.
        host: The host.

    Returns:
        The numbers of that card, else the architecture's default; None where its table has no numbers. Those
        of an inherited architecture are not asked: they would be another card's.
    """
    return of_card(tables.arch(host.arch).peak, host)


def of_card(entries: Mapping[str, T], host: Host) -> T | None:
    """Return the entry of a host's card: that of the longest name in `device_name`, else the default."""
    return entries.get(_variant(host.device_name, entries) or DEFAULT)


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
