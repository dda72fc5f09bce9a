"""See which attention operator really ran, and hold it against the tables' names for a backend."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute.tables.load import load

_MARK = "profiler::_record_function_enter_new"


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


def operators_of(function):
    """Return what `function` returns and the backends that ran in it."""
    spy = Spy()
    with spy, torch.enable_grad():
        result = function()
    return result, spy.backends
