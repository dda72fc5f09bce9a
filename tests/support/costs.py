"""Times that a test makes up, in place of those that the tables predict."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from attnroute.engine import classes, evaluate
from attnroute.engine.costs import Cost
from attnroute.tables.costs import Costs
from attnroute.tables.folders import Tables
from attnroute.tables.read import shipped_folder

SOURCE = "NVIDIA H200, 2026-11-29"
_TABLES = Tables((shipped_folder(),))


@contextmanager
def predicting(times, kind="measured", plans=()):
    """Predict times on every architecture, for as long as the block lasts.

    Args:
        times: Takes backend, the call as the kernel gets it, the repairs and their bytes; gives milliseconds
            of device and host, or None.
        kind: As in `Cost`.
        plans: Backends that plan each new shape, and for how many milliseconds.

    Yields:
        Tables like the shipped ones: what is remembered about those has no made-up times in it.
    """

    def cost_of(_given, final, repairs, extra_bytes, costs, _peak):
        found = times(costs.table.backend, final, repairs, extra_bytes)
        return None if found is None else Cost(*found, kind=kind, source=SOURCE)

    def costs_of(_tables, _arch, backend):
        phases = dict.fromkeys(
            ("inference", "training"), SimpleNamespace(plan_ms=dict(plans).get(backend, 0.0))
        )
        return Costs(SimpleNamespace(backend=backend, host=phases), is_own=kind == "measured")

    with ExitStack() as stack:
        for module in (classes, evaluate):
            stack.enter_context(patch.object(module, "costs_of", costs_of))
        stack.enter_context(patch.object(evaluate, "cost_of", cost_of))
        stack.enter_context(patch.object(evaluate, "peak_of", lambda _tables, _host: "a peak"))
        yield _TABLES


def by_name(times):
    """Return a function for `predicting` that gives each backend a fixed time of the device."""
    return lambda backend, *_: (times[backend], 0.0) if backend in times else None


def by_size(backend, final, repairs, extra_bytes):
    """Return times made of everything that a class of calls must hold: sizes, windows, repairs and bytes."""
    spread = sum(map(ord, backend)) % 5
    if not spread:
        return None
    size = final.batch * final.num_heads_q * final.seqlen_q * final.seqlen_kv
    in_mask = sum(sum(getattr(node, "shape", ())) + (getattr(node, "left", 0) or 0) for node in final.mask)
    return spread * size**0.8 + sum(extra_bytes) * 3 + in_mask + len(repairs), 1e5 * spread
