"""Releases of the cuDNN frontend: its operators and the checks in its headers, beside the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnroute.audit.releases import ReleaseAudit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attnroute.audit.grid import Card
    from attnroute.question.call import Call

_CUDNN = ("9.10.2", "9.11.1", "9.14.0", "9.18.0", "9.18.1", "9.28.1")
"""Versions on either side of those that the headers compare with."""


class Audit(ReleaseAudit):
    """The tables beside releases of the cuDNN frontend, with many versions of cuDNN."""

    package = "nvidia-cudnn-frontend"
    backend = "cudnn_fe"
    module = "cudnn_release"

    def beside(self, version: str, archive: Path) -> Iterator[dict[str, str]]:
        """Give each version of cuDNN."""
        for cudnn in _CUDNN:
            yield {"cudnn": cudnn}

    def more(self, call: Call, card: Card, beside: dict[str, str]) -> dict[str, Any]:
        """Return the card, and cuDNN's version as its own number."""
        major, minor, patch = (int(part) for part in beside["cudnn"].split("."))
        return {"arch": card.number, "cudnn": 10000 * major + 100 * minor + patch}
