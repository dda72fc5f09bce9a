"""The blocks of `override()`, `context_parallel()` and `route_sdpa()` that a thread or asyncio task entered.

The entered blocks are kept in ContextVars and nowhere else, so each thread and each task has its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from attnroute.errors import OverrideError, OverrideWarning, warn_user
from attnroute.question.policy import Policy, merge

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Scope:
    """One block that states settings and was entered here, on top of the blocks around it.

    Attributes:
        block: The block.
        below: The scope around it.
        policy: The settings in force inside.
        guard: The same as a text, on which a compiled graph has a guard.
        task: The backward pass in which it was entered, -1 outside of one.
    """

    block: Stating
    below: Scope | None
    policy: Policy
    guard: str
    task: int


_OVERRIDE: ContextVar[Scope | None] = ContextVar("attnroute_override", default=None)
ROUTED: ContextVar[int] = ContextVar("attnroute_route_sdpa", default=0)
"""How many blocks of `route_sdpa()` were entered in this thread or task and not left."""


scope_here: Callable[[], Scope | None] = _OVERRIDE.get
"""Return the innermost block that was entered in this thread or task, None outside of every one."""

override_guard: str
"""The settings of `override()` in this thread or task, as a text: equal for equal settings, empty outside.

A compiled graph must not run under another override than the one it was made under. dynamo cannot guard a
ContextVar. It can guard an attribute of a module, which it reads again before each run, in the thread and
task of that run. So `__getattr__` computes this one from the ContextVar each time; nothing else keeps it.
"""

on_many_ranks: bool
"""Whether a block of `context_parallel()` is around this code; computed in the same way."""

routes_sdpa: bool
"""Whether a block of `route_sdpa()` is around this code; computed in the same way, for the same guards."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str | bool:
        if name == "override_guard":
            scope = _OVERRIDE.get()
            return "" if scope is None else scope.guard
        if name == "on_many_ranks":
            scope = _OVERRIDE.get()
            return scope is not None and scope.policy.context_parallel is not None
        if name == "routes_sdpa":
            # On a thread of the autograd engine, which has torch's modes of the caller but not its context,
            # the mode that asks says it.
            return ROUTED.get() > 0 or _backward_pass() >= 0
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def stated_in(task: int) -> list[Policy]:
    """Return what the blocks state that were entered inside of a backward pass, the outermost first."""
    found: list[Policy] = []
    scope = _OVERRIDE.get()
    while scope is not None:
        if scope.task == task:
            found.append(scope.block.stated)
        scope = scope.below
    return found[::-1]


class Block:
    """A block for ``with``, and a decorator.

    Entries are kept in the context of the thread or task, so one object may be entered in several at a time.

    Attributes:
        maker: The public function that returns it, for messages.
    """

    maker: ClassVar[str]
    _used = True
    """Nothing to warn of before it is complete."""

    def __enter__(self) -> object:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError

    def __call__(self, function: _F) -> _F:
        """Decorate a function, which runs inside the block at each call.

        Raises:
            OverrideError: It is no function, or a generator, which would run outside.
        """
        self._used = True
        if isinstance(function, type) or not callable(function):
            got, to_do = type(function).__name__, "decorate its methods"
        elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            got, to_do = "a generator function", "write the with statement into it"
        else:
            return cast("_F", _inside(self, function))
        raise OverrideError(
            f"@{self.maker}() requires a function or a coroutine function; got {got}; {to_do}."
        )

    def __del__(self) -> None:
        if not self._used:
            message = f"{self.maker}() has no effect on its own: write `with attnroute.{self.maker}(...):`"
            warn_user(message + " around the calls, or decorate a function with it.", OverrideWarning)


class Stating(Block):
    """A block that states settings.

    Attributes:
        stated: What the block states.
        below: Returns the settings in force outside of every block.
    """

    def __init__(self, stated: Policy, below: Callable[[], Policy]) -> None:
        self.stated = stated
        self.below = below
        self._used = False

    def enter(self) -> Policy:
        """Put the settings in force, and return all that are."""
        self._used = True
        scope = _entered(self, _OVERRIDE.get(), _backward_pass())
        _OVERRIDE.set(scope)
        return scope.policy

    def __exit__(self, *_: object) -> None:
        _OVERRIDE.set(_left(self, _OVERRIDE.get()))


class Override(Stating):
    """What `override()` returns."""

    maker = "override"

    def __enter__(self) -> Policy:
        return self.enter()


def outside_of_graphs(function: Any) -> None:
    """Make a function a graph break: dynamo cannot trace a ContextVar, and would break deep inside of it.

    These are the marks that `torch.compiler.disable` sets; no torch is loaded here.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "enter this block outside of the compiled function"


outside_of_graphs(Override.__enter__)
outside_of_graphs(Stating.__exit__)


def _inside(block: Block, function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def steered_later(*args: Any, **given: Any) -> Any:
            with block:
                return await function(*args, **given)

        return steered_later

    @wraps(function)
    def steered(*args: Any, **given: Any) -> Any:
        with block:
            return function(*args, **given)

    return steered


def _entered(block: Stating, below: Scope | None, task: int) -> Scope:
    policy = merge(block.below() if below is None else below.policy, block.stated)
    return Scope(block, below, policy, repr(policy.key), task)


def _left(block: Stating, scope: Scope | None) -> Scope | None:
    """Return a scope without the innermost entry of a block: generators need not end in the order of `with`.

    Raises:
        OverrideError: The block was entered in another thread or task.
    """
    if scope is None:
        raise left_elsewhere(block)
    if scope.block is block:
        return scope.below
    return _entered(scope.block, _left(block, scope.below), scope.task)


def left_elsewhere(block: Block) -> OverrideError:
    """Return the error of a block that is left in another thread or task than it was entered in."""
    required = f"{block.maker}() requires a block to be left in the thread or task that entered it"
    return OverrideError(f"{required}; got another one; keep the whole with statement in one of them.")


def _backward_pass() -> int:
    """Return the number of the backward pass that runs on this thread, -1 outside of one."""
    # This module loads no torch, and without torch there is no backward pass.
    core = getattr(sys.modules.get("torch"), "_C", None)
    return -1 if core is None else int(core._current_graph_task_id())
