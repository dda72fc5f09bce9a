"""`attnroute.trace()`: which attention calls a run makes, in which module, on which kernel, for how long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attnroute import scopes
from attnroute.api import recorder, routes, stock_calls
from attnroute.api.faster import Asked
from attnroute.api.question import call_of
from attnroute.api.recorder import Recorder, Seen
from attnroute.api.recording import How, Recording, TracedCall
from attnroute.errors import argument_error
from attnroute.masks.tracing import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from attnroute.api.records import Output, Problem
    from attnroute.api.routes import Route


class Trace(scopes.Block):
    """What `trace()` returns: records while its block runs.

    What a graph of torch.compile or a CUDA graph runs is seen where it is made: begin the trace before.
    """

    maker = "trace"

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._recorder = Recorder()
        self._used = False

    def __enter__(self) -> Self:
        """Begin to record."""
        self._used = True
        routes.LISTENERS.append(_recorded)
        recorder.ACTIVE.append(self._recorder)
        stock_calls.see()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and write the file, also after an error.

        Raises:
            ArgumentError: The file cannot be written.
            OverrideError: The block was entered in another thread.
        """
        recorder.ACTIVE.remove(self._recorder)
        routes.LISTENERS.remove(_recorded)
        is_here = stock_calls.unsee()
        if self._path is not None:
            self.recording.save(self._path)
        if not is_here:
            raise scopes.left_elsewhere(self)

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        """The calls that attnroute ran so far, one entry for each kind, those that ran most often first."""
        return self._recorder.calls(is_stock=False)

    @property
    def stock(self) -> tuple[TracedCall, ...]:
        """The calls of torch's function that ran as torch's own so far, likewise."""
        return self._recorder.calls(is_stock=True)

    @property
    def recording(self) -> Recording:
        """All of it with the machine, as the file has it; `str()` of it is a table."""
        return Recording(
            hosts=self._recorder.hosts, calls=self.calls, stock=self.stock, left_out=self._recorder.left_out
        )

    def __str__(self) -> str:
        """Return the table of what was recorded so far."""
        return str(self.recording)


scopes.outside_of_graphs(Trace.__enter__)
scopes.outside_of_graphs(Trace.__exit__)


def trace(path: str | Path | None = None) -> Trace:
    """Record which attention calls run inside of a block: their modules, kernels, counts and times.

    ``with attnroute.trace() as trace:`` records, ``print(trace)`` shows a table, and ``trace.calls`` and
    ``trace.stock`` have the same as objects. Calls of `attention()` are seen from all threads, those of
    torch's scaled_dot_product_attention from the thread of the block. Times are those of the device where
    there is one. Code that torch.compile compiled before is compiled anew, so that its calls are seen.

    Args:
        path: Where to write the calls as JSON at the end of the block, for `attnroute tune` and other
            programs; None writes nothing.

    Raises:
        ArgumentError: `path` is no path.

    Warns:
        OverrideWarning: What was returned is dropped and never recorded anything.
    """
    if not (path is None or isinstance(path, str | Path)):
        raise argument_error("trace() path", "a path or None", type(path).__name__, "pass a string")
    return Trace(None if path is None else Path(path))


scopes.outside_of_graphs(trace)


def _recorded(route: Route, problem: Problem, run: Callable[[], Output]) -> Output:
    """Run a call of `attention()` along its route, and tell every trace of it."""
    how: How = "captured" if is_capturing(problem.query) else "eager"
    if problem.traced:
        how = "compiled"
    choice = route.choice
    is_plain = problem.transform is None and not problem.dispatch_mode
    seen = Seen(
        key=(id(route), how),
        is_stock=False,
        how=how,
        query=problem.query,
        inputs=_inputs(problem) if is_plain else None,
        label=f"attention: {choice.backend}" if is_plain else "",
        describe=lambda: _described(route, problem, how),
        # As long as it lives no other object has its id.
        keeps=route,
    )
    return recorder.record(seen, run)


def _inputs(problem: Problem) -> tuple[object, ...]:
    given = problem.given
    qkv = (given.query, given.key, given.value)
    return (*qkv, given.mask, given.bias, given.sink, given.alibi_slopes, *problem.captured)


def _described(route: Route, problem: Problem, how: How) -> tuple[TracedCall, Asked]:
    choice = route.choice
    recognize = choice.policy.recognize and problem.transform is None and not problem.traced
    call = call_of(problem, recognize=recognize, shapes_vary=choice.call.context.shapes_vary)
    traced = recorder.traced_call(problem, call, choice.backend, how).changed(repairs=choice.repairs)
    return traced, Asked(call, choice.host, choice.policy)
