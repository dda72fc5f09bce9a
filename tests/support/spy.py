"""See which attention operator really ran, and hold it against the tables' names for a backend."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute.api import choices
from attnroute.tables.load import load

_MARK = "profiler::_record_function_enter_new"
ALL_SCORES = {"aten::bmm", "aten::softmax", "aten::_softmax", "aten::_safe_softmax"}
"""Operators that hold all scores at once: what FlexAttention runs where it is not compiled."""


class Spy(TorchDispatchMode):
    """Collect the names of operators and of our own marks while the mode is active."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        self.seen.append(args[0] if name == _MARK else name)
        return func(*args, **(kwargs or {}))

    @property
    def backends(self):
        """Return every backend whose operators appeared."""
        return {
            backend
            for backend, info in load().backends.items()
            if any(operator in self.seen for operator in info.operators)
        }


@contextmanager
def ran(backend):
    """Fail unless exactly this backend's operators ran inside the block."""
    spy = Spy()
    with spy:
        yield spy
    assert spy.backends == {backend}, (
        f"{backend} was named, {sorted(spy.backends)} ran: {sorted(set(spy.seen))}"
    )


@contextmanager
def profiled(backend):
    """As `ran`, by the profiler: compiled calls cannot run under a dispatch mode.

    Fails also where flex holds all scores at once, as it does uncompiled.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events torch 2.11 warns at the first profile of a process.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield profile
    seen = {event.key for event in profile.key_averages()}
    backends = {name for name, info in load().backends.items() if seen.intersection(info.operators)}
    assert backends == {backend}, f"{backend} was named, {sorted(backends)} ran: {sorted(seen)}"
    assert backend != "flex" or not seen & ALL_SCORES, f"uncompiled: {sorted(seen & ALL_SCORES)} ran"


def allocated(function):
    """Return the largest allocation and the peak, in bytes of the CPU, while `function` runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(sizes), max(accumulate(sizes))


def operators_of(function):
    """Return what `function` returns and the backends that ran in it."""
    spy = Spy()
    with spy, torch.enable_grad():
        result = function()
    return result, spy.backends


def decided_calls(monkeypatch):
    """Return a list that gets each call for which a backend is chosen or a decision is made to be read."""
    found = []

    def watch(name):
        function = getattr(choices, name)

        def watched(*args, **kwargs):
            found.append(args[0])
            return function(*args, **kwargs)

        monkeypatch.setattr(choices, name, watched)

    watch("select")
    watch("decide")
    return found
