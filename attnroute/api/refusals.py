"""A kernel that its package refuses to launch: the user is warned once, and another backend runs the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.api import failures, repeats, routes
from attnroute.errors import KernelRefusedError, NoBackendError, RerouteWarning, warn_user
from attnroute.executors import launch
from attnroute.report.refusal import render_kept, render_replaced, render_reroute
from attnroute.tables.load import load
from attnroute.vocabulary import HEAD_DIM_MULTIPLE

if TYPE_CHECKING:
    from attnroute.api.choices import Choice
    from attnroute.api.records import Output, Problem, RouteKey
    from attnroute.api.routes import Route
    from attnroute.executors.launch import Replaced
    from attnroute.question.call import Call
    from attnroute.question.policy import Policy


def reroute(
    error: KernelRefusedError, route: Route, problem: Problem, policy: Policy, key: RouteKey
) -> Output:
    """Run a call whose kernel was refused on the next backend that takes it, and remember that route.

    Args:
        error: The refusal.
        route: The route that was refused.
        problem: The call.
        policy: The settings in force.
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
            key = key._replace(policy=(key.policy, policy.failed))
        try:
            route = routes.make(problem, policy, key)
        except NoBackendError as nothing:
            raise nothing from error
        if is_new:
            text = render_reroute(failed.decision(), route.choice.decision(), error.said, lasts=error.lasts)
            warn_user(text, RerouteWarning)
        try:
            return routes.execute(route, problem)
        except KernelRefusedError as again:
            error = again
    raise error


def _record(choice: Choice, backend: str, reason: str) -> bool:
    """Remember a refusal, and forget the routes that it makes wrong."""
    signature = _signature(choice)
    is_new = failures.record(signature, backend, reason)
    repeats.drop(backend, lambda other: _signature(other) == signature)
    return is_new


def _signature(choice: Choice) -> object:
    return failures.signature_of(choice.call, choice.host, choice.policy)


def _replaced(found: Replaced) -> None:
    """Warn about a kernel that its executor replaced, and keep later calls of this kind away from it."""
    gone = repeats.drop(found.backend, lambda choice: _concerns(choice.call, found))
    is_new = failures.record(("replaced", *found[1:]), found.backend, found.reason)
    new = [c for c in gone if failures.record(_signature(c), found.backend, found.reason)]
    if new or (is_new and not gone):
        text = render_replaced(found.backend, found.reason, found.instead, new[0].decision() if new else None)
        warn_user(text, RerouteWarning)


def _concerns(call: Call, found: Replaced) -> bool:
    """Whether a kernel that was refused may be that of such a call, whose head dimensions may be padded."""
    if (call.phase == "training") is not found.training:
        return False
    if found.dtype is None:
        return True
    dims = ((call.head_dim_qk, found.head_dim_qk), (call.head_dim_v, found.head_dim_v))
    return call.dtype == found.dtype and all(
        got in (dim, -(-dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE) for dim, got in dims
    )


launch.listen(_replaced)
