"""What would have been faster than what ran, and why it was not taken: asked of the engine after the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.api.recording import Faster, TracedCall
from attnroute.engine.advice.faster import faster_than, predicted_ms
from attnroute.engine.decide import explain_why_not
from attnroute.engine.select import select
from attnroute.report.why_not import render_change, render_reason
from attnroute.tables.load import load

if TYPE_CHECKING:
    from attnroute.engine.select import Selection
    from attnroute.question.call import Call
    from attnroute.question.host import Host
    from attnroute.question.policy import Policy

_NAMED: Final = 3
"""Faster backends that are named for one kind of calls."""
_UNROUTED: Final = "torch's own function was called, which has an order of its own"
_ROUTE: Final = "attnroute.route_sdpa() around the call, or attnroute run, would select it"
_EARLIER: Final = "it was not selected when such a call was decided first"


class Asked(NamedTuple):
    """What can be asked about a kind of calls."""

    call: Call
    host: Host
    policy: Policy


def advised(traced: TracedCall, asked: Asked, *, is_stock: bool) -> TracedCall:
    """Return a kind of calls with its predicted time and the backends that are predicted to be faster."""
    selection = select(asked.call, asked.host, load(asked.policy.tables), asked.policy)
    backend = traced.backend
    found = [_faster(selection, name, ms, is_stock=is_stock) for name, ms in _named(selection, backend)]
    return traced.changed(
        predicted_ms=predicted_ms(selection, backend),
        faster=tuple(found),
        routed=selection.selected if is_stock else None,
    )


def _named(selection: Selection, backend: str) -> list[tuple[str, float]]:
    """Return the fastest; among them one that may run here as it is, where there is one."""
    found = faster_than(selection, backend)
    able = [pair for pair in found if selection.judgements[pair[0]].status == "eligible"]
    named = [*found[: _NAMED - 1], *able[:1], *found[_NAMED - 1 :]]
    return sorted(dict(named[:_NAMED]).items(), key=lambda pair: pair[1])


def _faster(selection: Selection, backend: str, ms: float, *, is_stock: bool) -> Faster:
    if is_stock and backend == selection.selected:
        return Faster(backend=backend, predicted_ms=ms, why_not=_UNROUTED, change=_ROUTE)
    answer = explain_why_not(selection.call, selection.host, selection.tables, selection.policy, backend)
    why_not = render_reason(answer) or _EARLIER
    return Faster(backend=backend, predicted_ms=ms, why_not=why_not, change=render_change(answer))
