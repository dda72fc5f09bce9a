"""Check ranges of versions: their distributions, their ends, and what wheels of torch bring along."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from packaging.version import Version

from attnroute.tables.alternatives import is_well_formed, names_in
from attnroute.tables.folders import ANY, Tables
from attnroute.tables.points import end_of
from attnroute.tables.preferences import all_preferences
from attnroute.tables.problem import Problem, problem_of, said_by, stating
from attnroute.tables.providers import MEASURED
from attnroute.tables.read import read
from attnroute.tables.releases import FILE, Release, ReleaseTable
from attnroute.tables.versions import UNTESTED, contains

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAST_RESORT = "chunked"
"""The backend that any torch runs, so that a torch that nobody looked at is not without all of them."""


def windows(tables: Tables) -> Iterator[Problem]:
    """Give what is wrong with ranges of versions and with the file of releases."""
    yield from _distributions(tables)
    yield from _known(tables)
    table: ReleaseTable = read(tables.folders[0] / FILE, ReleaseTable)
    yield from (Problem(FILE, name, field, text) for name, field, text in _releases(table))


def _distributions(tables: Tables) -> Iterator[Problem]:
    """A range of a distribution that nobody looks for holds nowhere, without a word."""
    names = {*tables.providers.by_name, *MEASURED}
    said = "requires distributions that backends need; got"
    for row in stating(tables):
        for name in said_by(row).versions.keys() - names:
            yield problem_of(row, "versions", f"{said} {name}.")
    for preference in all_preferences(tables):
        for name in preference.preference.versions.keys() - names:
            file = f"{preference.file.parent.name}/arch.toml"
            yield Problem(file, preference.preference.name, "versions", f"{said} {name}.")


def _known(tables: Tables) -> Iterator[Problem]:
    """What a backend needs has known versions, and they end."""
    table: ReleaseTable = read(tables.folders[0] / FILE, ReleaseTable)
    for backend, info in tables.backends.items():
        is_shipped = (tables.folders[0] / ANY / f"{backend}.toml").is_file()
        if not is_shipped or not all(map(is_well_formed, info.needs)):
            continue  # A backend of an overlay may rest on what no release of attnroute knows.
        file, needed = f"{ANY}/{backend}.toml", names_in(info.needs)
        for name in (
            name for name in needed if name not in {*table.untested, *info.versions_known, *MEASURED}
        ):
            yield Problem(file, "", "backend.needs", f"requires packages of {FILE}; got {name}.")
        for name in (name for name in needed if name in table.untested and name not in info.versions_known):
            yield Problem(file, "", "versions_known", f"requires the releases of {name} that are known.")
        for name in info.versions_known.keys() - set(needed):
            yield Problem(file, "", "versions_known", f"requires what the backend needs; got {name}.")
        if info.provider not in needed:
            yield Problem(file, "", "backend.provider", f"requires one of its needs; got {info.provider}.")
        ends = ((name, end_of(name, info.known(name) or ">=0")) for name in info.versions_known)
        for name in (name for name, end in ends if end is None and backend != _LAST_RESORT):
            sentence = (
                f'requires an end, as "{UNTESTED}", which {FILE} says; got {info.versions_known[name]}.'
            )
            yield Problem(file, "", f"versions_known.{name}", sentence)


def _releases(table: ReleaseTable) -> Iterator[tuple[str, str, str]]:
    """Give row, key and sentence for what contradicts itself in the file of releases."""
    for name, known in table.known.items():
        if not _ascends(known):
            yield "", f"known.{name}", f"requires each release once, ascending; got {', '.join(known)}."
        end = table.untested.get(name)
        late = [release for release in known if end is not None and not contains(f"<{end}", name, release)]
        if late:
            yield "", f"untested.{name}", f"requires the first release after {late[-1]}; got {end}."
    torches = [torch for row in table.release for torch in row.torch]
    for torch in (torch for torch in table.known["torch"] if torch not in torches):
        yield "", "release.torch", f"requires what the wheel of torch {torch} brings along; got nothing."
    if not _ascends(torches):
        yield "", "release.torch", f"requires each release once, ascending; got {', '.join(torches)}."
    for row in table.release:
        yield from ((row.torch[0], field, text) for field, text in _wheel(row, table))


def _wheel(row: Release, table: ReleaseTable) -> Iterator[tuple[str, str]]:
    """What a wheel brings along is what the metadata that is cited says, and exists."""
    read_there = " ".join(evidence.ref for evidence in row.evidence)
    said = {
        "cudnn": re.findall(r"nvidia-cudnn-cu\d+ (\d+\.\d+\.\d+)", read_there),
        "triton": re.findall(r"triton ~?=?=?(\d+(?:\.\d+)+)", read_there),
        "cuda": re.findall(r"nvidia-cudnn-cu(\d+)", read_there),
    }
    for name, found in said.items():
        value = getattr(row, name)
        if value not in table.known[name]:
            yield name, f"requires a release that is known; got {value}."
        if not any(value == one or value.startswith(f"{one}.") for one in found):
            yield (
                name,
                f"requires what the evidence says, {' or '.join(found) or 'which is nothing'}; got {value}.",
            )


def _ascends(releases: Sequence[str]) -> bool:
    return all(Version(before) < Version(after) for before, after in pairwise(releases))
