"""Check what evidence refers to: files that are there, releases that exist, reports by their number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.tables.alternatives import names_in
from attnroute.tables.folders import ANY, INTERCONNECT, Tables
from attnroute.tables.preferences import all_preferences
from attnroute.tables.problem import Problem, said_by, stating
from attnroute.tables.releases import published

if TYPE_CHECKING:
    import datetime

    from attnroute.tables.schema import Evidence

_FILE: Final = re.compile(r"\b(?:attnroute|tests|benchmarks|docs)(?:/[\w.-]+)+\.\w+(?:\.gz)?")
_RESULT: Final = re.compile(r"\bh[12]00-torch[\w.-]*\w")
_REPORT: Final = re.compile(r"[\w.-]+/[\w.-]+(#\d+| [\w./-]+( and \w+)?)")
_NUMBERED: Final = re.compile(r"\b[\w.-]+/[\w.-]+#(?!\d)")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,40}")
_VERSION: Final = re.compile(r"(?:[A-Za-z]+ )?(\d+(?:\.\d+)+(?:b\d+|\.post\d+|\.dev\d+)?)")
_PROJECTS: Final = {
    "TransformerEngine": "transformer-engine",
    "transformer_engine": "transformer-engine",
    "cudnn-frontend": "nvidia-cudnn-frontend",
    "cudnn_frontend": "nvidia-cudnn-frontend",
}
"""Projects whose sources evidence about other backends cites, and their distributions."""
_DATA: Final = "tests/tables/data"


class Cited(NamedTuple):
    """Evidence and where it stands.

    Attributes:
        folder: The table folder.
        file: The file in it.
        name: The row, feature or card.
        evidence: The evidence.
        backends: The backends that it is about, none where it is about an architecture.
    """

    folder: Path
    file: str
    name: str
    evidence: Evidence
    backends: tuple[str, ...] = ()


def references(tables: Tables, today: datetime.date) -> Iterator[Problem]:
    """Give what is wrong with references: form, files, releases and dates."""
    releases = published(tables.folders[0])
    for cited in _cited(tables):
        for field, sentence in _complaints(cited, tables, releases, today):
            yield Problem(cited.file, cited.name, f"evidence.{field}", sentence)


def _complaints(
    cited: Cited, tables: Tables, releases: dict[str, list[str]], today: datetime.date
) -> Iterator[tuple[str, str]]:
    evidence = cited.evidence
    if len(evidence.ref.strip()) < len("x.py"):
        yield "ref", f'requires the name of a file, page or report; got "{evidence.ref}".'
    if (evidence.kind == "issue" and not _REPORT.fullmatch(evidence.ref)) or _NUMBERED.search(evidence.ref):
        yield "ref", f'requires owner/project#number for a report; got "{evidence.ref}".'
    if (
        cited.backends
        and evidence.kind == "source"
        and evidence.version is None
        and not _VERSION.search(evidence.ref)
    ):
        yield "version", f'requires the release whose source was read; got none for "{evidence.ref}".'
    if evidence.kind == "measured" and evidence.date is None:
        yield "date", "requires the day of the measurement; got none."
    if evidence.date is not None and evidence.date > today:
        yield "date", f"requires a day that has come; got {evidence.date}."
    if evidence.version is not None and not _exists(cited, tables, releases):
        yield "version", f"requires a release that releases.toml knows, or a commit; got {evidence.version}."
    yield from (("ref", f"requires a file that is there; got {name}.") for name in _missing(cited))


def _exists(cited: Cited, tables: Tables, releases: dict[str, list[str]]) -> bool:
    """Return whether a version is one of what the evidence can be about; "2.15" is any release of it."""
    match = _VERSION.fullmatch(cited.evidence.version or "")
    if match is None:
        return _COMMIT.fullmatch(cited.evidence.version or "") is not None
    needs = (need for name in cited.backends for need in tables.backends[name].needs)
    named = (dist for project, dist in _PROJECTS.items() if project in cited.evidence.ref)
    names = {"torch", "cudnn", *names_in(needs), *named} if cited.backends else set(releases)
    known = [release for name in names for release in releases.get(name, ())]
    bare = {release.partition(".post")[0] for release in known}
    return any(release == match[1] or release.startswith(f"{match[1]}.") for release in {*known, *bare})


def _missing(cited: Cited) -> Iterator[str]:
    """Give the files that a reference names and that are not there; a wheel has none to look for."""
    root, evidence = cited.folder.parent, cited.evidence
    if not (root / "benchmarks" / "results").is_dir():
        return
    text = f"{evidence.ref} {evidence.note or ''}"
    results = [f"benchmarks/results/{name}.json" for name in _RESULT.findall(text)]
    if evidence.kind == "measured":
        results.append(f"benchmarks/results/{evidence.ref}.json")
    yield from (name for name in dict.fromkeys(results) if not (root / name).is_file())
    if (root / "attnroute").is_dir():
        yield from (name for name in _FILE.findall(text) if not (root / name).is_file())
        is_data = evidence.kind == "probe" and re.fullmatch(r"\w+", evidence.ref)
        if is_data and not any((root / _DATA).glob(f"{evidence.ref}.*")):
            yield f"{_DATA}/{evidence.ref}"


def _cited(tables: Tables) -> Iterator[Cited]:
    first = tables.folders[0]
    about: dict[str, set[str]] = {}
    for arch in tables.arch_names:
        for backend in tables.backends:
            ids = [row.id for row in tables.rules(arch, backend) or ()]
            ids += [row.id for row in tables.options(arch, backend)]
            for row_id in ids:
                about.setdefault(row_id, set()).add(backend)
    for row in stating(tables):
        file = f"{row.file.parent.name}/{row.file.name}"
        for evidence in said_by(row).evidence:
            backends = tuple(about.get(row.id, ()))
            yield Cited(row.file.parent.parent, file, said_by(row).name, evidence, backends)
    for backend, info in tables.backends.items():
        for evidence in info.devices.evidence if info.devices is not None else ():
            yield Cited(first, f"{ANY}/{backend}.toml", "devices", evidence, (backend,))
    for scope in (ANY, *tables.arch_names):
        for backend in tables.backends:
            for feature, answer in tables.answers(scope, backend).items():
                for evidence in answer.evidence:
                    name = f"features.{feature}"
                    yield Cited(first, f"{scope}/{backend}.toml", name, evidence, (backend,))
    yield from _cited_about_archs(tables)


def _cited_about_archs(tables: Tables) -> Iterator[Cited]:
    for arch in tables.arch_names:
        table, file = tables.arch(arch), f"{arch}/arch.toml"
        yield from (Cited(tables.folders[0], file, "", evidence) for evidence in table.evidence)
        peaks = ((card, evidence) for card, peak in table.peak.items() for evidence in peak.evidence)
        yield from (Cited(tables.folders[0], file, f"peak.{card}", evidence) for card, evidence in peaks)
    links = tables.interconnect
    cited = [("start", links.start.evidence), *((name, link.evidence) for name, link in links.link.items())]
    for name, entries in cited:
        file = f"{ANY}/{INTERCONNECT}.toml"
        yield from (Cited(tables.folders[0], file, name, evidence) for evidence in entries)
    for row in all_preferences(tables):
        folder, scope = row.file.parent.parent, row.file.parent.name
        for evidence in row.preference.evidence:
            yield Cited(folder, f"{scope}/arch.toml", row.preference.name, evidence)
