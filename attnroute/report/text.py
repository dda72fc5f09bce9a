"""Render a decision as text: an explanation, the text of an exception, the text of a warning."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

from attnroute.errors import printable
from attnroute.question.line import render
from attnroute.report import sentences
from attnroute.report.layout import WIDTH, Line, field, item, laid_out, size
from attnroute.tables.alternatives import alternatives

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Hint, Verdict

_HINTS: Final = 3
"""How many hints a short explanation has."""
_INFERRED: Final = (
    "times computed from those of another architecture's card: a guide for readers, not for the choice"
)
_OF_TRACEBACKS: Final = 110
"""Columns of an exception, which stands among lines of code and paths."""
_FEW: Final = 0.01
"""The part of a time below which a short explanation says nothing of what is added to it."""


def render_decision(decision: Decision, *, verbose: bool = False, width: int = WIDTH) -> str:
    """Return the explanation: what was selected and why, what else could run, what could not and why.

    Args:
        decision: The decision; `stock` and `hints` are rendered where they were computed.
        verbose: Say every reason of each backend with the row that it comes from, every preparation and hint.
        width: Columns that lines have at most, but for the call's own line, which can be pasted back.
    """
    lines = [answer_line(decision)]
    if not verbose and decision.selected is not None:
        lines += map(item, _notes(decision.verdict(decision.selected), decision, short=True))
    lines += about(decision)
    if verbose and len(decision.order) > 1:
        lines.append(field("order", f"{', '.join(decision.order)} ({sentences.order_by(decision)})"))
    elif sentences.is_timed(decision):
        lines.append(field("times", sentences.order_by(decision).removeprefix("by predicted times, ")))
    lines.append(Line(""))
    if verbose:
        for verdict in sentences.arranged(decision):
            lines += verdict_lines(verdict, decision)
    else:
        lines += _others(decision)
    return laid_out([*lines, *_apart(_advice(decision, verbose=verbose))], width)


def _advice(decision: Decision, *, verbose: bool) -> list[Line]:
    lines = [] if decision.stock is None else [field("stock", sentences.stock(decision.stock, decision))]
    shown = decision.hints if verbose else sorted(decision.hints, key=_gain)[:_HINTS]
    lines += [field("hint", sentences.hint(found, decision.selected)) for found in shown]
    if more := len(decision.hints) - len(shown):
        lines.append(field("", f"and {more} more"))
    return lines


def _gain(found: Hint) -> tuple[bool, float]:
    """Put what costs no package first, then what would be fastest."""
    return (found.kind in ("install", "upgrade"), inf if found.then_ms is None else found.then_ms)


def _others(decision: Decision) -> list[Line]:
    """Say every other backend shortly: those with one reason together, absent packages in one line."""
    others = [v for v in sentences.arranged(decision) if v.backend != decision.selected]
    alone = [v for v in others if v.backend in decision.order or _is_broken(v, decision)]
    lines = [field(v.backend, sentences.status(v, decision)) for v in alone]
    rest = [v for v in others if v not in alone]
    if absent := sorted((v for v in rest if v.status == "unavailable"), key=_place):
        lines.append(field("absent", f"{', '.join(map(sentences.with_time, absent))}: not installed"))
    for label, status in (("kept out", "eligible"), ("unknown", "unknown"), ("rejected", "rejected")):
        groups = by_reason([v for v in rest if v.status == status])
        texts = [": ".join(filter(None, (", ".join(names), why))) for why, names in groups.items()]
        lines += [field("" if n else label, text) for n, text in enumerate(texts)]
    return lines


def _place(verdict: Verdict) -> tuple[float, str]:
    return (inf if verdict.predicted_ms is None else verdict.predicted_ms, verdict.backend)


def _is_broken(verdict: Verdict, decision: Decision) -> bool:
    names = {name for need in verdict.missing for name in alternatives(need)}
    return verdict.status == "unavailable" and bool(names & decision.host.broken.keys())


def _reasons_of(verdict: Verdict) -> list[str]:
    kept_out = verdict.status == "eligible" and verdict.excluded
    return [sentences.exclusion(kept_out)] if kept_out else [*map(sentences.reason, verdict.blocking)]


def by_reason(verdicts: list[Verdict]) -> dict[str, list[str]]:
    """Return backends by one reason of each: that which most of them share."""
    reasons = {v.backend: _reasons_of(v) for v in verdicts}
    shared = Counter(reason for found in reasons.values() for reason in dict.fromkeys(found))
    groups: dict[str, list[str]] = {}
    for backend, found in reasons.items():
        groups.setdefault(max(found, key=shared.__getitem__, default=""), []).append(backend)
    return groups


def render_failure(decision: Decision) -> str:
    """Return the text of a NoBackendError: what was asked for, every reason, what could run instead.

    Args:
        decision: A decision that selected nothing.
    """
    required = decision.policy.require
    concerned = [v for v in sentences.arranged(decision) if required in (None, v.backend)]
    head = f"{sentences.why_none(decision)}: {render(decision.call)}"
    lines = [Line(head, wraps=False), Line(f"on {sentences.host_line(decision.host)}", rest="   ")]
    lines += [line for verdict in concerned for line in verdict_lines(verdict, decision)]
    return laid_out([*lines, *_apart(_alternatives(decision))], _OF_TRACEBACKS)


def render_quadratic(decision: Decision) -> str:
    """Return the text of a QuadraticAttentionWarning: backend, bytes, call, and what would avoid it.

    Args:
        decision: A decision that selected a backend of the slow tier.
    """
    selected = decision.verdict(decision.selected or "")
    clause = f"{selected.backend} holds {size(selected.score_bytes)} of scores for {render(decision.call)}"
    return printable(f"{clause}; {_avoidance(decision)}.")


def answer_line(decision: Decision) -> Line:
    """Say what was selected, with what it takes and why."""
    if decision.selected is None:
        return field("selected", f"none: {sentences.why_none(decision)}")
    return field("selected", f"{sentences.selected(decision)}: {sentences.why_selected(decision)}")


def about(decision: Decision) -> list[Line]:
    """Say what was asked: the call, the machine, settings that somebody stated, what a mask is."""
    lines = [
        field("call", render(decision.call), wraps=False),
        field("host", sentences.host_line(decision.host)),
    ]
    for label, texts in (
        ("policy", sentences.settings(decision.policy)),
        ("tuning", sentences.tuned(decision.policy)),
        ("mask", sentences.recognized(decision.call)),
    ):
        lines += [field(label, text) for text in texts]
    if any(map(sentences.is_inferred, decision.verdicts)):
        lines.append(field("inferred", _INFERRED))
    return lines


def verdict_lines(verdict: Verdict, decision: Decision) -> list[Line]:
    """Return the lines of one verdict: its sum, every reason, and how a candidate would run."""
    reasons = [sentences.finding(found) for found in sentences.findings(verdict)]
    reasons += _notes(verdict, decision) if verdict.backend in decision.order else []
    return [field(verdict.backend, sentences.status(verdict, decision)), *map(item, reasons)]


def _notes(verdict: Verdict, decision: Decision, *, short: bool = False) -> list[str]:
    """How a candidate would run: what is built for it, the options of its kernel, what compiling it takes."""
    notes = []
    if verdict.quadratic_bytes:
        built = f"builds {size(verdict.quadratic_bytes)} of mask, an entry for every query and key"
        counts = verdict.counts_mask(decision.call)
        notes.append(f"{built}, so it comes after backends that need none" if counts else built)
    if not short:
        notes += [f"kernel options {values} [{row}]" for row, values in _options(verdict).items()]
    if verdict.plan_ms and not (short and verdict.plan_share_ms < _FEW * (verdict.measured_ms or 0.0)):
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


def _alternatives(decision: Decision) -> list[Line]:
    """What could run under another policy: the slow tier is named only where nothing else is."""
    able = [v for v in sentences.arranged(decision) if v.status == "eligible" and _is_kept_out(v)]
    free = [v for v in able if not v.score_bytes] or able
    barriers = list(dict.fromkeys(sentences.barrier(v.excluded) for v in free if v.excluded is not None))
    if not barriers:
        return []
    names = [v.backend + (f" ({size(v.score_bytes)} of scores)" if v.score_bytes else "") for v in free]
    barrier = sentences.listed(barriers, "or")
    return [field("hint", f"without {barrier}, {sentences.listed(names, 'or')} could run it")]


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


def _apart(lines: list[Line]) -> list[Line]:
    return [Line(""), *lines] if lines else []
