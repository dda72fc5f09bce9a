"""Texts that are compared with a file.

After an intended change run the failing tests once with GOLDEN_UPDATE=1 in the environment: each writes its
file anew and fails, so that nobody takes such a run for a pass; then read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"


def check(name, text, folder=FOLDER):
    """Fail unless the text is what `<name>.txt` holds, by default in `tests/golden`."""
    path = folder / f"{name}.txt"
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was written anew; read the difference, then run without GOLDEN_UPDATE.")
    assert path.is_file(), f"{path.name} is missing; {__doc__}"
    assert but_for_newest(text) == but_for_newest(path.read_text(encoding="utf-8")), __doc__


def but_for_newest(text):
    """Leave out up to which release a hint holds: looking at a new release moves that and nothing else."""
    return re.sub(r"< \d[\w.]*", "< the first untested", text)
