"""Write answers and recordings as JSON, and read decisions back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from attnroute.engine.decision import Decision

if TYPE_CHECKING:
    from attnroute.engine.decision import WhyNot
    from attnroute.engine.mesh import Plan

SCHEMA_VERSION: Final = 1
"""Grows where a program that read earlier documents could read a new one wrongly."""
_ALWAYS: Final = ("selected", "order", "why_this_order", "hints", "stock")
"""What a short document of a decision has even where it is empty."""


def decision_json(decision: Decision, *, verbose: bool = False) -> str:
    """Return a decision as a JSON document; `decision_from_json` reads it.

    Args:
        decision: The decision.
        verbose: Every field and finding, so that the equal decision can be read back. Else fields that have
            their defaults and rows that hold are left out.
    """
    return document(decision.model_dump(mode="json") if verbose else _short(decision))


def why_not_json(answer: WhyNot) -> str:
    """Return why a backend is not selected as a JSON document, with the decision in short."""
    return document({**answer.model_dump(mode="json"), "decision": _short(answer.decision)})


def plan_json(plan: Plan, *, verbose: bool = False) -> str:
    """Return what a call becomes on a mesh as a JSON document, decisions in it as in `decision_json`."""
    data = plan.model_dump(mode="json")
    if not verbose:
        data["whole"] = _short(plan.whole)
        for way, told in zip(plan.ways, data["ways"], strict=True):
            steps = (step for part in way.parts for step in part.steps)
            for step, said in zip(
                steps, (step for part in told["parts"] for step in part["steps"]), strict=True
            ):
                said["decision"] = _short(step.decision)
    return document(data)


def document(data: dict[str, Any]) -> str:
    """Return data as a JSON document that names the version of its schema."""
    return escaped(json.dumps({"schema_version": SCHEMA_VERSION, **data}, indent=2, ensure_ascii=False))


def lined(data: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return data as the text of a JSON file in which each entry of the lists with these names is a line."""
    text = json.dumps({name: value for name, value in data.items() if name not in names}, indent=1)[:-2]
    for name in names:
        entries = ",\n  ".join(map(json.dumps, data.get(name, [])))
        text += f',\n "{name}": [\n  {entries}\n ]'
    return f"{text}\n}}\n"


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
    data = json.loads(text)
    data.pop("schema_version", None)
    return Decision.model_validate(data)


def _short(decision: Decision) -> dict[str, Any]:
    whole = decision.model_dump(mode="json")
    data = decision.model_dump(mode="json", exclude_defaults=True)
    # A part of a mask without its kind could not be read.
    call = {name: whole["call"][name] for name in data["call"]}
    verdicts = [_without_passes(verdict) for verdict in data["verdicts"]]
    return {**{name: whole[name] for name in _ALWAYS}, **data, "call": call, "verdicts": verdicts}


def _without_passes(verdict: dict[str, Any]) -> dict[str, Any]:
    return {**verdict, "findings": [f for f in verdict["findings"] if f["outcome"] in ("fail", "unknown")]}
