"""What the terminal can show: its width, and colours where it has them and nobody objects."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Final, TextIO

from attnroute.report.layout import WIDTH

_LEAST: Final = 40
"""Columns below which texts are not wrapped any narrower."""
_MOST: Final = 120
"""Columns beyond which prose is hard to read."""
_BOLD, _DIM = "1", "2"
RED: Final = "31"
GREEN: Final = "32"
YELLOW: Final = "33"
_STYLES: Final = {
    "selected": GREEN,
    "eligible": GREEN,
    "rejected": RED,
    "none": RED,
    "unknown": YELLOW,
    "unavailable": YELLOW,
    "absent": YELLOW,
}
_HEAD: Final = re.compile(r"(?=\S)(.{0,10} |\S+)")
"""A label with the space up to the text behind it, or one that is longer."""
_FIRST: Final = re.compile(r"\w+")
_ROW: Final = re.compile(r"\[\w+/\w+/[\w-]+\]")
_FAULT: Final = re.compile(r"\b(wrong result|crash|hang)(?=[: ])")


def columns(most: int = _MOST, stream: TextIO | None = None) -> int:
    """Return how many columns a text may take; what is no terminal gets as many as texts usually have.

    Args:
        most: How many it takes at most.
        stream: Where it goes; None = stdout.
    """
    if "COLUMNS" not in os.environ and not (stream or sys.stdout).isatty():
        return WIDTH
    return max(_LEAST, min(most, shutil.get_terminal_size((WIDTH, 24)).columns))


def has_colours(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether stdout shows colours: NO_COLOR forbids, FORCE_COLOR demands, else it is a terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and environ.get("TERM", "dumb" if os.name == "nt" else "") != "dumb"


def painted(text: str) -> str:
    """Return an explanation in colours, where there are any: labels, statuses, faults and ids of rows."""
    return "\n".join(map(_line, text.split("\n"))) if has_colours() else text


def painted_symbols(text: str, styles: Mapping[str, str]) -> str:
    """Return a table of symbols in colours, where there are any.

    Args:
        text: The table with its legend.
        styles: Symbol to style.
    """
    if not has_colours():
        return text
    symbols = re.compile(rf"(?<![^ \n])[{re.escape(''.join(styles))}](?![^ \n])")
    return symbols.sub(lambda found: styled(found[0], styles[found[0]]), text)


def styled(text: str, style: str) -> str:
    """Return a text in one style, whatever the terminal has."""
    return f"\x1b[{style}m{text}\x1b[0m"


def _line(line: str) -> str:
    head = _HEAD.match(line)
    label, rest = (head[0], line[head.end() :]) if head else ("", line)
    first = _FIRST.match(rest) if label else None
    if first is not None and (style := _style(label.strip(), first[0])):
        rest = styled(first[0], style) + rest[first.end() :]
    rest = _FAULT.sub(lambda found: styled(found[0], RED), rest)
    rest = _ROW.sub(lambda found: styled(found[0], _DIM), rest)
    return f"{styled(label, _STYLES.get(label.strip(), _BOLD)) if label else ''}{rest}"


def _style(label: str, word: str) -> str:
    """Return the style of the word behind a label: of what was selected, and of statuses."""
    if label == "selected":
        return f"{_BOLD};{_STYLES.get(word, GREEN) if word == 'none' else GREEN}"
    return _STYLES.get(word, "")
