"""Which backends are predicted to be faster for a call than the one that runs it, whether or not they may."""

from __future__ import annotations

from typing import Final

from attnroute.engine.costs import Cost
from attnroute.engine.rank import time_ms
from attnroute.engine.select import Judgement, Selection

_SAVES: Final = 0.1
"""What saves less of the time is not worth a word, as for hints."""


def predicted_ms(selection: Selection, backend: str) -> float | None:
    """Return the time that a backend would take if no row rejected it; None where nothing was measured.

    Times that are inferred from another card's put nothing in order, and are none here.
    """
    judgement = selection.judgements.get(backend)
    cost = None if judgement is None else _cost(judgement)
    return None if cost is None or cost.kind == "inferred" else time_ms(cost, selection.call)


def faster_than(selection: Selection, backend: str) -> tuple[tuple[str, float], ...]:
    """Return the backends whose predicted time is a tenth smaller than that of one, the fastest first."""
    own = predicted_ms(selection, backend)
    if own is None:
        return ()
    times = {name: predicted_ms(selection, name) for name in selection.judgements if name != backend}
    less = {name: time for name, time in times.items() if time is not None and time < (1 - _SAVES) * own}
    return tuple(sorted(less.items(), key=lambda item: item[1]))


def _cost(judgement: Judgement) -> Cost | None:
    """Return the cost also of a backend that is rejected: of the call as far as repairs bring it."""
    if judgement.is_able:
        return judgement.cost
    stages = judgement.stages
    return judgement.rows.cost(judgement.form.call, judgement.final.form.call, stages.repairs, stages.sizes)
