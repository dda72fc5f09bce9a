"""Reads every committed result that has times of several backends for one call, all in one form.

`records()` gives them; `python -m benchmarks.recorded` says how many there are in which file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnroute.question.call import Call, Strides
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.nodes import DocumentsNode
from benchmarks import recorded_h100 as h100

Part = Literal["fit", "unseen"]
RESULTS = Path(__file__).parent / "results"
WRONG = 0.05
"""A result whose relative error, or distance from the others', is larger is not right."""
SHORT_MS = 0.3
"""Of a call whose events are less apart, the grids count the wall clock where that says more."""
IN_A_ROW = 0.8
"""Of a training step's host time: in a row the next step begins while another thread hands over the backward
of the last. Rows of steps took 0.7 to 0.85 of it: the walls of the grids beside `package_host.py`."""
OF_TODAY = frozenset({"h200-torch2.11-sweep", "h200-torch2.11-models"})
"""Files whose host times are of today's code; they alone tell host and device apart."""
TORCH_ONLY = ("torch", "cuda", "cudnn", "triton")
"""The versions of a host that has torch and no other package with kernels."""


class Time(NamedTuple):
    """What one backend took for a call; None is what the file does not say.

    Attributes:
        total_ms: What an eager call takes, forward and backward: the larger of host and device.
        device_ms: Between CUDA events, forward and backward. Where the host is slower and did not run ahead,
            as in the grids and the files of the H100, it holds the host's gaps.
        forward_ms: Of `device_ms`.
        backward_ms: Of `device_ms`.
        host_us: Until an eager call returned, forward and backward, as in a row of them, in microseconds.
        first_ms: The first call, with what was loaded, compiled and planned for it.
        is_right: The result was near float64, or near the other backends' where nobody compared with that.
    """

    total_ms: float
    device_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    host_us: float | None = None
    is_right: bool = True
    first_ms: float | None = None


class Record(NamedTuple):
    """One call as it was measured.

    Attributes:
        source: The file in `results/`, without `.json`.
        name: The call's name in the file; unique there.
        host: Card and versions, as `decide` takes them.
        call: The call, as `attention()` described it.
        times: By backend.
        stock: `scaled_dot_product_attention`; None where it cannot say the call, or nobody timed it.
        ours: `attention()` as it chose on that day; None where nobody timed that.
        selected: What it chose on that day.
        part: Whether a fit may read it: a third, `unseen`, it may not.
    """

    source: str
    name: str
    host: Host
    call: Call
    times: dict[str, Time]
    stock: Time | None
    ours: Time | None
    selected: str | None
    part: Part

    @property
    def id(self) -> str:
        """The file and the name in it."""
        return f"{self.source} {self.name}"

    @property
    def torch_alone(self) -> Host:
        """The same machine with no package but torch."""
        versions = {name: v for name, v in self.host.versions.items() if name in TORCH_ONLY}
        return self.host.model_copy(update={"versions": versions})


def records() -> tuple[Record, ...]:
    """Return every record, by file."""
    return tuple(record for source, read in READERS.items() for record in read(source, load(source)))


def load(source: str) -> dict[str, Any]:
    """Return what a file in `results/` holds."""
    found: dict[str, Any] = json.loads((RESULTS / f"{source}.json").read_text(encoding="utf-8"))
    return found


def swept(path: Path) -> tuple[Record, ...]:
    """Return the records of a file of `sweep.py` that lies anywhere."""
    return tuple(_of_sweep(path.stem, json.loads(path.read_text(encoding="utf-8"))))


def untimed(path: Path) -> Counter[tuple[str, str]]:
    """Return how often each backend has a status in place of times in a file of `sweep.py`."""
    calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
    results = (item for call in calls for item in call["backends"].items())
    return Counter((name, result["status"]) for name, result in results if "status" in result)


def part_of(call: Call) -> Part:
    """Return the part of a call by a hash of its line, without what its tensors lie in and hold."""
    line = render(call.with_(strides=Strides())).replace(":finite", "")
    return "unseen" if hashlib.sha256(line.encode()).digest()[0] % 3 == 0 else "fit"


def _host(environment: Mapping[str, Any], packages: Mapping[str, str]) -> Host:
    """Return the machine of a file: all were measured on Hopper, with torch's own triton."""
    cudnn = int(environment["cudnn"])
    versions = {
        "torch": environment["torch"],
        "cuda": environment["cuda"],
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "triton": "3.6.0",
    }
    card = environment.get("card") or environment["gpu"]
    return Host(arch="sm_90", device_name=card, versions={**versions, **packages})


