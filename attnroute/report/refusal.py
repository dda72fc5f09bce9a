"""Write the warnings about kernels that were refused before their launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.errors import printable
from attnroute.question.line import render
from attnroute.report.sentences import host_line

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.question.policy import Policy


def render_reroute(failed: Decision, now: Decision, reason: str, *, lasts: bool = True) -> str:
    """Return the text of a RerouteWarning: who refused what, who runs it, what to report, how to ban it.

    Args:
        failed: The decision for the backend that refused.
        now: The decision that was made without it.
        reason: The error of the package, in one line.
        lasts: Such calls will be refused again, whatever surrounds them.
    """
    backend = failed.selected or ""
    if not lasts:
        return printable(f"{reason} {now.selected} runs this call instead. {_ban(backend)}")
    return printable(
        f"backend {backend} refused a call before its kernel was launched ({reason}); {now.selected} runs it"
        f" and every call like it in this process. {_report(failed, backend)} {_ban(backend)}"
    )


def render_replaced(backend: str, reason: str, instead: str, decision: Decision | None) -> str:
    """Return the text of a RerouteWarning where a backend had to be replaced on its way.

    Args:
        backend: Who refused.
        reason: The error of the package, in one line.
        instead: Who ran in its place.
        decision: The decision for a call of the kind that was refused, where one is known.
    """
    later = " Later calls like it go to another backend from the start." if decision is not None else ""
    report = "" if decision is None else f" {_report(decision, backend)}"
    return printable(
        f"backend {backend} refused a kernel before it was launched, in a backward or a compiled graph, where"
        f" no other backend can be chosen any more ({reason}); {instead} ran in its place.{later}{report}"
        f" {_ban(backend)}"
    )


def render_kept(policy: Policy, backend: str) -> str:
    """Say why no other backend runs in the place of one that refused."""
    if policy.require is not None:
        reason = f"{backend} is required by {policy.origin_of('require')}"
    else:
        reason = f"strict is set by {policy.origin_of('strict')}"
    return f"No other backend runs in its place, because {reason}."


def _report(decision: Decision, backend: str) -> str:
    """Name the row that is missing, as no row that was held against the call forbids it."""
    held = [f for f in decision.verdict(backend).findings if f.outcome == "pass"]
    place = f"{decision.host.arch}/{backend}"
    return (
        f"None of the {len(held)} rows for {backend} that this call meets foresaw that, so a row {place}/..."
        f" is missing: please report {place} with this text, for {render(decision.call)} on"
        f" {host_line(decision.host)}."
    )


def _ban(backend: str) -> str:
    return f'To keep {backend} away, set ATTNROUTE_BACKENDS=-{backend} or use override(ban="{backend}").'
