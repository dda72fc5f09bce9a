"""Times a call and its backward pass for a trace, by events on a CUDA stream or the clock of the host."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from attnroute.masks.tracing import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

Direction = Literal["forward", "backward"]
_PENDING: Final = 256
"""Pairs of events that a thread keeps before it reads those that the device has passed."""
_NODES: Final = 64
"""Nodes of autograd that one call has at most; a larger graph is not looked through."""


class Tally:
    """What one thread counted of one kind of calls of one module."""

    __slots__ = ("backward", "backward_ms", "count", "forward_ms", "longest_ms", "recomputed")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.count = self.recomputed = self.backward = 0
        self.forward_ms = self.backward_ms = self.longest_ms = 0.0

    def add(self, direction: Direction, milliseconds: float) -> None:
        """Add a time."""
        if direction == "forward":
            self.forward_ms += milliseconds
            self.longest_ms = max(self.longest_ms, milliseconds)
        else:
            self.backward_ms += milliseconds

    def copy(self) -> Tally:
        """Return what was counted so far."""
        made = Tally()
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        return made


class Pending:
    """Events on streams whose times are not read yet, each thread's own; so nothing waits for the device."""

    def __init__(self) -> None:
        """Begin with none."""
        self._of_threads: dict[int, deque[tuple[Any, Any, Tally, Direction]]] = {}

    def add(self, start: Any, end: Any, tally: Tally, direction: Direction) -> None:
        """Keep a pair of events; the thread that counts into the tally calls this."""
        mine = self._of_threads.setdefault(get_ident(), deque())
        mine.append((start, end, tally, direction))
        if len(mine) >= _PENDING:
            # Half of them: the device may still be in front of the later ones.
            for _ in range(_PENDING // 2):
                _read(*mine.popleft())

    def read(self, tally: Tally) -> Tally:
        """Return a copy of a tally with the times that are not read yet, for which this waits."""
        total = tally.copy()
        for pairs in list(self._of_threads.values()):
            for start, end, counted, direction in list(pairs):
                if counted is tally:
                    _read(start, end, total, direction)
        return total


def _read(start: Any, end: Any, tally: Tally, direction: Direction) -> None:
    end.synchronize()
    tally.add(direction, start.elapsed_time(end))


def moment(tensor: Tensor) -> Any:
    """Return now, on the stream of a tensor's device or of the host; None while a CUDA graph is captured."""
    if not tensor.is_cuda:
        return perf_counter()
    if is_capturing(tensor):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class Watch:
    """Tells a trace of each backward pass through one call, and of the time between its nodes of autograd."""

    __slots__ = ("_ended", "_entered", "_now", "_tensor")

    def __init__(self, like: Tensor, entered: Callable[[], None], ended: Callable[[Any, Any], None]) -> None:
        """Take what to tell; `like` says the device and is not kept.

        Args:
            like: A tensor of the call.
            entered: Is called where a backward pass begins.
            ended: Is called with two moments for each node of the call.
        """
        self._tensor = like.new_empty(0)
        self._entered, self._ended = entered, ended
        self._now: Any = None

    def begin(self, _: object) -> None:
        """A pass reaches the output."""
        self._entered()
        self._now = moment(self._tensor)

    def step(self, _: object, __: object) -> None:
        """A node of the call is done."""
        now = moment(self._tensor)
        if now is not None and self._now is not None:
            self._ended(self._now, now)
        self._now = now


def watch(out: Tensor, inputs: Iterable[object], watching: Watch) -> None:
    """Put hooks on the nodes of autograd between an output and its inputs; they go with the graph."""
    first = out.grad_fn
    if first is None:
        return
    ends = {get_gradient_edge(t).node for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad}
    nodes = _between(first, ends)
    first.register_prehook(watching.begin)
    for node in nodes:
        node.register_hook(watching.step)


def _between(first: Any, ends: set[Any]) -> list[Any]:
    """Return the nodes from one on up to others; where they are too many, the first alone."""
    found, new = {first}, [first]
    while new:
        for node, _ in new.pop().next_functions:
            # What has no further node collects the gradient of a leaf.
            if node is not None and node not in ends and node not in found and node.next_functions:
                found.add(node)
                new.append(node)
        if len(found) > _NODES:
            return [first]
    return list(found)
