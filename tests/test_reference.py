"""The reference pages are what the tables say; `attnroute tables changes` tells rows apart."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from attnroute.cli import main
from attnroute.cli._pages import texts
from attnroute.report.changes import render_changes, rows_of
from attnroute.report.pages import places
from attnroute.tables.load import load
from attnroute.tables.preferences import all_preferences

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def pages():
    return dict(texts(load()))


def test_the_pages_are_what_the_tables_say(pages):
    """After a change of rows or costs: `attnroute tables pages`."""
    stale = [
        name
        for name, text in pages.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `attnroute tables pages`"
    assert {path.name for path in FOLDER.iterdir()} == set(pages)


def test_every_page_is_in_the_navigation(pages):
    listed = re.findall(r"- reference/(\S+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(pages)


def test_every_row_has_an_entry_where_its_place_says(pages):
    found = places(load())
    rows = (*load().all_rows(), *load().all_options(), *all_preferences(load()))
    assert {row.id for row in rows} <= set(found)
    headings = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in pages.items()}
    for row_id, place in found.items():
        name, _, mark = place.partition("#")
        as_rendered = [re.sub(r"[^\w\s-]", "", h).strip().lower().replace(" ", "-") for h in headings[name]]
        assert not mark or as_rendered.count(mark) == 1, row_id


def test_links_inside_of_the_reference_lead_to_headings(pages):
    for name, text in pages.items():
        marks = {re.sub(r"[^\w\s-]", "", h).lower() for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= marks, name


def test_pages_of_another_folder_are_checked(tmp_path, capsys):
    assert main(["tables", "pages", "--out", str(tmp_path)]) == 0
    assert main(["tables", "pages", "--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "fa3.md").write_text("changed", encoding="utf-8")
    assert main(["tables", "pages", "--out", str(tmp_path), "--check"]) == 5
    assert "requires what the tables say in fa3.md" in capsys.readouterr().err


ROW = '[[rule]]\nname = "{name}"\nrequires = {{ head_dim_qk = "{bound}" }}\nbecause = "of {name}"\n'


def test_what_changed_is_told_row_by_row():
    before = {
        "any/a.toml": ROW.format(name="stays", bound="<=8") + ROW.format(name="wider", bound="<=8"),
        "sm_90/a.toml": ROW.format(name="moves", bound="<=8") + ROW.format(name="goes", bound="<=16"),
        "releases.toml": '[untested]\ntorch = "2.15"',
    }
    after = {
        "any/a.toml": ROW.format(name="stays", bound="<=8") + ROW.format(name="wider", bound="<=32"),
        "any/several.toml": ROW.format(name="moves", bound="<=8") + 'files = ["any/a", "any/b"]',
        "releases.toml": '[untested]\ntorch = "2.16"',
    }
    assert render_changes(rows_of(before), rows_of(after)).splitlines() == [
        "### Capability data",
        "",
        "a:",
        "",
        "- `any/a/wider`: other requires (of wider)",
        "- `any/a/moves`: before, it was `sm_90/a/moves`",
        "- `sm_90/a/goes`: gone (of goes)",
        "",
        "b:",
        "",
        "- `any/b/moves`: new (of moves)",
        "",
        "torch:",
        "",
        "- `releases/torch/untested`: other 2.15, 2.16",
    ]
    assert render_changes(rows_of(before), rows_of(before)) == "No row changed.\n"


def test_what_changed_since_a_commit_is_read_with_git(capsys):
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    commit = head.stdout.strip()
    assert main(["tables", "changes", f"{commit}..{commit}"]) == 0
    assert capsys.readouterr().out == "No row changed.\n"
    assert main(["tables", "changes", "no-such-commit"]) == 2
    assert 'REF requires a commit of a checkout; got "no-such-commit"' in capsys.readouterr().err
