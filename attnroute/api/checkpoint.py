"""Activation checkpoints: a recompute runs what the forward ran, whatever surrounds the backward pass.

The backward pass may stand outside of an `override()` block, and for CUDA tensors it runs on a thread of its
own, which no override reaches. So the policy of a forward is kept: on the frame that torch makes for each
checkpoint that is not reentrant, call by call, and otherwise under a key of the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from attnroute.api import routes
from attnroute.distributed.torchs import STOCK, is_around
from attnroute.memory import Memory
from attnroute.question.policy import Policy, merge
from attnroute.scopes import scope_here, stated_in
from attnroute.settings import environment, policy_of

if TYPE_CHECKING:
    from attnroute.api.records import Given, Problem, RouteKey

saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""Return the innermost hooks of saved tensors, which a checkpoint that is not reentrant sets, or None."""
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs on this thread, -1 outside of one."""

KEPT: Final = 4096
"""Calls whose policy is remembered outside of frames."""
_FRAME: Final = "_CheckpointFrame"
_PLACE: Final = "_attnroute_policies"

POLICIES: Memory[Hashable, Policy] = Memory(
    KEPT, f"{__name__}.POLICIES", "when the call runs outside of override()"
)
"""Of calls inside an override and outside of frames; the same call outside of one takes it back."""


def is_near() -> bool:
    """Return whether a call may be one of a checkpoint, or its policy that of a later recompute.

    So it is inside of torch's context_parallel, which is in no policy yet.
    """
    return (
        saved_tensors_hooks(False) is not None
        or backward_pass() != -1
        or scope_here() is not None
        or (functional.scaled_dot_product_attention is not STOCK and is_around())
    )


def is_noted(key: RouteKey) -> bool:
    """Return whether the same call was met inside an override since, in another thread."""
    return POLICIES.get(signature_of(key)) is not None


def is_noted_as(signature: RouteKey, policy: object) -> bool:
    """Return whether a call inside of an override is noted, with the policy of this key."""
    noted = POLICIES.get(signature)
    return noted is not None and noted.key == policy


def is_inside() -> bool:
    """Return whether a call may be one of a checkpoint: of its forward, or of its recompute."""
    return saved_tensors_hooks(False) is not None or backward_pass() != -1


def policy_for(problem: Problem, policy: Policy, key: RouteKey) -> tuple[Policy, bool]:
    """Return the policy in force for a call near a checkpoint.

    Args:
        problem: The call.
        policy: What surrounds it, and what it names itself.
        key: `key_of(problem, policy)`.

    Returns:
        The policy, and whether it is kept for a later recompute and was not before: calls like this one must
        take it back then, which repeats on the short way do not.
    """
    signature = signature_of(key)
    frame, is_recompute = _frame(saved_tensors_hooks(False))
    if frame is not None:
        return _of_frame(frame, signature, policy, is_recompute=is_recompute), False
    if backward_pass() == -1:
        return policy, _note(signature, policy)
    kept = _of_forward(signature, problem.given)
    if problem.training and kept.require is None and not kept.prefer:
        # A reentrant checkpoint ran its forward without gradients. What ran there is preferred and not
        # required, because it may have no backward.
        route = routes.lookup(signature._replace(policy=kept.key))
        if route is not None:
            origin, ran = "the forward of the checkpoint", route.plan.backend
            return merge(kept, policy_of(origin, prefer=ran, tables=kept.tables)), False
    return kept, False


def signature_of(key: RouteKey) -> RouteKey:
    """Return what a forward and its recompute have in common: all but gradients and the policy."""
    return key._replace(training=False, trains_inputs=False, policy=None)


def _note(signature: Hashable, policy: Policy) -> bool:
    """Keep the policy of a call inside an override, which the same call outside of one takes back.

    Returns:
        Whether none was kept for it before.
    """
    if scope_here() is None:
        POLICIES.pop(signature)
        return False
    is_new = POLICIES.get(signature) is None
    POLICIES.put(signature, policy)
    return is_new


def _of_forward(signature: Hashable, given: Given) -> Policy:
    """Return the policy of the last call like this that ran outside of a backward pass.

    Blocks that were entered inside of this backward pass apply on top: a recomputed function enters those of
    its forward again, and a backward of the user's own may have blocks that its forward had not.
    """
    policy = POLICIES.get(signature) or environment()
    for stated in stated_in(backward_pass()):
        policy = merge(policy, stated)
    if given.backend is None and given.prefer is None:
        return policy
    named = policy_of("attention()", backend=given.backend, prefer=given.prefer, tables=policy.tables)
    return merge(policy, named)


def _of_frame(frame: Any, signature: Hashable, policy: Policy, *, is_recompute: bool) -> Policy:
    """Keep the policy with the checkpoint in its forward, and return the same one in each recompute."""
    kept: dict[Any, Any] = frame.__dict__.setdefault(_PLACE, {})
    if not is_recompute:
        kept.setdefault(signature, []).append(policy)
        return policy
    held = kept.get(signature)
    if not held:
        return policy
    # Calls of one signature come in the order of the forward, in each backward pass anew.
    run = (backward_pass(), signature)
    at = kept[run] = kept.get(run, -1) + 1
    found: Policy = held[min(at, len(held) - 1)]
    return found


def _frame(pair: Any) -> tuple[Any, bool]:
    """Return the checkpoint whose hooks these are, and whether it recomputes: it is held weakly then."""
    if pair is None:
        return None, False
    function = pair[0]
    for name in ("__wrapped__", "_torchdynamo_orig_callable"):
        function = getattr(function, name, function)
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        if type(held).__name__ == _FRAME:
            return held, False
        if isinstance(held, weakref.ref) and type(held()).__name__ == _FRAME:
            return held(), True
    return None, False
