"""Releases of TransformerEngine: the filters of its own choice of a backend, beside the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnroute.audit.releases import ReleaseAudit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attnroute.audit.grid import Card
    from attnroute.question.call import Call

_CUDNN = ("9.10.2", "9.19.0")
"""What wheels of torch 2.8 and 2.11 bring along."""


class Audit(ReleaseAudit):
    """The tables beside releases of TransformerEngine, with old and new cuDNN."""

    package = "transformer-engine"
    backend = "te"
    module = "te_release"

    def beside(self, version: str, archive: Path) -> Iterator[dict[str, str]]:
        """Give both versions of cuDNN."""
        for cudnn in _CUDNN:
            yield {f"{self.package}-torch": version, "cudnn": cudnn}

    def more(self, call: Call, card: Card, beside: dict[str, str]) -> dict[str, Any]:
        """Return the card, and cuDNN's version as TransformerEngine has it."""
        return {"arch": card.number, "cudnn": [int(part) for part in beside["cudnn"].split(".")]}
