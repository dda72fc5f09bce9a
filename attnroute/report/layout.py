"""Lay texts out: labels with text that is wrapped to a width, and sizes in bytes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Final, NamedTuple

from attnroute.errors import printable

WIDTH: Final = 80
"""Columns where nobody says how many there are."""
_LABEL: Final = 11
"""Columns that labels take, with the space behind them."""
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ONE_DECIMAL_BELOW: Final = 10
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:ms|s|[KMG]iB)\b)")
_TIE: Final = "\x00"
"""Stands in a printable text for a space at which it is not wrapped."""


class Line(NamedTuple):
    """A text that may take several lines.

    Attributes:
        text: The text.
        first: What stands before its first line.
        rest: What stands before the others.
        wraps: Whether it is wrapped; what can be pasted back stays one line.
    """

    text: str
    first: str = ""
    rest: str = ""
    wraps: bool = True


def field(label: str, text: str, *, wraps: bool = True) -> Line:
    """Return a text behind its label."""
    return Line(text, f"{label:<{_LABEL - 1}} ", " " * _LABEL, wraps)


def item(text: str) -> Line:
    """Return a text that stands below a labelled one."""
    return Line(text, f"{' ' * _LABEL}- ", " " * (_LABEL + 2))


def laid_out(lines: Iterable[Line], width: int = WIDTH) -> str:
    """Return lines as one text of so many columns."""
    found: list[str] = []
    for text, first, rest, wraps in lines:
        found += (
            wrapped(text, first, rest, width) if wraps and text else [f"{first}{printable(text)}".rstrip()]
        )
    return "\n".join(found)


def wrapped(text: str, first: str, rest: str, width: int = WIDTH) -> list[str]:
    """Wrap at spaces only, so that ids and versions stay whole, and not between a number and its unit."""
    lines = textwrap.wrap(
        _UNIT.sub(_TIE, printable(text)),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIE, " ") for line in lines]


def size(count: int) -> str:
    """Say a number of bytes in the largest binary unit that it fills: "45 GiB", "1.5 MiB", "512 bytes"."""
    for unit, factor in _UNITS:
        # A count just below a unit must not be written as 1024 of the smaller one.
        if round(count / factor, 1) >= 1:
            value = count / factor
            digits = f"{value:.1f}".removesuffix(".0") if value < _ONE_DECIMAL_BELOW else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{count} bytes"
