"""Render a decision as text: an explanation, the text of an exception, the text of a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.errors import printable
from attnroute.question.line import render
from attnroute.report import sentences
from attnroute.report.layout import LABEL, field, size, wrapped

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Verdict


def render_decision(decision: Decision) -> str:
    """Return the whole explanation: what was selected and why, every verdict, stock, hints.

    Args:
        decision: The decision; `stock` and `hints` are rendered where they were computed.

    Returns:
        Lines of at most 110 columns, but for the call's own line, which can be pasted back.
    """
    blocks = [_head(decision), *(render_verdict(v, decision) for v in sentences.arranged(decision))]
    advice = [] if decision.stock is None else field("stock", sentences.stock(decision.stock, decision))
    for found in decision.hints:
        advice += field("hint", sentences.hint(found, decision.selected))
    lines = [*blocks[0], "", *(line for block in blocks[1:] for line in block), *_apart(advice)]
    return printable("\n".join(lines))


def render_others(decision: Decision) -> str:
    """Return why each backend but the selected one does not run: only what keeps it away."""
    lines = []
    for verdict in sentences.arranged(decision):
        if verdict.backend != decision.selected:
            lines += _verdict(verdict.model_copy(update={"findings": verdict.blocking}), decision, [])
    return printable("\n".join(lines))


def render_failure(decision: Decision) -> str:
    """Return the text of a NoBackendError: what was asked for, every reason, what could run instead.

    Args:
        decision: A decision that selected nothing.
    """
    required = decision.policy.require
    concerned = [v for v in sentences.arranged(decision) if required in (None, v.backend)]
    head = f"{sentences.why_none(decision)}: {render(decision.call)}"
    lines = [head, f"on {sentences.host_line(decision.host)}"]
    lines += [line for verdict in concerned for line in render_verdict(verdict, decision)]
    return printable("\n".join([*lines, *_apart(_alternatives(decision))]))


def render_quadratic(decision: Decision) -> str:
    """Return the text of a QuadraticAttentionWarning: backend, bytes, call, and what would avoid it.

    Args:
        decision: A decision that selected a backend of the slow tier.
    """
    selected = decision.verdict(decision.selected or "")
    clause = f"{selected.backend} holds {size(selected.score_bytes)} of scores for {render(decision.call)}"
    return printable(f"{clause}; {_avoidance(decision)}.")


def _head(decision: Decision) -> list[str]:
    if decision.selected is None:
        lines = field("selected", f"none: {sentences.why_none(decision)}")
    else:
        lines = field("selected", f"{decision.selected}, {sentences.why_selected(decision)}")
    lines.append(f"{'call':<{LABEL}}{render(decision.call)}")
    lines += field("host", sentences.host_line(decision.host))
    for label, texts in (
        ("policy", sentences.settings(decision.policy)),
        ("tuning", sentences.tuned(decision.policy)),
        ("mask", sentences.recognized(decision.call)),
    ):
        lines += [line for text in texts for line in field(label, text)]
    if len(decision.order) > 1:
        lines += field("order", f"{', '.join(decision.order)} ({sentences.order_by(decision)})")
    return lines


def render_verdict(verdict: Verdict, decision: Decision) -> list[str]:
    """Return the lines of one verdict: its sum, every reason, and how a candidate would run."""
    notes = _notes(verdict, decision) if verdict.backend in decision.order else []
    return _verdict(verdict, decision, notes)


def _verdict(verdict: Verdict, decision: Decision, notes: list[str]) -> list[str]:
    lines = field(verdict.backend, sentences.status(verdict, decision))
    for text in [*(sentences.finding(found) for found in sentences.findings(verdict)), *notes]:
        lines += wrapped(f"- {text}", " " * LABEL, " " * (LABEL + 2))
    return lines


def _notes(verdict: Verdict, decision: Decision) -> list[str]:
    """How a candidate would run: what is built for it, the options of its kernel, what compiling it takes."""
    notes = []
    if verdict.quadratic_bytes:
        built = f"builds {size(verdict.quadratic_bytes)} of mask, an entry for every query and key"
        counts = verdict.counts_mask(decision.call)
        notes.append(f"{built}, so it comes after backends that need none" if counts else built)
    notes += [f"kernel options {values} [{row}]" for row, values in _options(verdict).items()]
    if verdict.plan_ms:
        notes.append(_plan(verdict, decision))
    if verdict.compiled_seconds is not None:
        notes.append(f"compiled in {verdict.compiled_seconds:.2g} s, as each structure is at its first call")
    elif verdict.first_call_seconds is not None:
        least, most = verdict.first_call_seconds
        shared = (
            "" if verdict.measured_ms is None else f", shared by {decision.policy.expected_calls:,} calls"
        )
        notes.append(f"the first call of each structure compiles ({least:g} to {most:g} s){shared}")
    return notes


def _plan(verdict: Verdict, decision: Decision) -> str:
    planned = f"plans each new shape in {verdict.plan_ms:.3g} ms"
    if verdict.measured_ms is None:
        return planned
    calls = f"{planned}, shared by {verdict.plan_ms / verdict.plan_share_ms:,.0f} calls"
    if not decision.call.context.shapes_vary:
        return calls
    return f"{calls} as shapes vary: {verdict.plan_share_ms:.3g} ms of each"


def _options(verdict: Verdict) -> dict[str, str]:
    """The options by the row that they come from."""
    values_of: dict[str, list[str]] = {}
    for (name, value), row in zip(verdict.options, verdict.option_rows, strict=True):
        text = str(value).lower() if isinstance(value, bool) else value
        values_of.setdefault(row, []).append(f"{name} = {text}")
    return {row: ", ".join(values) for row, values in values_of.items()}


def _alternatives(decision: Decision) -> list[str]:
    """What could run under another policy: the slow tier is named only where nothing else is."""
    able = [v for v in sentences.arranged(decision) if v.status == "eligible" and _is_kept_out(v)]
    free = [v for v in able if not v.score_bytes] or able
    barriers = list(dict.fromkeys(sentences.barrier(v.excluded) for v in free if v.excluded is not None))
    if not barriers:
        return []
    names = [v.backend + (f" ({size(v.score_bytes)} of scores)" if v.score_bytes else "") for v in free]
    barrier = sentences.listed(barriers, "or")
    return field("hint", f"without {barrier}, {sentences.listed(names, 'or')} could run it")


def _is_kept_out(verdict: Verdict) -> bool:
    """Policy keeps it out, not a failure, a wrong result or a want of memory, which no policy would lift."""
    return verdict.excluded is not None and verdict.excluded.reason not in ("failed", "wrong", "memory")


def _avoidance(decision: Decision) -> str:
    """What stands between the call and the nearest backend that does not hold the scores."""
    others = [v for v in sentences.arranged(decision) if not v.score_bytes]
    free = [v for v in others if v.status == "eligible"]
    if free:
        reasons = [sentences.exclusion(v.excluded) for v in free if v.excluded is not None]
        why = reasons[0] if reasons else "put behind it by the order"
        return f"{free[0].backend} would not, and is {why}"
    if not others:
        return "no other backend is known"
    nearest = min(others, key=lambda v: (len(v.blocking), len(v.missing)))
    return f"{nearest.backend} would not, and is {nearest.status}: {'; '.join(_reasons(nearest))}"


def _reasons(verdict: Verdict) -> list[str]:
    return [sentences.finding(f) for f in verdict.blocking] or [
        f"needs {sentences.needed(need)}" for need in verdict.missing
    ]


def _apart(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []
