"""Explains each recorded call whose choice breaks a bound of the replay, as the model of costs tells it.

python -m benchmarks.shortfall           # writes results/replay-shortfall.md
python -m benchmarks.shortfall --check   # fails where the file is not what today's choices give
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Final, NamedTuple, get_args

from attnroute.engine.rank import time_ms
from attnroute.engine.select import Judgement, Selection, select
from attnroute.engine.stock import predict
from attnroute.question.line import render
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks.recorded import RESULTS, Record, Time
from benchmarks.replay import TOLERATED, Choice, Packages, choices, host_of

FILE: Final = RESULTS / "replay-shortfall.md"
WORST: Final = 1.15
"""What a choice may take of the best one's time: the same call differs by a tenth between runs."""
NEAR: Final = 0.1
"""Up to this error of the logarithm a prediction is right: runs differ by as much."""
CAUSES: Final = {
    "noise": "stock's kernel, measured twice in that run, differs by as much",
    "fastest": "the choice is the fastest; stock was given mask and bias as tensors, made and cleared before",
    "untimed": "no time is predicted, so preferences chose",
    "memory": "the best builds a mask that takes more memory than the call, so it stands behind",
    "values": "ranked by rounded lengths, not by those in the mask; by those of the call the order is right",
    "near": "both predictions are right within 10 %, and nearer to each other than that",
    "choice, host": "the host takes longer for the choice than predicted",
    "choice, device": "the choice takes the device longer than predicted",
    "choice, time": "the choice takes longer than predicted",
    "best, host": "the host takes less for the best than predicted",
    "best, device": "the best takes the device less than predicted",
    "best, time": "the best takes less than predicted",
}
"""Why a choice is not the best, in the order in which it is asked."""
HEAD: Final = """# Calls whose choice breaks a bound of the replay

Written by `python -m benchmarks.shortfall`; a test fails where it is not what today's choices give. A row is
a recorded call whose choice takes more than {worst} of the fastest backend's time, or more than {tolerated}
of the time of stock's kernel as `attention()` would call it (`python -m benchmarks.replay`). Times are
milliseconds; predicted ones are those at the lengths of the call. What files of the H100 and the grids do not
tell apart, host and device, is one time here.

| cause | {installed} |
| --- | {lines} |
"""


class Shortfall(NamedTuple):
    """A choice that breaks a bound.

    Attributes:
        choice: The choice.
        rival: What it is held against: the best backend, or stock's kernel where the choice is the best.
        cause: A name of `CAUSES`.
        why: The cause with its numbers.
    """

    choice: Choice
    rival: str
    cause: str
    why: str


def breaks(choice: Choice) -> bool:
    """Return whether a choice breaks a bound."""
    return choice.regret > WORST or is_slower(choice)


def is_slower(choice: Choice) -> bool:
    """Return whether a choice takes longer than stock's kernel."""
    return choice.stock is not None and choice.stock > TOLERATED


def shortfalls(packages: Packages) -> list[Shortfall]:
    """Return the choices that break a bound, the furthest behind first."""
    found = [_explained(choice) for choice in choices(packages) if breaks(choice)]
    return sorted(found, key=lambda each: -max(each.choice.regret, each.choice.stock or 0.0))


def _explained(choice: Choice) -> Shortfall:
    record, host = choice.record, host_of(choice.record, choice.packages)
    selection = select(record.call, host, load(), Policy())
    rival = choice.best
    if rival == choice.selected:
        kernel = predict(record.call, host, load()).backend
        rival = kernel if kernel in record.times else rival
    cause = _cause(choice, rival, selection)
    parts = [_beside(name, selection, record.times[name]) for name in dict.fromkeys((choice.selected, rival))]
    return Shortfall(choice, rival, cause, "; ".join([CAUSES[cause], *parts]))


