"""Render why one backend is not selected for a call, and what would select it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.report import sentences
from attnroute.report.layout import WIDTH, Line, field, laid_out, size
from attnroute.report.text import about, answer_line, verdict_lines

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


def render_why_not(answer: WhyNot, width: int = WIDTH, *, verbose: bool = False) -> str:
    """Return what is selected, the backend's verdict with every reason, and the changes that would select it.

    Args:
        answer: The answer for one backend.
        width: Columns.
        verbose: Add the verdict of every other backend with all its reasons.
    """
    decision, verdict = answer.decision, answer.decision.verdict(answer.backend)
    lines = [answer_line(decision), *about(decision), Line(""), *verdict_lines(verdict, decision)]
    if answer.backend != decision.selected:
        if answer.behind is not None:
            lines.append(field("behind", _behind(answer, verdict, decision)))
        lines += [Line(""), *_changes(answer, verdict)]
    others = [v for v in sentences.arranged(decision) if v is not verdict] if verbose else []
    if others:
        lines.append(Line(""))
    for other in others:
        lines += verdict_lines(other, decision)
    return laid_out(lines, width)


def render_reason(answer: WhyNot) -> str:
    """Return in one clause what keeps a backend from a call: the first of several reasons."""
    decision, verdict = answer.decision, answer.decision.verdict(answer.backend)
    if verdict.blocking:
        return sentences.finding(verdict.blocking[0])
    if verdict.missing:
        return sentences.missing(verdict.missing[0], decision.host)
    if verdict.excluded is not None:
        return sentences.exclusion(verdict.excluded)
    return _behind(answer, verdict, decision) if answer.behind is not None else ""


def render_change(answer: WhyNot) -> str:
    """Return in one clause the first change that would select a backend; empty where none is known."""
    verdict = answer.decision.verdict(answer.backend)
    return _change(answer.changes[0], verdict) if answer.changes else ""


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


def _changes(answer: WhyNot, verdict: Verdict) -> list[Line]:
    if not answer.changes:
        reasons = len(verdict.blocking) + len(verdict.missing) + (verdict.excluded is not None)
        lifts = f"{reasons} reasons stand against it" if reasons > 1 else "nothing that was tried lifts it"
        tried = "no single setting, package, version or property of the call"
        return [field("change", f"none found: {tried}; {lifts}")]
    return [field("change", _change(found, verdict)) for found in answer.changes]


def _change(found: Hint, verdict: Verdict) -> str:
    """Say a change; the setting that keeps the backend out is named with where it came from."""
    excluded = verdict.excluded
    if found.kind == "policy" and excluded is not None and found.change == excluded.reason:
        found = found.model_copy(update={"change": f"lifting {sentences.barrier(excluded)}"})
    return sentences.hint(found)
