"""Releases of flash-attn-4: its functions up to where they would compile a kernel, beside the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnroute.audit import packages
from attnroute.audit.releases import ReleaseAudit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attnroute.audit.grid import Card
    from attnroute.question.call import Call

_COMPILER = "nvidia-cutlass-dsl"


class Audit(ReleaseAudit):
    """The tables beside releases of flash-attn-4."""

    package = "flash-attn-4"
    backend = "fa4"
    module = "fa4_release"

    def beside(self, version: str, archive: Path) -> Iterator[dict[str, str]]:
        """Give the oldest compiler that the release asks for."""
        terms = packages.requirements(archive)[_COMPILER].specifier
        yield {_COMPILER: next(term.version for term in terms if term.operator in (">=", "==", "~="))}

    def more(self, call: Call, card: Card, beside: dict[str, str]) -> dict[str, Any]:
        """Return the card."""
        return {"arch": card.number, "shared_memory": card.shared_memory}
