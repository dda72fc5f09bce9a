"""Takes the text of a table file apart into its rows, so that the rest of it stays as it is written."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

_TABLE: Final = re.compile(r"^(?=\[)", re.MULTILINE)
_RULE: Final = "[[rule]]"


def split(text: str) -> list[str]:
    """Return the parts of a file, each from one header to the next; joined they are the file."""
    return _TABLE.split(text)


def rule_in(part: str) -> dict[str, Any]:
    """Return the row that a part is, empty where it is something else."""
    if not part.startswith(_RULE):
        return {}
    (found,) = tomllib.loads(part)["rule"]
    return dict(found)