def _cause(choice: Choice, rival: str, selection: Selection) -> str:
    selected, other = (selection.judgements[name] for name in (choice.selected, rival))
    behind = max(choice.regret, choice.stock or 0.0)
    if behind <= _noise(choice.record, selection):
        return "noise"
    if choice.regret <= TOLERATED:
        return "fastest"
    if selected.standing.time_ms is None or other.standing.time_ms is None:
        return "untimed"
    if other.standing.builds and not selected.standing.builds:
        return "memory"
    own, its = _exact_ms(selected), _exact_ms(other)
    if its < own:
        return "values"
    took, best = choice.record.times[choice.selected], choice.record.times[rival]
    longer, shorter = math.log(took.total_ms / own), math.log(its / best.total_ms)
    if max(longer, shorter) <= NEAR:
        return "near"
    who, time = ("choice", took) if longer >= shorter else ("best", best)
    return f"{who}, {_part(time)}"


def _part(time: Time) -> str:
    if time.host_us is None or time.device_ms is None:
        return "time"
    return "host" if time.host_us / 1e3 > time.device_ms else "device"


def _noise(record: Record, selection: Selection) -> float:
    """Return how far two times of stock's kernel in one run are apart: called by stock, and by its name."""
    kernel = predict(record.call, selection.host, load()).backend
    named, stock = record.times.get(kernel), record.stock
    if named is None or stock is None or selection.judgements[kernel].repairs:
        return 1.0
    one, other = (t.device_ms or t.total_ms for t in (named, stock))
    return max(one / other, other / one)


def _exact_ms(judgement: Judgement) -> float:
    cost = judgement.cost
    return math.inf if cost is None else time_ms(cost, judgement.form.call)


def _beside(backend: str, selection: Selection, took: Time) -> str:
    """Say what was predicted of a backend and what it took, of host and device where a file tells both."""
    judgement = selection.judgements[backend]
    cost, after = judgement.cost, f" after {', '.join(judgement.repairs)}" if judgement.repairs else ""
    if cost is None:
        return f"{backend}{after} took {_ms(took.total_ms)}"
    if took.host_us is None or took.device_ms is None:
        return f"{backend}{after}: predicted {_ms(_exact_ms(judgement))}, took {_ms(took.total_ms)}"
    host, device = took.host_us / 1e3, took.device_ms
    return (
        f"{backend}{after}: host predicted {_ms(cost.host_ms)}, took {_ms(host)}, "
        f"device predicted {_ms(cost.device_ms)}, took {_ms(device)}"
    )


def _ms(value: float) -> str:
    return f"{value:.3g}"


def text() -> str:
    """Return the file."""
    installed = get_args(Packages)
    found = {packages: shortfalls(packages) for packages in installed}
    counts = {packages: Counter(each.cause for each in found[packages]) for packages in installed}
    head = HEAD.format(
        worst=WORST,
        tolerated=TOLERATED,
        installed=" | ".join(installed),
        lines=" | ".join(["--:"] * len(installed)),
    )
    sums = [
        f"| {sentence} | {' | '.join(str(counts[packages][cause]) for packages in installed)} |"
        for cause, sentence in CAUSES.items()
        if any(count[cause] for count in counts.values())
    ]
    parts = [head + "\n".join(sums)]
    for packages in installed:
        title = f"## {packages.capitalize()}: {len(found[packages])} of {len(choices(packages))} calls"
        lines = ["| call, file, part | over best | over stock | selected | best | why |"]
        lines.append("| --- | --: | --: | --- | --- | --- |")
        parts.append("\n".join([title, "", *lines, *map(_row, found[packages])]))
    return "\n\n".join(parts) + "\n"


def _row(each: Shortfall) -> str:
    choice, record = each.choice, each.choice.record
    selected, best = (
        f"`{name}` {_ms(record.times[name].total_ms)}" for name in (choice.selected, choice.best)
    )
    stock = "-" if choice.stock is None else f"{choice.stock:.2f}"
    call = f"`{render(record.call)}`, {record.source}, {record.part}"
    return f"| {call} | {choice.regret:.2f} | {stock} | {selected} | {best} | {each.why} |"


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the file is not current"
    )
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        raise SystemExit(f"{FILE.name} is not current: run `python -m benchmarks.shortfall`.")


if __name__ == "__main__":
    main()
