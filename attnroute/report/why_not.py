"""Render why one backend is not selected for a call, and what would select it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.errors import printable
from attnroute.question.line import render
from attnroute.report import sentences
from attnroute.report.layout import LABEL, field, size
from attnroute.report.text import render_verdict

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Hint, Verdict, WhyNot

_BEHIND: Final = {
    "policy": "the policy puts {first} first",
    "unknown": "{first} is eligible, and it is only allowed though unknown",
    "quadratic": "it holds {scores} of scores, and such backends come after all others",
    "mask": "it builds {mask} of mask, an entry for every query and key, and {first} builds none",
    "slow": "a row calls it slow for this call, and no time is predicted for it",
    "preference": "{first} stands before it {order}",
}


def render_why_not(answer: WhyNot) -> str:
    """Return what is selected, the backend's verdict with every reason, and the changes that would select it.

    Args:
        answer: The answer for one backend.
    """
    decision, verdict = answer.decision, answer.decision.verdict(answer.backend)
    if decision.selected is None:
        lines = field("selected", f"none: {sentences.why_none(decision)}")
    else:
        lines = field("selected", f"{decision.selected}, {sentences.why_selected(decision)}")
    lines.append(f"{'call':<{LABEL}}{render(decision.call)}")
    lines += [*field("host", sentences.host_line(decision.host)), ""]
    lines += render_verdict(verdict, decision)
    if answer.backend != decision.selected:
        if answer.behind is not None:
            lines += field("behind", _behind(answer, verdict, decision))
        lines += ["", *_changes(answer, verdict)]
    return printable("\n".join(lines))


def _behind(answer: WhyNot, verdict: Verdict, decision: Decision) -> str:
    """Say what puts a backend that may run behind the selected one."""
    first = decision.verdict(decision.selected or "")
    if answer.behind == "time":
        return _slower(verdict, first, decision)
    return _BEHIND[answer.behind or ""].format(
        first=first.backend,
        scores=size(verdict.score_bytes),
        mask=size(verdict.quadratic_bytes),
        order=sentences.order_by(decision),
    )


def _slower(verdict: Verdict, first: Verdict, decision: Decision) -> str:
    mine, best = verdict.ranked_ms or 0.0, first.ranked_ms or 0.0
    if mine > best:
        clause = f"it takes {mine / best:.3g} times as long as {first.backend} ({mine:.3g} ms, {best:.3g} ms)"
        if decision.call.context.shapes_vary and (verdict.plan_ms or first.plan_ms):
            clause = f"{clause}, plans included"
    else:
        clause = f"it is not faster than {first.backend} at rounded lengths and with its share of compilation"
    return f"{clause}, {sentences.order_by(decision)}"


def _changes(answer: WhyNot, verdict: Verdict) -> list[str]:
    if not answer.changes:
        reasons = len(verdict.blocking) + len(verdict.missing) + (verdict.excluded is not None)
        lifts = f"{reasons} reasons stand against it" if reasons > 1 else "nothing that was tried lifts it"
        return field(
            "change", f"none found: no single setting, package, version or property of the call; {lifts}"
        )
    return [line for found in answer.changes for line in field("change", _change(found, verdict))]


def _change(found: Hint, verdict: Verdict) -> str:
    """Say a change; the setting that keeps the backend out is named with where it came from."""
    excluded = verdict.excluded
    if found.kind == "policy" and excluded is not None and found.change == excluded.reason:
        found = found.model_copy(update={"change": f"lifting {sentences.barrier(excluded)}"})
    return sentences.hint(found)
