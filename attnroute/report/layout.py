"""How texts are laid out: a label, then text that is wrapped beside it."""

from __future__ import annotations

import textwrap
from typing import Final

from attnroute.errors import printable

WIDTH: Final = 110
"""Columns."""
LABEL: Final = 11
"""Columns that labels take, with the space behind them."""


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
