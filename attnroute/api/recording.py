"""What a trace recorded, as data and as a file: kinds of calls, modules that made them, counts and times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from attnroute._version import __version__
from attnroute.errors import argument_error, shortened
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.plain import Plain
from attnroute.report.json import lined
from attnroute.vocabulary import Repair

How = Literal["eager", "compiled", "captured"]
Order = Annotated[str, Field(pattern="^[bhsd]{4}$")]
Count = Annotated[int, Field(ge=0)]


class Place(Plain):
    """A module that made calls of one kind, with their counts and the sums of their times.

    Attributes:
        model: The class of the outermost module that was called; empty outside of modules.
        module: Its path inside of that, as "model.layers.3.self_attn".
        count: How many calls ran; None in a graph of torch.compile, which runs unseen.
        recomputed: How many of these a checkpoint made again in a backward pass.
        backward: How many backward passes went through such a call.
        forward_ms: What the calls took together, in milliseconds; None where it was not measured.
        backward_ms: The same of the backward passes.
        longest_ms: The longest of the calls: often the first, which may compile or plan its kernel.
    """

    model: str = ""
    module: str = ""
    count: Count | None = None
    recomputed: Count = 0
    backward: Count = 0
    forward_ms: float | None = None
    backward_ms: float | None = None
    longest_ms: float | None = None


class Faster(Plain):
    """A backend that is predicted to be faster than the one that ran, and did not run.

    Attributes:
        backend: Its name.
        predicted_ms: Its predicted time of one call.
        why_not: Why it was not taken.
        change: What would select it; empty where no single change does.
    """

    backend: str
    predicted_ms: float
    why_not: str
    change: str = ""


class TracedCall(Plain):
    """One kind of calls that a run made.

    Attributes:
        line: The call as `attnroute explain` reads it; empty for a call of torch's function that
            `attention()` does not know.
        device: "cpu" or "cuda:0", a key of `Recording.hosts`.
        backend: What ran it; of torch's function the kernel that torch selected.
        how: "eager"; "compiled": decided while torch.compile or torch.export traced; "captured": into a CUDA
            graph.
        count: How many calls ran; None where `how` is "compiled", because a graph runs unseen. A captured
            call counts once, however often its graph is replayed.
        memory: How the dimensions of query, key and value lie in memory, the outermost first: "bshd" has
            heads beside tokens, as models have them. Empty inside a transform.
        repairs: What was done to the call first.
        clock: What took the times: "device" has events on the stream around each call, "host" the clock of
            the CPU.
        predicted_ms: The predicted time of one call, forward and backward in training; None where nothing was
            measured that speaks about it.
        places: The modules that made these calls, in the order in which they made the first.
        faster: Backends that are predicted to be faster and did not run, the fastest first.
        routed: Of a call of torch's own function: what attnroute would have selected.
        unread: Why it has no line.
    """

    line: str
    device: str
    backend: str
    how: How = "eager"
    count: Annotated[int, Field(ge=1)] | None = None
    memory: tuple[Order, ...] = ()
    repairs: tuple[Repair, ...] = ()
    clock: Literal["device", "host"] = "host"
    predicted_ms: float | None = None
    places: tuple[Place, ...] = ()
    faster: tuple[Faster, ...] = ()
    routed: str | None = None
    unread: str = ""

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
        calls: Those of `attention()`, and those that `route_sdpa()` routed to it, the most frequent first.
        stock: Those of torch's scaled_dot_product_attention that ran as torch's own.
        left_out: How many calls are in neither, because their kinds were too many.
    """

    format: Literal[2] = 2
    attnroute: str = __version__
    hosts: dict[str, Host]
    calls: tuple[TracedCall, ...]
    stock: tuple[TracedCall, ...] = ()
    left_out: Count = 0

    def __str__(self) -> str:
        """Return the table that `attnroute run --trace` prints, in 80 columns."""
        from attnroute.api.recording_text import render_recording

        return render_recording(self)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file of calls.

        Raises:
            ArgumentError: There is none, or it is something else.
        """
        to_do = "record one with `attnroute run --out FILE script.py`"
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
        """Write the file, a line for each kind of calls.

        Raises:
            ArgumentError: It cannot be written.
        """
        data = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        data = {"format": self.format, "attnroute": self.attnroute, **data}
        try:
            path.write_text(lined(data, ("calls", "stock")), encoding="utf-8")
        except OSError as error:
            got = f"{shortened(str(path))} ({error.strerror or type(error).__name__})"
            raise argument_error("a file of calls", "a place to write to", got, "name another one") from error
