"""Releases of TransformerEngine: the filters of its own choice of a backend, beside the tables."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from attnroute.audit import packages
from attnroute.audit.asking import ask
from attnroute.audit.compare import Comparison, Judge, question
from attnroute.audit.grid import archs, grid
from attnroute.question.host import Host
from attnroute.tables.folders import Tables

PACKAGE: Final = "transformer-engine"
_TORCH: Final = "2.11.0+cu130"
_CUDNN: Final = ("9.10.2", "9.19.0")
"""What wheels of torch 2.8 and 2.11 bring along."""


class Audit:
    """The tables beside releases of TransformerEngine, on every architecture and with old and new cuDNN."""

    def __init__(self, tables: Tables) -> None:
        """Prepare the grid."""
        self._tables = tables
        self._archs = archs(tables)
        self._judge = Judge(tables, "te", grid())

    def versions(self) -> list[str]:
        """Return the published releases that the tables know, the newest first."""
        return packages.released(PACKAGE, self._tables.backends["te"].versions_known[PACKAGE])

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            PackageError: Its wheel cannot be had, or its code does not run with stand-ins.
        """
        opinions, questions = [], []
        for arch, cudnn in ((arch, cudnn) for arch in self._archs for cudnn in _CUDNN):
            versions = {"torch": _TORCH, PACKAGE: version, f"{PACKAGE}-torch": version, "cudnn": cudnn}
            for opinion in self._judge.opinions(Host(arch=arch, versions=versions)):
                opinions.append((arch, opinion))
                questions.append(self._question(opinion.call, arch, cudnn))
        comparison = Comparison()
        with tempfile.TemporaryDirectory() as folder:
            answers = ask(
                "te_release", packages.python_of(packages.wheel(PACKAGE, version), Path(folder)), questions
            )
        for (arch, opinion), answer in zip(opinions, answers, strict=True):
            comparison.add(arch, opinion, answer)
        return comparison

    def _question(self, call: Any, arch: str, cudnn: str) -> dict[str, Any]:
        numbers = [int(part) for part in cudnn.split(".")]
        return {**question(call), "arch": self._archs[arch][0], "cudnn": numbers}
