"""Releases of flash-attn-4, asked about a whole grid of calls, beside the tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnroute.audit import packages
from attnroute.audit.asking import ask
from attnroute.audit.compare import Comparison, Judge, Opinion, question
from attnroute.audit.grid import archs, grid
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.folders import Tables

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE: Final = "flash-attn-4"
_COMPILER: Final = "nvidia-cutlass-dsl"
_TORCH: Final = "2.11.0+cu130"


class Audit:
    """The tables beside releases of flash-attn-4, on every architecture."""

    def __init__(self, tables: Tables) -> None:
        """Prepare the grid."""
        self._tables = tables
        self._archs = archs(tables)
        self._judge = Judge(tables, "fa4", grid())

    def versions(self) -> list[str]:
        """Return the published releases that the tables know, the newest first."""
        return packages.released(PACKAGE, self._tables.backends["fa4"].versions_known[PACKAGE])

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            PackageError: Its wheel cannot be had, or its code does not run with stand-ins.
        """
        archive = packages.wheel(PACKAGE, version)
        opinions = list(self._opinions(version, packages.requirements(archive)))
        comparison = Comparison()
        with tempfile.TemporaryDirectory() as folder:
            questions = [self._question(opinion.call, arch) for arch, opinion in opinions]
            answers = ask("fa4_release", packages.python_of(archive, Path(folder)), questions)
        for (arch, opinion), answer in zip(opinions, answers, strict=True):
            comparison.add(arch, opinion, answer)
        return comparison

    def _opinions(self, version: str, needs: dict[str, Requirement]) -> Iterator[tuple[str, Opinion]]:
        """Give what the tables say, with the oldest compiler that the release asks for."""
        compilers = [
            term.version for term in needs[_COMPILER].specifier if term.operator in (">=", "==", "~=")
        ]
        versions = {"torch": _TORCH, PACKAGE: version, _COMPILER: compilers[0]}
        for arch in self._archs:
            for opinion in self._judge.opinions(Host(arch=arch, versions=versions)):
                yield arch, opinion

    def _question(self, call: Call, arch: str) -> dict[str, Any]:
        number, shared_memory = self._archs[arch]
        return {**question(call), "arch": number, "shared_memory": shared_memory}
