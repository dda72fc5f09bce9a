"""Write decisions as JSON and read them back."""

from __future__ import annotations

import json

from attnroute.engine.decision import Decision


def decision_json(decision: Decision) -> str:
    """Return the decision as JSON; `decision_from_json` gives the equal decision back."""
    return escaped(decision.model_dump_json(indent=2))


def escaped(text: str) -> str:
    """Return JSON with the escapes of JSON in the place of what a terminal acts on; it says the same."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def decision_from_json(text: str) -> Decision:
    """Read a decision.

    Raises:
        pydantic.ValidationError: The text is not a decision.
    """
    return Decision.model_validate_json(text)
