"""Decisions as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision


def render_decision(decision: Decision) -> str:
    """Placeholder until the report engineer's version lands."""
    return f"{decision.selected}: " + "; ".join(
        f"{v.backend} {v.status} [{', '.join(f'{f.rule}: requires {f.requires}; got {f.got}' for f in v.blocking)}] {v.repairs}"
        for v in decision.verdicts
    )


render_failure = render_decision
render_quadratic = render_decision
