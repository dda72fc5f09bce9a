"""Decisions as JSON, for programs and bug reports."""

from __future__ import annotations

from attnroute.engine.decision import Decision


def decision_json(decision: Decision) -> str:
    """Return the decision as JSON; `decision_from_json` gives the equal decision back."""
    return decision.model_dump_json(indent=2)


def decision_from_json(text: str) -> Decision:
    """Read a decision.

    Raises:
        pydantic.ValidationError: The text is not a decision.
    """
    return Decision.model_validate_json(text)
