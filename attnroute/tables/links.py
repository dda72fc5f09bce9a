"""Check what files and architectures have from each other: what one end of a link says, the other has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attnroute.tables.archs import ArchTable
from attnroute.tables.folders import Tables
from attnroute.tables.problem import Problem
from attnroute.tables.read import read
from attnroute.tables.schema import BackendTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def links(tables: Tables) -> Iterator[Problem]:
    """Give links of shipped files that were lost, cards of two architectures, backends that were lost."""
    folder = tables.folders[0]
    files = {f"{s}/{n}": folder / s / f"{n}.toml" for s, n in tables.places}
    shipped = {name: read(path, BackendTable) for name, path in files.items() if path.is_file()}
    includes = {name: table.include for name, table in shipped.items()}
    said = {name: table.included_by for name, table in shipped.items()}
    yield from (Problem(f"{name}.toml", "", "included_by", text) for name, text in _one_sided(includes, said))
    paths = {name: folder / name / "arch.toml" for name in tables.arch_names}
    archs = {name: read(path, ArchTable) for name, path in paths.items() if path.is_file()}
    parents = {name: [table.inherits] if table.inherits else [] for name, table in archs.items()}
    children = {name: table.inherited_by for name, table in archs.items()}
    for name, text in _one_sided(parents, children):
        yield Problem(f"{name}/arch.toml", "", "inherited_by", text)
    yield from _cards(tables)
    yield from _lost(tables)


def _one_sided(
    links_of: Mapping[str, Sequence[str]], said: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    found = defaultdict(set)
    for name, others in links_of.items():
        for other in others:
            found[other].add(name)
    for name, listed in said.items():
        for other in sorted(set(listed) - found[name]):
            yield name, f"requires what has it; got {other}, which has not; take it away, or add it there."


def _cards(tables: Tables) -> Iterator[Problem]:
    """A card is of one architecture."""
    owners: dict[str, str] = {}
    for arch in tables.arch_names:
        for card in tables.arch(arch).cards:
            if owners.setdefault(card, arch) != arch:
                sentence = f"requires cards of no other architecture; got {card}, which {owners[card]} has."
                yield Problem(f"{arch}/arch.toml", "", "cards", sentence)


def _lost(tables: Tables) -> Iterator[Problem]:
    """What every unnamed architecture has, a named one has too."""
    everywhere = [name for name in tables.arch("any").backends if name in tables.backends]
    for arch in tables.arch_names:
        for backend in (name for name in everywhere if tables.rules(arch, name) is None):
            sentence = f"requires {backend}, which runs everywhere; got no word about it."
            yield Problem(f"{arch}/arch.toml", "", "backends", sentence)
