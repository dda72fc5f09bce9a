"""ATTNROUTE_EXPLAIN."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision


def announce(decision: Decision) -> None:
    """Placeholder until the report engineer's version lands."""