def _of_sweep(source: str, data: dict[str, Any]) -> Iterator[Record]:
    """Read a file of `sweep.py`: host and device apart, forward and backward apart."""
    host = _host(data["environment"], data["environment"]["packages"])
    for found in data["calls"]:
        if "line" not in found:  # Its tensors could not be made.
            continue
        times = {n: t for n, r in found["backends"].items() if (t := _of_step(r)) is not None}
        stock, ours = times.pop("stock", None), times.pop("auto", None)
        key = json.loads(found["key"])
        call = _steady(_counted(parse(found["line"]), key))
        # Two calls of one line differ in memory, which a line leaves out where no mask makes it matter.
        name = f"{render(call)} {key['memory']}"
        yield Record(source, name, host, call, times, stock, ours, found["selected"], found["part"])


def _steady(call: Call) -> Call:
    """Say of a call whose shape was timed again and again what `attention()` says of one that lasts."""
    return call.changed(context=call.context.changed(shapes_vary=False))


def _counted(call: Call, key: dict[str, Any]) -> Call:
    """Say how many sequences a ragged batch has: the batch of the sweep's key."""
    if call.layout != "thd":
        return call
    mask = (n.changed(count=key["batch"]) if isinstance(n, DocumentsNode) else n for n in call.mask)
    return call.changed(mask=tuple(mask))


def _of_step(found: dict[str, Any]) -> Time | None:
    """Return the time of one backend; None where it has a status instead."""
    if "status" in found or "fwd_ms" not in found:
        return None
    device = found["fwd_ms"] + found.get("bwd_ms", 0.0)
    # Calls of an older sweep, kept for their device times, have no host times.
    host_us = found.get("fwd_host_us")
    if host_us is not None and "bwd_ms" in found:
        host_us = IN_A_ROW * (host_us + found["bwd_host_us"])
    deviation = found.get("deviation", 0.0)
    return Time(
        max(device, (host_us or 0.0) / 1e3),
        device,
        found["fwd_ms"],
        found.get("bwd_ms"),
        host_us,
        not isinstance(deviation, str) and deviation <= WRONG,
        found["first_call_s"] * 1e3 if "first_call_s" in found else None,
    )


def _of_grid(source: str, data: dict[str, Any]) -> Iterator[Record]:
    """Read a grid: calls of known models, forward and backward together, and a row of calls with the host."""
    host = _host(data["environment"], data["environment"]["packages"])
    for found in data["calls"]:
        call = parse(found["line"])
        times = {name: _of_row(call, found, name) for name in found["ms"]}
        stock, ours = times.pop("stock", None), times.pop("ours")
        yield Record(source, found["name"], host, call, times, stock, ours, found["selected"], part_of(call))


def _of_fresh_grid(source: str, data: dict[str, Any]) -> Iterator[Record]:
    """Read the grid whose calls came after every fit: none may read it."""
    for record in _of_grid(source, data):
        yield record._replace(part="unseen")


def _of_row(call: Call, found: dict[str, Any], name: str) -> Time:
    device, wall = found["ms"][name], found["wall_ms"][name]
    total = max(device, wall) if device < SHORT_MS else device
    is_right = max(found["error"].get(name, [0.0])) <= WRONG
    # Where the host is slower, events are apart for its gaps too.
    says_device = call.phase == "inference" and device >= SHORT_MS
    return Time(total, device, device if says_device else None, is_right=is_right)


def _of_h100(source: str, data: dict[str, Any]) -> Iterator[Record]:
    """Read a file of the H100: total times of calls that are known by name."""
    host = _host(data.get("env") or data.get("environment") or h100.ENVIRONMENT, h100.packages(source, data))
    in_a_row = source == "h100-torch2.11-small-calls"
    for found in h100.READERS[source](data):
        call = parse(f"bf16 {found.line}")
        times = {
            name: Time(
                ms,
                None if in_a_row else ms,
                None if in_a_row or call.phase == "training" else ms,
                is_right=name not in found.wrong,
            )
            for name, ms in found.ms.items()
        }
        stock = times.pop("stock", None)
        yield Record(source, found.name, host, call, times, stock, None, found.selected, part_of(call))


READERS: dict[str, Callable[[str, dict[str, Any]], Iterator[Record]]] = {
    "h200-torch2.11-sweep": _of_sweep,
    "h200-torch2.11-models": _of_sweep,
    "h200-torch2.11-grid": _of_grid,
    "h200-torch2.11-grid-tokens": _of_grid,
    "h200-torch2.11-grid-fresh-after": _of_fresh_grid,
    **dict.fromkeys(h100.READERS, _of_h100),
}
"""What reads each file in `results/` that has times of several backends for one call."""


def main() -> None:
    """Print how many calls and times each file has."""
    found = records()
    for source in READERS:
        calls = [record for record in found if record.source == source]
        parts = Counter(record.part for record in calls)
        times = sum(len(record.times) for record in calls)
        print(f"{source:34}{len(calls):5} calls{times:6} times{parts['unseen']:5} unseen")


if __name__ == "__main__":
    main()
