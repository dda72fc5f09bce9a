"""Render what TransformerEngine's own module would run beside what attnroute selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.question.line import render
from attnroute.report import sentences
from attnroute.report.layout import WIDTH, Line, field, item, laid_out

if TYPE_CHECKING:
    from attnroute.engine.te_choice import PathAnswer, TeChoice
    from attnroute.question.call import Call
    from attnroute.question.host import Host

_PARTS: Final = {
    "function_bias": "a function of the scores",
    "fp8": "fp8 tensors outside of its own recipes",
    "return_lse": "the log-sum-exp as an output",
    "transform": "a transform around the call",
    "distributed": "how the call is distributed",
}
_PACKAGE: Final = "transformer-engine"


def render_te_choice(choice: TeChoice, call: Call, host: Host, width: int = WIDTH) -> str:
    """Return what the module would run, why not its other kernels, and how it comes to attnroute's choice."""
    lines = [field("te", _head(choice, host)), field("call", render(call), wraps=False)]
    lines.append(field("host", sentences.host_line(host)))
    lines += [Line("")] if choice.answers else []
    for found in choice.answers:
        lines += [field(found.path, f"{found.title}: {_status(found, choice)}"), *map(item, found.reasons)]
    return laid_out([*lines, Line(""), field("attnroute", _beside(choice))], width)


def _head(choice: TeChoice, host: Host) -> str:
    if choice.inexpressible:
        what = sentences.listed([_PARTS[part] for part in choice.inexpressible])
        head = f"nothing: DotProductAttention has no argument for {what}"
    elif (found := _answer(choice, choice.path)) is None:
        head = "nothing: each of its kernels is kept out"
    else:
        head = found.title
    installed = host.versions.get(_PACKAGE)
    beside = f" ({installed} is installed)" if installed not in (None, choice.release) else ""
    return f"{head}; by the order and filters of TransformerEngine {choice.release}{beside}"


def _status(found: PathAnswer, choice: TeChoice) -> str:
    if found.reasons:
        return "kept out"
    return "runs" if found.path == choice.path else "could run, comes later"


def _beside(choice: TeChoice) -> str:
    """Say whether both choose alike, and which variables would bring the module to attnroute's choice."""
    if choice.ours == choice.path == "none":
        return "selects nothing either"
    if choice.ours == "none":
        return "selects nothing"
    if choice.path in choice.same:
        return f"selects {choice.ours}: the same kernels"
    if choice.environment:
        variables = " ".join(f"{name}=0" for name in choice.environment)
        brought = _answer(choice, choice.brought)
        title = "" if brought is None else f" ({brought.title})"
        return f"selects {choice.ours}; {variables} brings TransformerEngine to those kernels{title}"
    return f"selects {choice.ours}; no variable brings TransformerEngine there: {_why_none(choice)}"


def _why_none(choice: TeChoice) -> str:
    if choice.inexpressible:
        return "it has no argument for the call"
    if not choice.same:
        return "none of its paths runs those kernels"
    reasons = [
        f"its {found.path} is kept out ({'; '.join(found.reasons)})"
        for name in choice.same
        if (found := _answer(choice, name)) is not None
    ]
    return sentences.listed(reasons)


def _answer(choice: TeChoice, name: str) -> PathAnswer | None:
    return next((found for found in choice.answers if found.path == name), None)
