"""Render a decision as HTML for a notebook: the answer first, then a row for each backend."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from attnroute.errors import printable
from attnroute.question.line import render
from attnroute.report import sentences

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Verdict


def decision_html(decision: Decision) -> str:
    """Return a decision as HTML without colors of its own, to be read on light pages and on dark ones.

    Args:
        decision: The decision; `stock` and `hints` are rendered where they were computed.
    """
    if decision.selected is None:
        answer = f"<b>none</b>: {_safe(sentences.why_none(decision))}"
    else:
        answer = f"<b>{_safe(decision.selected)}</b>: {_safe(sentences.why_selected(decision))}"
    rows = "".join(_row(verdict, decision) for verdict in sentences.arranged(decision))
    advice = [f"hint: {sentences.hint(found, decision.selected)}" for found in decision.hints]
    if decision.stock is not None:
        advice.insert(0, f"stock attention {sentences.stock(decision.stock, decision)}")
    return (
        f"<div>{answer}<br><code>{_safe(render(decision.call))}</code><br>"
        f"<small>{_safe(sentences.host_line(decision.host))}</small>"
        f"<table><thead><tr>{_cells('th', 'backend', 'verdict', 'predicted', 'why')}</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        f"{''.join(f'<div>{_safe(text)}</div>' for text in advice)}"
        "<details><summary>every reason</summary>"
        f"<pre>{_safe(decision.text(verbose=True))}</pre></details></div>"
    )


def _row(verdict: Verdict, decision: Decision) -> str:
    is_selected = verdict.backend == decision.selected
    style = "font-weight:bold" if is_selected else "" if verdict.backend in decision.order else "opacity:0.6"
    predicted = "" if verdict.predicted_ms is None else f"{verdict.predicted_ms:.3g} ms"
    status = "selected" if is_selected else verdict.status
    cells = _cells("td", verdict.backend, status, predicted, "; ".join(_reasons(verdict)))
    return f'<tr style="{style}">{cells}</tr>'


def _reasons(verdict: Verdict) -> list[str]:
    """Say what keeps a backend away, and what is done for one that may run."""
    said = [sentences.reason(found) for found in verdict.blocking]
    said += [f"needs {sentences.needed(need)}" for need in verdict.missing]
    said += [sentences.exclusion(verdict.excluded)] if verdict.excluded is not None else []
    return said or ([f"after {sentences.listed(verdict.repairs)}"] if verdict.repairs else [])


def _cells(tag: str, *texts: str) -> str:
    return "".join(f'<{tag} style="text-align:left">{_safe(text)}</{tag}>' for text in texts)


def _safe(text: str) -> str:
    return escape(printable(text))
