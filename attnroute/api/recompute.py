"""Activation checkpoints: a recompute runs what the forward ran, whatever surrounds the backward pass.

The backward pass may stand outside of an `override()` block, and for CUDA tensors it runs on a thread of its
own, which no override reaches. So the policy of a forward is kept: on the frame that torch makes for each
checkpoint that is not reentrant, call by call, and else under what tells the call from others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

import torch

from attnroute.memory import Memory
from attnroute.question.policy import Policy, merge
from attnroute.scopes import is_scoped, stated_in
from attnroute.settings import environment, policy_of

if TYPE_CHECKING:
    from attnroute.api.question import Arguments

hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""Return the innermost hooks of saved tensors, which a checkpoint that is not reentrant sets, or None."""
task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs on this thread, -1 outside of one."""

KEPT: Final = 4096
"""Calls whose policy is remembered outside of frames; above this the memory starts anew."""
_FRAME: Final = "_CheckpointFrame"
_PLACE: Final = "_attnroute_policies"
_TRAINING, _TRAINS_INPUTS = 10, -2
"""Where a key says that a call trains: a reentrant checkpoint runs its forward without gradients."""

policies: Memory[Hashable, Policy] = Memory(KEPT)
"""Of calls inside an override and outside of frames; where there are any, every call is looked at."""


def settle(
    args: Arguments, policy: Policy, key: tuple[Any, ...], named: tuple[Any, Any]
) -> tuple[Policy, tuple[Any, ...]]:
    """Return the policy that holds for a call near a checkpoint, and the key of its route.

    Args:
        args: The call.
        policy: What surrounds it, and what it names itself.
        key: `route_key(args, policy)`.
        named: The backend and preference that the call names itself.
    """
    signature = _signature(key)
    frame, is_recompute = _frame(hooks(False))
    if frame is not None:
        held = _of_frame(frame, signature, policy, is_recompute=is_recompute)
    elif task() != -1:
        held = _of_forward(signature, named)
        ran = _without_gradients(key, held) if args.training else None
        if ran is not None and held.require is None and not held.prefer:
            # A wish: what ran without gradients may have no backward.
            held = merge(held, policy_of("the forward of the checkpoint", prefer=ran, tables=held.tables))
    else:
        _note(signature, policy)
        held = policy
    return held, key if held is policy else (*key[:-1], held.key)


def _without_gradients(key: tuple[Any, ...], held: Policy) -> str | None:
    """Return what a call runs without gradients: a reentrant checkpoint ran its forward so."""
    # Imported here, because routes forget what is kept here when they forget theirs.
    from attnroute.api import routes

    before, after = key[:_TRAINING], key[_TRAINING + 1 : _TRAINS_INPUTS]
    route = routes.lookup((*before, False, *after, False, held.key))
    return None if route is None else route.plan.backend


def forget() -> None:
    """Drop everything that was kept outside of frames."""
    policies.forget()


def _signature(key: tuple[Any, ...]) -> Hashable:
    """Return what a forward and its recompute have in common: all but gradients and the policy."""
    return (*key[:_TRAINING], *key[_TRAINING + 1 : _TRAINS_INPUTS])


def _note(signature: Hashable, policy: Policy) -> None:
    """Keep the policy of a call inside an override; the same call outside of one takes it back."""
    if not is_scoped():
        policies.pop(signature)
        return
    policies.put(signature, policy)


def _of_forward(signature: Hashable, named: tuple[Any, Any]) -> Policy:
    """Return the policy of the last call like this that ran outside of a backward pass.

    What was entered inside of this backward pass holds on top: a recomputed function enters the blocks of its
    forward again, and a backward of the user's own may have blocks that its forward had not.
    """
    held = policies.get(signature) or environment()
    for stated in stated_in(task()):
        held = merge(held, stated)
    backend, prefer = named
    if backend is None and prefer is None:
        return held
    return merge(held, policy_of("attention()", backend=backend, prefer=prefer, tables=held.tables))


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
    run = (task(), signature)
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
