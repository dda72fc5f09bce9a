"""What `attnroute tune` measured of calls like one: times in place of predicted ones, and wrong results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.engine.costs import Cost
from attnroute.engine.rounding import rounded_call
from attnroute.question.call import Call, Context
from attnroute.question.line import render
from attnroute.question.normalize import normalize

if TYPE_CHECKING:
    from attnroute.question.policy import Measured, Policy


def key_of(call: Call) -> str:
    """Return what calls have in common that are measured once: all but lengths of one rounding.

    A kernel takes as long in a graph as outside of one, and gets the same tensors where they are a process's
    part of DTensors.
    """
    around = call.context.distributed
    context = Context(transform=call.context.transform, distributed=None if around == "dtensor" else around)
    return render(rounded_call(normalize(call)).changed(context=context))


def concerning(call: Call, policy: Policy) -> Policy:
    """Return the policy without what was measured of other calls than such as this one."""
    measured = policy.measured
    if measured is None or measured.differences or measured.calls == key_of(call):
        return policy
    return policy.changed(measured=None)


def measured_cost(backend: str, measured: Measured | None) -> Cost | None:
    """Return what was measured of a backend; None where nothing was."""
    if measured is None:
        return None
    for name, device_ms, host_ms in measured.times:
        if name == backend:
            return Cost(device_ms, host_ms, "tuned", f"attnroute tune here on {measured.day}")
    return None


def lead(backend: str, measured: Measured | None) -> float:
    """Return the factor of a time by which a backend stays selected unless another one wins clearly."""
    return 1.0 if measured is None or backend != measured.stays else 1.0 - measured.margin
