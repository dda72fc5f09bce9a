"""One call, from its arguments to the output of a kernel: problem, key, remembered route, kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnroute.api import checkpoint, lengths, repeats, routes
from attnroute.api.intake import take
from attnroute.api.keys import key_of
from attnroute.api.refusals import reroute
from attnroute.errors import KernelRefusedError
from attnroute.settings import call_policy

if TYPE_CHECKING:
    from attnroute.api.records import Given, Output
    from attnroute.engine.decision import Decision


def holds_dtensors(given: Given) -> bool:
    """Return whether query, key or value is a DTensor, by its name: torch.distributed may not be there."""
    return any(type(tensor).__name__ == "DTensor" for tensor in given[:3])


def on_this_process(given: Given) -> Given:
    """Return the call that `run` makes on plain tensors: with DTensors that of this process, else the same.

    Raises:
        ArgumentError: A DTensor lies in a way that needs communication, or this process computes nothing.
    """
    if not holds_dtensors(given):
        return given
    from attnroute.distributed import dtensors

    return dtensors.local_call(given)


def is_local(given: Given) -> bool:
    """Return whether no process needs what another one has."""
    if not holds_dtensors(given):
        return True
    from attnroute.distributed import dtensors

    return dtensors.is_local(given)


def _decision_of(given: Given) -> Decision:
    return routes.decision_of(take(given), call_policy(given.backend, given.prefer))


def run(given: Given) -> Output:
    """Run one call; eager calls and those of a tracer come this way.

    Returns:
        The output and, where the call requests it, the log-sum-exp.
    """
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        # Nothing is recorded there, whatever `torch.enable_grad` says, but autograd functions would try to.
        with torch.no_grad():
            return run(given)
    # Asked here, since a call that goes the short way has plain tensors.
    if not type(given.query) is type(given.key) is type(given.value) is Tensor and holds_dtensors(given):
        from attnroute.distributed import dtensors

        return dtensors.run(given, lambda local: repeats.run(local) or run(local), _decision_of)
    problem = take(given)
    policy = call_policy(given.backend, given.prefer)
    if problem.traced:
        return routes.execute(routes.trace(problem, policy), problem)
    try:
        key = key_of(problem, policy)
        if checkpoint.is_near() or checkpoint.POLICIES.entries:
            held, is_new = checkpoint.policy_for(problem, policy, key)
            if is_new:
                repeats.forget()
            if held is not policy:
                policy, key = held, key._replace(policy=held.key)
        elif lengths.LASTING.entries:
            # Not near a checkpoint, where a recompute runs what its forward ran.
            key = lengths.lasting(key)
        route = routes.lookup(key)
    except (AttributeError, RuntimeError, TypeError) as error:
        # What no key can be made of is malformed, and the checks name the argument.
        routes.decision_of(problem, policy)
        raise error from None
    if route is None:
        route = routes.make(problem, policy, key, is_free=not checkpoint.is_inside())
    try:
        output = routes.execute(route, problem)
    except KernelRefusedError as error:
        return reroute(error, route, problem, policy, key)
    # Only now is kept what was made of a new mask.
    repeats.keep(given, problem, route, key)
    return output
