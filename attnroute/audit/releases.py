"""Releases of a package, asked about a whole grid of calls, beside the tables: on every architecture."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attnroute.audit import packages
from attnroute.audit.asking import ask
from attnroute.audit.compare import Comparison, Judge, question
from attnroute.audit.grid import Card, cards, grid
from attnroute.question.host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.question.call import Call
    from attnroute.tables.folders import Tables

TORCH = "2.11.0+cu130"
"""The torch of every host that is asked about."""


class ReleaseAudit(ABC):
    """The tables beside the releases of one package, whose code runs with stand-ins.

    Attributes:
        package: The distribution.
        backend: The backend that needs it.
        module: The module that runs its code.
    """

    package: ClassVar[str]
    backend: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, tables: Tables) -> None:
        """Prepare the grid."""
        self._tables = tables
        self._cards = cards(tables)
        self._judge = Judge(tables, self.backend, grid())

    def versions(self) -> list[str]:
        """Return the published releases that the tables know, the newest first."""
        return packages.released(
            self.package, self._tables.backends[self.backend].versions_known[self.package]
        )

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            PackageError: Its wheel cannot be had, or its code does not run with stand-ins.
        """
        archive = packages.wheel(self.package, version)
        asked = [
            (arch, opinion, {**question(opinion.call), **self.more(opinion.call, card, beside)})
            for beside in self.beside(version, archive)
            for arch, card in self._cards.items()
            for opinion in self._judge.opinions(
                Host(arch=arch, versions={"torch": TORCH, self.package: version, **beside})
            )
        ]
        comparison = Comparison()
        with tempfile.TemporaryDirectory() as folder:
            sources = packages.sources_of(archive, Path(folder))
            answers = ask(self.module, sources, [words for _, _, words in asked])
        for (arch, opinion, _), answer in zip(asked, answers, strict=True):
            comparison.add(arch, opinion, answer)
        return comparison

    @abstractmethod
    def beside(self, version: str, archive: Path) -> Iterator[dict[str, str]]:
        """Give the versions of what stands beside a release, for each host that is asked about."""

    @abstractmethod
    def more(self, call: Call, card: Card, beside: dict[str, str]) -> dict[str, Any]:
        """Return what the process that asks the release must know beside the call."""
