"""`attnroute.trace()`: which calls a run makes, how often and on which backend; writes a file of calls."""

from __future__ import annotations

import json
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from attnroute._version import __version__
from attnroute.api import routes
from attnroute.api.question import call_of
from attnroute.errors import argument_error, shortened
from attnroute.masks.tracing import is_capturing, size_hint
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.plain import Plain
from attnroute.scopes import outside_of_graphs

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from attnroute.api.records import Problem
    from attnroute.api.routes import Route

How = Literal["eager", "compiled", "captured"]
Order = Annotated[str, Field(pattern="^[bhsd]{4}$")]


class TracedCall(Plain):
    """One kind of calls that a run made.

    Attributes:
        line: The call as `attnroute explain` reads it.
        device: "cpu" or "cuda:0", a key of `Trace.hosts`.
        backend: What ran it.
        how: "eager"; "compiled": decided while torch.compile or torch.export traced; "captured": into a CUDA
            graph.
        count: How many calls ran; None where `how` is "compiled", because a graph runs unseen. A captured
            call counts once, however often its graph is replayed.
        memory: How the dimensions of query, key and value lie in memory, the outermost first: "bshd" has
            heads beside tokens, as models have them. Empty inside a transform.
    """

    line: str
    device: str
    backend: str
    how: How = "eager"
    count: Annotated[int, Field(ge=1)] | None = None
    memory: tuple[Order, ...] = ()

    @property
    def call(self) -> Call:
        """The call as data.

        Raises:
            ArgumentError: The line is no call.
        """
        return parse(self.line)


class Recording(Plain):
    """What a run did: the content of a file of calls.

    Attributes:
        format: Of the file.
        attnroute: The version that wrote it.
        hosts: The machine behind each device.
        calls: Those that ran most often first.
    """

    format: Literal[1] = 1
    attnroute: str = __version__
    hosts: dict[str, Host]
    calls: tuple[TracedCall, ...]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file of calls.

        Raises:
            ArgumentError: There is none, or it is something else.
        """
        to_do = "record one with `attnroute trace -- python script.py`"
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
            for traced in found.calls:
                parse(traced.line)
        except OSError as error:
            got = f"{shortened(str(path))} ({error.strerror or type(error).__name__})"
        except (ValidationError, ValueError) as error:
            got = f"{shortened(str(path))} ({shortened(' '.join(str(error).split()))})"
        else:
            return found
        raise argument_error("a file of calls", "JSON as attnroute.trace() writes it", got, to_do)

    def save(self, path: Path) -> None:
        """Write the file, a line for each call.

        Raises:
            ArgumentError: It cannot be written.
        """
        data = self.model_dump(mode="json", exclude_none=True)
        calls = ",\n".join(json.dumps(call) for call in data.pop("calls"))
        text = f'{json.dumps(data, indent=1)[:-2]},\n "calls": [\n{calls}\n ]\n}}\n'
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            got = f"{shortened(str(path))} ({error.strerror or type(error).__name__})"
            raise argument_error("a file of calls", "a place to write to", got, "name another one") from error


class _Seen:
    """The calls along one route, counted by each thread for itself, so that none waits and none is lost."""

    __slots__ = ("counts", "host", "route", "traced")

    def __init__(self, route: Route, traced: TracedCall, host: Host) -> None:
        self.route = route  # As long as it lives no other object has its id.
        self.traced = traced
        self.host = host
        self.counts: dict[int, int] = {}

    def add(self) -> None:
        thread = get_ident()
        self.counts[thread] = self.counts.get(thread, 0) + 1

    @property
    def total(self) -> TracedCall:
        count = None if self.traced.how == "compiled" else sum(self.counts.copy().values())
        return self.traced.changed(count=count)


class Trace:
    """Records every `attention()` call of the process, from all threads, while its block runs.

    Calls outside of such a block pay nothing for it. What a graph of torch.compile or a CUDA graph runs is
    seen where it is made: begin the trace before.
    """

    def __init__(self, path: Path | None) -> None:
        """Begin nothing yet."""
        self._path = path
        self._seen: dict[tuple[int, How], _Seen] = {}

    def __enter__(self) -> Self:
        """Begin to record."""
        routes.LISTENERS.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """End, and write the file, also after an error."""
        routes.LISTENERS.remove(self._note)
        if self._path is not None:
            self.recording.save(self._path)

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        """What ran so far, one entry for each kind of calls, those that ran most often first."""
        by_kind = attrgetter("line", "device", "backend", "how", "memory")
        totals = sorted((seen.total for seen in list(self._seen.values())), key=lambda t: str(by_kind(t)))
        merged = [_merged(list(group)) for _, group in groupby(totals, key=by_kind)]
        return tuple(sorted(merged, key=lambda traced: -(traced.count or 0)))

    @property
    def recording(self) -> Recording:
        """The same with the machine, as the file has it."""
        hosts = {seen.traced.device: seen.host for seen in list(self._seen.values())}
        return Recording(hosts=hosts, calls=self.calls)

    def _note(self, route: Route, problem: Problem) -> None:
        how = _how(problem)
        seen = self._seen.get((id(route), how))
        if seen is None:
            made = _Seen(route, _described(route, problem, how), route.choice.host)
            seen = self._seen.setdefault((id(route), how), made)
        seen.add()


outside_of_graphs(Trace.__enter__)
outside_of_graphs(Trace.__exit__)


def trace(path: str | Path | None = None) -> Trace:
    """Record which `attention()` calls run inside of a block, and how often.

    ``with attnroute.trace("calls.json") as trace:`` writes a file that `attnroute tune` reads;
    ``trace.calls`` has the same as objects.

    Args:
        path: Where to write the calls at the end of the block; None writes nothing.

    Raises:
        ArgumentError: `path` is no path.
    """
    if not (path is None or isinstance(path, str | Path)):
        raise argument_error("trace() path", "a path or None", type(path).__name__, "pass a string")
    return Trace(None if path is None else Path(path))


outside_of_graphs(trace)


def _how(problem: Problem) -> How:
    if problem.traced:
        return "compiled"
    return "captured" if is_capturing(problem.query) else "eager"


def _described(route: Route, problem: Problem, how: How) -> TracedCall:
    policy = route.choice.policy
    recognize = policy.recognize and problem.transform is None and not problem.traced
    kind, index = problem.device
    varies = route.choice.call.context.shapes_vary
    tensors = (problem.query, problem.key, problem.value)
    return TracedCall(
        line=render(call_of(problem, recognize=recognize, shapes_vary=varies)),
        device=kind if index is None else f"{kind}:{index}",
        backend=route.choice.backend,
        how=how,
        memory=() if problem.transform is not None else tuple(_order(tensor) for tensor in tensors),
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


def _merged(alike: list[TracedCall]) -> TracedCall:
    counts = [traced.count for traced in alike]
    return alike[0].changed(count=None if None in counts else sum(count or 0 for count in counts))
