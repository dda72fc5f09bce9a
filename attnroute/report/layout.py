"""Lay texts out: labels with wrapped text, and sizes in bytes."""

from __future__ import annotations

import textwrap
from typing import Final

from attnroute.errors import printable

WIDTH: Final = 110
"""Columns."""
LABEL: Final = 11
"""Columns that labels take, with the space behind them."""
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ONE_DECIMAL_BELOW: Final = 10


def field(label: str, text: str) -> list[str]:
    """Return the lines of a label with its text."""
    return wrapped(text, f"{label:<{LABEL - 1}} ", " " * LABEL)


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """Wrap at spaces only, so that ids and versions stay whole."""
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size(count: int) -> str:
    """Say a number of bytes in the largest binary unit that it fills: "45 GiB", "1.5 MiB", "512 bytes"."""
    for unit, factor in _UNITS:
        # A count just below a unit must not be written as 1024 of the smaller one.
        if round(count / factor, 1) >= 1:
            value = count / factor
            digits = f"{value:.1f}".removesuffix(".0") if value < _ONE_DECIMAL_BELOW else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{count} bytes"
