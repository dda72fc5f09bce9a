"""The documentation site: the generated reference leaves no public name out, and the tasks come first."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

import attnroute
from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import published

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = {
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: attnroute\.(\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize(
    "home", ["attnroute", "attnroute.masks", "attnroute.biases", "attnroute.distributed"]
)
def test_every_public_name_has_an_entry(home):
    module = attnroute if home == "attnroute" else getattr(attnroute, home.partition(".")[2])
    prefix = home.removeprefix("attnroute").lstrip(".")
    names = {f"{prefix}.{name}".lstrip(".") for name in module.__all__ if name != "__version__"}
    assert names - ENTRIES == ({"masks", "biases", "distributed"} if module is attnroute else set())


def test_tasks_come_first_and_all_are_listed():
    pages = re.findall(r"(?:: |- )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    tasks = {f"tasks/{path.name}" for path in (ROOT / "docs" / "tasks").glob("*.md")}
    assert set(pages[1 : 1 + len(tasks)]) == tasks


def test_links_into_the_explorer_ask_what_can_be_answered():
    tables, releases = load(None), published(shipped_folder())
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    links = [link for text in pages for link in re.findall(r"explorer/index\.md\?([^)\s]+)\)", text)]
    assert len(links) > 3
    for link in links:
        asked = dict(parse_qsl(link))
        arch, _, card = asked.pop("card").partition("|")
        assert card in tables.arch(arch).cards
        decision = decide(parse(asked.pop("call")), Host(arch=arch, device_name=card, versions=asked))
        assert {name for name, version in asked.items() if version not in releases[name]} == set()
        assert decision.verdicts
