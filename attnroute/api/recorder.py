"""Counts and times calls in modules while traces are active, whoever runs the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch

from attnroute.api import faster
from attnroute.api.clocks import Direction, Pending, Tally, Watch, moment, watch
from attnroute.api.places import Where, where_called, where_traced
from attnroute.api.recording import How, Place, TracedCall
from attnroute.masks.tracing import size_hint
from attnroute.question.line import render

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.api.records import Output, Problem
    from attnroute.question.call import Call
    from attnroute.question.host import Host

KINDS_KEPT: Final = 4096
"""Kinds of calls that a trace tells apart."""
PLACES_KEPT: Final = 65536
"""Pairs of a kind and a module."""
_RECOMPUTED: Final = "_StopRecomputationError"
"""What torch raises where a recompute has made all that is needed; it has no public name."""


@dataclass(slots=True)
class Seen:
    """A call that is about to run, as a recorder needs it.

    Attributes:
        key: Tells its kind from others.
        is_stock: It is torch's own.
        how: It runs now, or is traced or captured.
        query: Says the device.
        inputs: What its backward pass ends at; None where backward passes are not watched.
        label: The name of its range in a profile; empty for none.
        describe: Returns what the kind is, and what can be asked about it.
        keeps: What must live as long as the key.
    """

    key: object
    is_stock: bool
    how: How
    query: Tensor
    inputs: tuple[object, ...] | None
    label: str
    describe: Callable[[], tuple[TracedCall, faster.Asked | None]]
    keeps: object = None


class _Kind:
    """One kind of calls, with what each thread counted in each module, so that no thread waits."""

    __slots__ = ("_advised", "asked", "is_stock", "keeps", "places", "traced")

    def __init__(self, seen: Seen) -> None:
        self.traced, self.asked = seen.describe()
        self.is_stock, self.keeps = seen.is_stock, seen.keeps
        self.places: dict[Where, dict[int, Tally]] = {}
        self._advised: TracedCall | None = None

    @property
    def advised(self) -> TracedCall:
        """What it is, with predicted times and faster backends, which are found out once."""
        if self._advised is None:
            self._advised = (
                self.traced
                if self.asked is None
                else faster.advised(self.traced, self.asked, is_stock=self.is_stock)
            )
        return self._advised


class Recorder:
    """What one trace counted."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._kinds: dict[object, _Kind] = {}
        self._places = 0
        self._left_out: dict[int, int] = {}
        self._pending = Pending()

    def tally(self, seen: Seen, where: Where) -> Tally | None:
        """Return what this thread counts of a kind in a module; None where there is no room for another."""
        if seen.key not in self._kinds and len(self._kinds) < KINDS_KEPT:
            self._kinds.setdefault(seen.key, _Kind(seen))
        tally = self.tally_again(seen.key, where)
        if tally is None:
            thread = get_ident()
            self._left_out[thread] = self._left_out.get(thread, 0) + 1
        return tally

    def tally_again(self, key: object, where: Where) -> Tally | None:
        """Return the same of a kind that was seen before; None where there was no room for it."""
        kind = self._kinds.get(key)
        tallies = None if kind is None else kind.places.get(where)
        if tallies is None and kind is not None and self._places < PLACES_KEPT:
            self._places += 1
            tallies = kind.places.setdefault(where, {})
        if tallies is None:
            return None
        thread = get_ident()
        return tallies.get(thread) or tallies.setdefault(thread, Tally())

    def add_time(self, tally: Tally, direction: Direction, first: Any, last: Any) -> None:
        """Add the time between two moments of `clocks.moment`."""
        if first is None or last is None:
            return
        if isinstance(first, float):
            tally.add(direction, 1e3 * (last - first))
        else:
            self._pending.add(first, last, tally, direction)

    @property
    def left_out(self) -> int:
        """How many calls found no room."""
        return sum(list(self._left_out.values()))

    @property
    def hosts(self) -> dict[str, Host]:
        """The machine behind each device."""
        kinds = list(self._kinds.values())
        return {kind.traced.device: kind.asked.host for kind in kinds if kind.asked is not None}

    def calls(self, *, is_stock: bool) -> tuple[TracedCall, ...]:
        """Return each kind with its sums, those that ran most often first."""
        merged: dict[TracedCall, dict[Where, list[Tally]]] = {}
        for kind in list(self._kinds.values()):
            if kind.is_stock is is_stock:
                into = merged.setdefault(kind.advised, {})
                for where, tallies in list(kind.places.items()):
                    into.setdefault(where, []).extend(map(self._pending.read, tallies.copy().values()))
        found = [_total(traced, places) for traced, places in merged.items()]
        return tuple(sorted(found, key=lambda traced: (-(traced.count or 0), traced.line, traced.backend)))


