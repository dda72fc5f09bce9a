"""`route_sdpa()`: calls of torch's scaled_dot_product_attention inside of a block are routed, in any code.

A TorchFunctionMode sees each of these calls, also where the function was imported before, and torch.compile
traces through it and makes the modes around a graph a condition of it. Modes belong to a thread, and the
tasks of an event loop share one, so a ContextVar says which code the block is around.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

from attnroute import scopes
from attnroute.api import multi_head, sdpa

UNFLATTEN: Final = torch.Tensor.unflatten
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_function_modes_here = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at


def with_calls_inside(function: Any, mode: TorchFunctionMode) -> Callable[..., Any]:
    """Return one of torch's Python functions as it is, but with a mode on while it runs."""
    names = {
        name: (lambda *_: False) for name in function.__globals__ if name.startswith("has_torch_function")
    }
    code, given = function.__code__, function.__defaults__
    looking_for_none = FunctionType(code, {**function.__globals__, **names}, function.__name__, given)
    looking_for_none.__kwdefaults__ = function.__kwdefaults__

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return looking_for_none(*args, **kwargs)

    return run


class _Mode(TorchFunctionMode):
    """Sees each function of torch that is called on the thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Another subclass of Tensor says itself what a function means for it.
        if func in _ROUTED and scopes.routes_sdpa and (PLAIN.issuperset(types) or _are_dtensors(types)):
            func = _ROUTED[func]
        elif func is UNFLATTEN:
            # dynamo cannot trace torch's function, which calls super(); it knows the method by its name.
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _are_dtensors(types: Any) -> bool:
    """Return whether `attention()` knows all of these subclasses of Tensor."""
    return all(kind in PLAIN or kind.__name__ == "DTensor" for kind in types)


_MODE: Final = _Mode()
"""One for all blocks: graphs of torch.compile are made for a mode, and fit each block so."""


def _checkpoint_in_a_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a checkpoint whose function runs with the mode on.

    dynamo shows a mode the checkpoint as one operator, and traces its function with the mode off. It lets a
    mode be entered there only if one was entered before the operator.
    """
    with _MODE:
        pass

    def inside(*args: Any, **kwargs: Any) -> Any:
        with _MODE:
            return function(*args, **kwargs)

    return checkpoint(inside, *args, **kwargs)


_ROUTED: Final[dict[Any, Callable[..., Any]]] = {
    sdpa.stock: sdpa.scaled_dot_product_attention,
    multi_head.stock: multi_head.multi_head_attention_forward,
    checkpoint: _checkpoint_in_a_graph,
    # A recompute of a checkpoint runs inside of these, and is routed as its forward was.
    torch.Tensor.backward: with_calls_inside(torch.Tensor.backward, _MODE),
    torch.autograd.backward: with_calls_inside(torch.autograd.backward, _MODE),
    torch.autograd.grad: with_calls_inside(torch.autograd.grad, _MODE),
}


class RouteSdpa(scopes.Block):
    """What `route_sdpa()` returns."""

    maker = "route_sdpa"

    def __init__(self) -> None:
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        _push_mode(_MODE)
        scopes.ROUTED.set(scopes.ROUTED.get() + 1)

    def __exit__(self, *_: object) -> None:
        entered = scopes.ROUTED.get()
        if not (entered and _is_here()):
            raise scopes.left_elsewhere(self)
        scopes.ROUTED.set(entered - 1)
        # Blocks of tasks and generators need not end in the order in which they began.
        above = []
        while (mode := _pop_mode()) is not _MODE:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


scopes.outside_of_graphs(RouteSdpa.__enter__)
scopes.outside_of_graphs(RouteSdpa.__exit__)


def _is_here() -> bool:
    return any(_function_mode_at(at) is _MODE for at in range(_function_modes_here()))


def route_sdpa() -> RouteSdpa:
    """Route each call of torch's scaled_dot_product_attention inside a block, in code that nobody edits.

    ``with route_sdpa():`` applies until the block ends, ``@route_sdpa()`` in each call of a function or
    coroutine function, in this thread or task. Every argument means what it means for torch's function:
    top-left causal, float masks added, heads shared with `enable_gqa` alone. Calls that `attention()` does
    not know, on other devices or with subclasses of Tensor but DTensor, are torch's own as before.

    Returns:
        The block. One that is dropped unused warns.

    Raises:
        OverrideError: A block is left in another thread or task than it was entered in.

    Warns:
        OverrideWarning: What was returned is dropped and never routed anything.
    """
    return RouteSdpa()


scopes.outside_of_graphs(route_sdpa)
