"""One call, from its arguments to the output of a kernel: problem, key, remembered route, kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from attnroute.api import checkpoint, lengths, repeats, routes
from attnroute.api.alike import apart
from attnroute.api.intake import take
from attnroute.api.keys import key_of
from attnroute.api.refusals import reroute
from attnroute.distributed import torchs
from attnroute.errors import KernelRefusedError
from attnroute.settings import call_policy

if TYPE_CHECKING:
    from attnroute.api.records import Given, Output, Problem, RouteKey
    from attnroute.engine.decision import Decision
    from attnroute.question.policy import Policy
    from attnroute.vocabulary import Distributed

_PART: Final = "dtensor"
"""The place of what one process computes of a call on DTensors."""


def holds_dtensors(given: Given) -> bool:
    """Return whether query, key or value is a DTensor, by its name: torch.distributed may not be there."""
    return any(type(tensor).__name__ == "DTensor" for tensor in given[:3])


def is_local(given: Given) -> bool:
    """Return whether no process needs what another one has."""
    if not holds_dtensors(given):
        return True
    from attnroute.distributed import dtensors

    return dtensors.is_local(given)


def question(given: Given) -> tuple[Problem, Policy]:
    """Return the call of which a kernel of this process is asked, and the settings in force.

    Raises:
        ArgumentError: The call has no meaning for a part of sequences, or cannot be shared out; a DTensor
            lies in a way that needs communication, or this process computes nothing.
        NoBackendError: A way that was required has no kernel.
    """
    if not holds_dtensors(given):
        return _question(given, None)
    from attnroute.distributed import dtensors

    return _question(dtensors.local_call(given), _PART)


def _question(given: Given, distributed: Distributed | None) -> tuple[Problem, Policy]:
    problem, policy = take(given), torchs.call_policy_inside(given.backend, given.prefer)
    problem.distributed = distributed
    if policy.context_parallel is None:
        return problem, policy
    # Other calls do without what this imports.
    from attnroute.api import context_parallel

    return context_parallel.described(problem, policy)


def _decision_of_part(given: Given) -> Decision:
    """Decide about what this process computes of a call on DTensors."""
    return routes.decision_of(*_question(given, _PART))


def _run_part(given: Given) -> Output:
    """Run what this process computes of a call on DTensors."""
    return repeats.run(*apart(given), distributed=_PART) or run(given, distributed=_PART)


def run(given: Given, policy: Policy | None = None, distributed: Distributed | None = None) -> Output:
    """Run one call; eager calls and those of a tracer come this way.

    Args:
        given: The arguments.
        policy: The settings in force; None = those around the call, and its own.
        distributed: Its place among the calls of several ranks.

    Returns:
        The output and, where the call requests it, the log-sum-exp.
    """
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        # Nothing is recorded there, whatever `torch.enable_grad` says, but autograd functions would try to.
        with torch.no_grad():
            return run(given, policy, distributed)
    # Asked here, since a call that goes the short way has plain tensors.
    if not type(given.query) is type(given.key) is type(given.value) is Tensor and holds_dtensors(given):
        from attnroute.distributed import dtensors

        return dtensors.run(given, _run_part, _decision_of_part)
    problem = take(given)
    problem.distributed = distributed
    stands_alone = functional.scaled_dot_product_attention is torchs.STOCK
    policy_of = call_policy if stands_alone else torchs.call_policy_inside
    policy = policy or policy_of(given.backend, given.prefer)
    if problem.traced:
        return _traced(problem, policy)
    try:
        key = key_of(problem, policy)
        if checkpoint.is_near() or checkpoint.POLICIES.entries:
            held, is_new = checkpoint.policy_for(problem, policy, key)
            if is_new:
                repeats.forget()
            policy, key = held, key if held is policy else key._replace(policy=held.key)
        elif lengths.LASTING.entries:
            # Not near a checkpoint, where a recompute runs what its forward ran.
            key = lengths.lasting(key)
        route = routes.lookup(key)
    except (AttributeError, RuntimeError, TypeError) as error:
        # What no key can be made of is malformed, and the checks name the argument.
        routes.decision_of(problem, policy)
        raise error from None
    if policy.context_parallel is not None:
        return _on_many_ranks(problem, policy, key)
    if route is None:
        route = routes.make(problem, policy, key, is_free=not checkpoint.is_inside())
    try:
        output = routes.execute(route, problem)
    except KernelRefusedError as error:
        return reroute(error, route, problem, policy, key)
    # Only now is kept what was made of a new mask.
    repeats.keep(given, problem, route, key)
    return output


def _traced(problem: Problem, policy: Policy) -> Output:
    if policy.context_parallel is not None:
        return _on_many_ranks(problem, policy, None)
    return routes.execute(routes.trace(problem, policy), problem)


def _on_many_ranks(problem: Problem, policy: Policy, key: RouteKey | None) -> Output:
    # Other calls do without what this imports.
    from attnroute.api import context_parallel

    return context_parallel.run(problem, policy, key, run)