ACTIVE: list[Recorder] = []
"""Those whose blocks are entered, each as often as it was."""


def record(seen: Seen, run: Callable[[], Output]) -> Output:
    """Run a call, and count it in every active trace; one that raises is not counted.

    A checkpoint's recompute ends with an error of its own inside of its last call, behind the kernel.
    """
    if seen.how == "compiled":
        output = run()
        traced_in = where_traced()
        if traced_in is not None:
            list(_count(seen, traced_in))
        return output
    where, first = where_called(), moment(seen.query)
    try:
        with _range(seen.label):
            output = run()
    except Exception as error:
        if type(error).__name__ == _RECOMPUTED:
            list(_count(seen, where))
        raise
    last = moment(seen.query)
    for recorder, tally in _count(seen, where):
        recorder.add_time(tally, "forward", first, last)
    if seen.inputs is not None and output[0].requires_grad:
        watch(output[0], seen.inputs, _backward(seen, where))
    return output


def _range(label: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(label) if label else nullcontext()


def _count(seen: Seen, where: Where) -> Iterator[tuple[Recorder, Tally]]:
    is_recompute = torch._C._current_graph_task_id() >= 0
    for recorder in dict.fromkeys(ACTIVE):
        tally = recorder.tally(seen, where)
        if tally is not None:
            tally.count += 1
            tally.recomputed += is_recompute
            yield recorder, tally


def _backward(seen: Seen, where: Where) -> Watch:
    """Return what counts backward passes through a call in the traces that are active then and saw it."""
    # No more of what was seen: its description has the tensors of the call, which autograd or a checkpoint
    # would free.
    key = seen.key
    saw = tuple(dict.fromkeys(ACTIVE))

    def tallies() -> Iterator[tuple[Recorder, Tally]]:
        for recorder in saw:
            if recorder in ACTIVE and (tally := recorder.tally_again(key, where)) is not None:
                yield recorder, tally

    def entered() -> None:
        for _, tally in tallies():
            tally.backward += 1

    def ended(first: Any, last: Any) -> None:
        for recorder, tally in tallies():
            recorder.add_time(tally, "backward", first, last)

    return Watch(seen.query, entered, ended)


def _total(traced: TracedCall, places: dict[Where, list[Tally]]) -> TracedCall:
    """Return a kind with the sums of all threads."""
    is_counted = traced.how != "compiled"
    found = []
    for where, tallies in places.items():
        count, backward = sum(t.count for t in tallies), sum(t.backward for t in tallies)
        forward_ms, backward_ms = (sum(t.forward_ms for t in tallies), sum(t.backward_ms for t in tallies))
        found.append(
            Place(
                model=where.model,
                module=where.module,
                count=count if is_counted else None,
                recomputed=sum(t.recomputed for t in tallies) if is_counted else 0,
                backward=backward,
                forward_ms=forward_ms if traced.how == "eager" else None,
                backward_ms=backward_ms if backward else None,
                longest_ms=max(t.longest_ms for t in tallies) if traced.how == "eager" else None,
            )
        )
    whole = sum(place.count or 0 for place in found) if is_counted else None
    return traced.changed(places=tuple(found), count=whole)


def traced_call(problem: Problem, call: Call, backend: str, how: How) -> TracedCall:
    """Return one kind of calls, without counts."""
    kind, index = problem.device
    tensors = (problem.query, problem.key, problem.value)
    return TracedCall(
        line=render(call),
        device=kind if index is None else f"{kind}:{index}",
        backend=backend,
        how=how,
        memory=() if problem.transform is not None else tuple(_order(tensor) for tensor in tensors),
        clock="device" if problem.query.is_cuda else "host",
    )


def _order(tensor: Tensor) -> str:
    """Return the dimensions (batch, heads, tokens, features), the outermost in memory first."""
    steps = dict(zip("bhsd", map(size_hint, tensor.stride()), strict=True))
    # One of size one, or one that is expanded, lies anywhere.
    placed = [n for n, size in zip("bhsd", tensor.shape, strict=True) if size_hint(size) > 1 and steps[n]]
    placed.sort(key=lambda name: -steps[name])
    for usual in ("bhsd", "bshd"):
        if [name for name in usual if name in placed] == placed:
            return usual
    return "".join([*(name for name in "bhsd" if name not in placed), *placed])
