"""The documentation site: the generated reference leaves no public name out, and the tasks come first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnroute

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = {
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: attnroute\.(\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("home", ["attnroute", "attnroute.masks", "attnroute.biases"])
def test_every_public_name_has_an_entry(home):
    module = attnroute if home == "attnroute" else getattr(attnroute, home.partition(".")[2])
    prefix = home.removeprefix("attnroute").lstrip(".")
    names = {f"{prefix}.{name}".lstrip(".") for name in module.__all__ if name != "__version__"}
    assert names - ENTRIES == ({"masks", "biases"} if module is attnroute else set())


def test_tasks_come_first_and_all_are_listed():
    pages = re.findall(r"(?:: |- )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    tasks = {f"tasks/{path.name}" for path in (ROOT / "docs" / "tasks").glob("*.md")}
    assert set(pages[1 : 1 + len(tasks)]) == tasks
