"""What happens when a kernel is refused before its launch: one warning, and another backend runs the call."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from attnroute.api import failures, routes
from attnroute.errors import KernelRefusedError, NoBackendError, RerouteWarning
from attnroute.executors import launch
from attnroute.report.refusal import render_kept, render_replaced, render_reroute
from attnroute.tables.load import load
from attnroute.vocabulary import HEAD_DIM_MULTIPLE

if TYPE_CHECKING:
    from attnroute.api.choices import Choice
    from attnroute.api.question import Arguments
    from attnroute.api.routes import Output, Route
    from attnroute.executors.launch import Replaced
    from attnroute.question.call import Call
    from attnroute.question.policy import Policy


def reroute(error: KernelRefusedError, route: Route, args: Arguments, policy: Policy, key: object) -> Output:
    """Run a call whose kernel was refused on the next backend that takes it, and remember that route.

    Args:
        error: The refusal.
        route: The route that was refused.
        args: The call.
        policy: The wishes of the call.
        key: What the route is remembered under.

    Raises:
        KernelRefusedError: The backend was required, or strict lets no other one run.
        NoBackendError: No other backend may run the call; the message holds every reason.

    Warns:
        RerouteWarning: Once for each backend and kind of call.
    """
    # Each round rules one backend out.
    for _ in load(policy.tables).backends:
        failed = route.choice
        if policy.strict or policy.require is not None:
            message = f"{error} {render_kept(policy, route.plan.backend)}"
            raise type(error)(message, route.plan.backend, error.said) from error.__cause__ or error
        if error.lasts:
            is_new = _record(failed, route.plan.backend, error.said)
        else:
            # The next call may stand elsewhere: what it is remembered under says nothing of this refusal.
            is_new = True
            policy = failures.also_failed(policy, {route.plan.backend: error.said})
            key = (key, policy.failed)
        try:
            route = routes.make(args, policy, key)
        except NoBackendError as nothing:
            raise nothing from error
        if is_new:
            text = render_reroute(failed.decision(), route.choice.decision(), error.said, lasts=error.lasts)
            warnings.warn(text, RerouteWarning, stacklevel=4)
        try:
            return routes.execute(route, args)
        except KernelRefusedError as again:
            error = again
    raise error


def _record(choice: Choice, backend: str, said: str) -> bool:
    """Remember a refusal, and forget the routes that it makes wrong."""
    signature = _signature(choice)
    is_new = failures.record(signature, backend, said)
    routes.drop(backend, lambda other: _signature(other) == signature)
    return is_new


def _signature(choice: Choice) -> object:
    return failures.signature_of(choice.call, choice.host, choice.policy)


def _replaced(found: Replaced) -> None:
    """Warn about a kernel that its executor replaced, and keep later calls of this kind away from it."""
    gone = routes.drop(found.backend, lambda choice: _concerns(choice.call, found))
    is_new = failures.record(("replaced", *found[1:]), found.backend, found.said)
    new = [c for c in gone if failures.record(_signature(c), found.backend, found.said)]
    if new or (is_new and not gone):
        text = render_replaced(found.backend, found.said, found.instead, new[0].decision() if new else None)
        # The frames above are those of torch's autograd, so no line of the user can be named.
        warnings.warn(text, RerouteWarning, stacklevel=2)


def _concerns(call: Call, found: Replaced) -> bool:
    """Whether a kernel that was refused may be that of such a call, whose head dimensions may be padded."""
    if (call.phase == "training") is not found.training:
        return False
    if found.dtype is None:
        return True
    dims = ((call.head_dim_qk, found.head_dim_qk), (call.head_dim_v, found.head_dim_v))
    return call.dtype == found.dtype and all(
        got in (asked, -(-asked // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE) for asked, got in dims
    )


launch.listen(_replaced)
