"""Errors of the kinds that people make, planted one at a time at drawn places: the lint names each."""

from __future__ import annotations

import datetime
import random
import re
import shutil
import tomllib
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from attnroute.engine.examples import Examples
from attnroute.engine.pins import loose_ends
from attnroute.engine.shown import unshown
from attnroute.tables.folders import Tables
from attnroute.tables.lint import lint
from attnroute.tables.read import shipped_folder

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2026, 12, 31)
DATA = Path(__file__).parent / "data" / "seeded_faults.toml"
SAID = tomllib.loads(DATA.read_text(encoding="utf-8"))
FAULTS = SAID["fault"]
ROW = re.compile(r"^(?=\[\[)", re.MULTILINE)
UNREAD = re.compile(r"costs/|schema")


class Place(NamedTuple):
    """A match in one file.

    Attributes:
        path: The file, below the tables.
        name: What the lint has to name: a row, or else the file.
        start: Where the match begins, in the file.
        match: The match, in its line.
    """

    path: str
    name: str
    start: int
    match: re.Match[str]


def places_of(fault):
    """Give every place where a fault can be planted."""
    for path in sorted(shipped_folder().glob(fault.get("in", "*/*.toml"))):
        text, start = path.read_text(encoding="utf-8"), 0
        for part in [text] if fault.get("row") == "file" else ROW.split(text):
            is_row = part.startswith("[[rule]]")
            if is_row or fault.get("row") == "file":
                file = path.relative_to(shipped_folder()).as_posix()
                told_as = file.removesuffix(".toml").removesuffix("/arch")
                name = re.search(r'^name = "([\w-]+)"', part, re.MULTILINE)[1] if is_row else told_as
                yield from matches_in(part, fault, file, name, start)
            start += len(part)


def matches_in(part, fault, file, name, start):
    but, only = fault.get("but"), fault.get("only", "")
    for line in re.finditer(rf"^(?:{fault['line']}).*\n?(?:.*\n)?", part, re.MULTILINE):
        said = line[0].partition("\n")[0] + "\n"
        if (but and re.search(but, said)) or not re.search(only, said):
            continue
        found = list(re.finditer(fault["find"], line[0] if "\n" in fault["find"] else said))
        if found:
            yield from (Place(file, name, start + line.start(), match) for match in found[:3])


def planted(match, fault, name):
    """Return what stands in the place of a match once the fault is there."""
    if "put" in fault:
        return match.expand(fault["put"]).replace("ROW", name)
    number = float(match[1]) * fault.get("times", 1) + fault.get("add", 0)
    begin, end = (place - match.start() for place in match.span(1))
    said = str(int(number)) if number == int(number) else f"{number:g}"
    return match[0][:begin] + said + match[0][end:]


def drawn(fault):
    found = list(places_of(fault))
    wanted = fault.get("places", 3)
    return random.Random(fault["name"]).sample(found, min(wanted, len(found)))


def told(folder):
    """Return what `attnroute tables lint` says."""
    tables = Tables((folder,))
    problems = lint(tables, TODAY) or [*Examples(tables).problems(), *unshown(tables)]
    return "\n".join(map(str, problems or chain(loose_ends(tables))))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_is_named(fault, tmp_path):
    places = drawn(fault)
    assert places, "the fault fits nowhere: the tables changed; give it another pattern"
    for number, place in enumerate(places):
        root = tmp_path / str(number)
        shutil.copytree(shipped_folder(), root / "capability_tables")
        for beside in ("attnroute", "benchmarks", "docs", "tests"):
            (root / beside).symlink_to(ROOT / beside)
        path = root / "capability_tables" / place.path
        text = path.read_text(encoding="utf-8")
        begin, end = (place.start + offset for offset in place.match.span())
        path.write_text(text[:begin] + planted(place.match, fault, place.name) + text[end:], encoding="utf-8")
        assert path.read_text(encoding="utf-8") != text
        said = told(root / "capability_tables")
        assert place.name in said, f"{place.path}: {place.name}: {place.match[0]!r}: {said[:500] or 'clean'}"


def test_kinds_are_counted_once_and_those_that_stay_unfound_have_a_reason():
    names = [fault["name"] for fault in (*FAULTS, *SAID["unfound"])]
    assert len(set(names)) == len(names)
    assert len(FAULTS) >= 70
    assert all(fault["because"] for fault in SAID["unfound"])
