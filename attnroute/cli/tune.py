"""`attnroute tune`: measure the calls of a run on this machine, and choose by that from now on."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnroute.cli._host import probed
from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, quoted
from attnroute.report.layout import WIDTH
from attnroute.report.sentences import host_line
from attnroute.settings import current, policy_of
from attnroute.tables.load import load

if TYPE_CHECKING:
    from attnroute.api.recording import Recording
    from attnroute.api.tuned import TunedCall
    from attnroute.question.host import Host
    from attnroute.tuning.tune import Task, Tuner

CALLS_FILE: Final = "attnroute-calls.json"
"""Where the calls are read from, in the current folder."""
FOUND_WRONG: Final = 1
INTERRUPTED: Final = 130


def run(words: list[str]) -> int:
    """Measure, and print what changed; 1 where a backend gave a wrong result, 130 where the user ended it."""
    args = _parser().parse_args(words)
    policy = policy_of("--backends", allow=_names(args.backends)) if args.backends else None
    probed(load(current().tables))
    from attnroute.api.recording import Recording
    from attnroute.api.tuned import identity_of, path_for
    from attnroute.tuning.tune import Tuner, lines_of

    recording = Recording.from_file(args.calls)
    device, tasks = _tasks(recording)
    host = _host(device)
    print(f"on {host_line(host)}")
    if args.dry_run:
        print(*lines_of(tasks), sep="\n")
        return 0
    path = args.out or path_for(identity_of(host))
    allowed = frozenset(policy.allow or ()) if policy is not None else frozenset()
    tuner = Tuner(path, host, allowed, args.margin, args.seconds, say=_say)
    try:
        tuner.run(tasks)
    except KeyboardInterrupt:
        print(f"interrupted; {path} has what was measured, and the next run goes on from there")
        return INTERRUPTED
    finally:
        _summary(tuner, tasks)
    return FOUND_WRONG if any(tuned.wrong for tuned in _found(tuner, tasks)) else 0


def _parser() -> Parser:
    parser = Parser(
        "tune",
        "Measure the calls of a run on this machine, on every backend that may run them and is right.\n"
        "Processes that begin later choose by these times; ATTNROUTE_TUNING=off turns it off.",
    )
    parser.add_argument(
        "--calls", type=Path, default=Path(CALLS_FILE), metavar="FILE", help=f"by default {CALLS_FILE}"
    )
    parser.add_argument("--backends", metavar="A,B", help="only these, and what would be selected without")
    parser.add_argument(
        "--seconds", type=_number, default=math.inf, metavar="N", help="begin no call after so many"
    )
    parser.add_argument(
        "--margin",
        type=_share,
        default=0.03,
        metavar="SHARE",
        help="by which share of its time another backend must be faster than the one before; 0.03",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the user's data folder by default")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _number(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"requires a number of at least 0; got {quoted(text)}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"requires a share between 0 and 1; got {quoted(text)}")
    return value


def _tasks(recording: Recording) -> tuple[str, list[Task]]:
    """Return the device that is measured, a GPU where its calls were recorded and one is here, and its calls.

    Raises:
        ArgumentError: No call can be measured here.
    """
    import torch

    from attnroute.tuning.tune import tasks_of

    recorded = {traced.device.partition(":")[0] for traced in recording.calls}
    here = [device for device in ("cuda", "cpu") if device in recorded]
    if "cuda" in here and not torch.cuda.is_available():
        print("calls of a CUDA device are left out, because torch sees none here")
        here.remove("cuda")
    if not here:
        raise ArgumentError(
            f"attnroute tune requires recorded calls of a device that is here; got {len(recording.calls)}"
            f" kinds of calls of {', '.join(sorted(recorded)) or 'no device'}; record them on this machine."
        )
    return here[0], tasks_of(recording.calls, here[0])


def _host(device: str) -> Host:
    import torch

    from attnroute.probes.torch_host import host_of

    index = torch.cuda.current_device() if device == "cuda" else None
    return host_of(device, index, load(current().tables).providers)


def _say(line: str) -> None:
    print(line, flush=True)


def _found(tuner: Tuner, tasks: list[Task]) -> list[TunedCall]:
    return [tuner.file.calls[task.key] for task in tasks if task.key in tuner.file.calls]


def _summary(tuner: Tuner, tasks: list[Task]) -> None:
    """Print what changed for each call, what it gains per run, and the sum."""
    from rich.console import Console
    from rich.table import Table

    from attnroute.tuning.tune import time_of

    table = Table(
        title="milliseconds of a call, and of all of them in the recorded run", title_justify="left"
    )
    for column in ("call", "count", "before", "after", "ms before", "ms after", "gain per run"):
        table.add_column(column, overflow="fold")
    total = 0.0
    for task in tasks:
        tuned = tuner.file.calls.get(task.key)
        if tuned is None:
            continue
        before, after = (tuned.times.get(name) for name in (tuned.before, tuned.after))
        gain = None
        if before is not None and after is not None and task.count is not None:
            gain = task.count * (time_of(before) - time_of(after))
            total += gain
        table.add_row(
            tuned.line,
            "not known" if task.count is None else str(task.count),
            tuned.before,
            tuned.after,
            *("none" if times is None else f"{time_of(times):.3g}" for times in (before, after)),
            "not known" if gain is None else f"{gain:.3g}",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 2 * WIDTH
    console.print(table)
    changed = sum(tuned.before != tuned.after for tuned in _found(tuner, tasks))
    print(
        f"{changed} of {len(_found(tuner, tasks))} kinds of calls get another backend: {total:.3g} ms per run"
    )
    print(f"in {tuner.path}")
