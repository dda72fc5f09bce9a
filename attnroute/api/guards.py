"""The guards on lengths of a compiled graph: conditions that could change its decision.

A decision is made for the lengths of the call that is traced. Each condition on a length that could change
it, of a row or of a preference, is then evaluated on the tracer's own lengths too, which makes its answer a
guard of the graph. Only a length with other results is traced anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import SymInt

from attnroute.engine.dependence import OPEN, evaluate_row, open_facts, open_rows
from attnroute.masks.tracing import is_open
from attnroute.question.normalize import normalize

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.masks.lowered.form import Extent
    from attnroute.question.call import Call
    from attnroute.tables.folders import Tables


def guard_decision(decision: Decision, extent: Extent, tables: Tables) -> None:
    """Make every condition on lengths that could change a decision a guard of the graph.

    Args:
        decision: The decision, made with the lengths of the example.
        extent: The tracer's sizes.
        tables: The capability tables.
    """
    if not is_open(extent):
        return
    call = normalize(decision.call)
    decision = decision.model_copy(update={"call": call})
    facts = open_facts(call, extent.batch, extent.seqlen_q, extent.seqlen_kv)
    # Older versions of torch cannot compare a SymBool with True.
    facts["seqlens_equal"] = bool(facts["seqlens_equal"])
    for row in open_rows(decision, tables, OPEN):
        evaluate_row(row, facts)
    if call.mask and extent.seqlen_q > extent.seqlen_kv:
        # Which queries may attend no key depends on the lengths themselves.
        _close(extent)


def open_lengths(call: Call, extent: Extent) -> Call:
    """Return the call with the lengths that the tracer leaves open stated as such."""
    sizes = {"batch": extent.batch, "seqlen_q": extent.seqlen_q, "seqlen_kv": extent.seqlen_kv}
    dynamic = tuple(name for name, size in sizes.items() if isinstance(size, SymInt))
    return call.with_(context=call.context.model_copy(update={"dynamic": dynamic}))


def _close(extent: Extent) -> None:
    """Make the lengths constants of the graph."""
    for length in (extent.seqlen_q, extent.seqlen_kv):
        int(length)
