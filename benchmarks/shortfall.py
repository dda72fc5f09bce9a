"""Explains each recorded call whose choice breaks a bound of the replay, as the model of costs tells it.

python -m benchmarks.shortfall           # writes results/replay-shortfall.md
python -m benchmarks.shortfall --check   # fails where the file is not what today's choices give
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from typing import Final, NamedTuple, get_args

from attnroute.engine.rank import time_ms
from attnroute.engine.select import Judgement, Selection, select
from attnroute.engine.stock import predict
from attnroute.question.line import render
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks.recorded import OF_TODAY, RESULTS, Part, Record, Time
from benchmarks.repeats import SHORT_MS, again, is_short, spreads
from benchmarks.replay import TOLERATED, Choice, Packages, choices, host_of

FILE: Final = RESULTS / "replay-shortfall.md"
WORST: Final = 1.15
"""What a choice may take of the best one's time before it is listed."""
NEAR: Final = 0.1
"""Up to this error of the logarithm a prediction is right: runs differ by as much."""
HOST_BOUND: Final = math.log(1.15)
"""From this error on the time of a short call in an older file is that of its day's host."""
OWN: Final = frozenset({"chunked", "flex"})
"""Kernels that are made here: older files have those of their day."""
CAUSES: Final = {
    "none": "the choice is the fastest, and no slower than stock's kernel",
    "fastest": "the choice is the fastest; stock was given mask and bias as tensors, made and cleared before",
    "noise": "stock's kernel, measured twice in that run, differs by as much",
    "again": "in another file the same call takes the choice no longer than the best",
    "short": "a call so short that files differ by as much: see the spread above",
    "repeat": "files that measured the same call differ by as much: see the spread above",
    "older host": "an older file: the choice took the host of its day longer than host or device take today",
    "older kernel": "an older file: the choice's kernel is made here, and was changed since",
    "untimed": "no time is predicted, so preferences chose",
    "memory": "the best builds a mask that takes more memory than the call, so it stands behind",
    "values": "ranked by rounded lengths, not by those in the mask; by those of the call the order is right",
    "near": "both predictions are right within 10 %, and nearer to each other than that",
    "choice, host": "the host takes longer for the choice than predicted",
    "choice, device": "the choice's kernel takes the device longer than predicted",
    "choice, repairs": "the choice with its repairs takes the device longer than predicted",
    "choice, time": "the choice takes longer than predicted",
    "best, host": "the host takes less for the best than predicted",
    "best, device": "the best's kernel takes the device less than predicted",
    "best, repairs": "the best with its repairs takes the device less than predicted",
    "best, time": "the best takes less than predicted",
}
"""Why a choice is not the best, in the order in which it is asked."""
HEAD: Final = """# Calls whose choice breaks a bound of the replay

Written by `python -m benchmarks.shortfall`; a test fails where it is not what today's choices give. A row is
a recorded call whose choice takes more than {worst} of the fastest backend's time, or more than {tolerated}
of the time of stock's kernel as `attention()` would call it (`python -m benchmarks.replay`). Times are
milliseconds; predicted ones are those at the lengths of the call. What files of the H100 and the grids do not
tell apart, host and device, is one time here.

How far two measurements are apart: some calls are in two files of one card. There the ratio of two backends'
times differs by up to {large.most:.2f} times in nine of ten of {large.pairs} pairs (half: {large.half:.2f}).
Of calls under {forward} ms, {training} ms in training, where the host's time counts, it is {small.most:.2f}
times in nine of ten of {small.pairs} (half: {small.half:.2f}).

Below, every choice counts, also those that break no bound: how many there are of each cause, and what they
add to the logarithm of the geometric mean of the choice's time over the best one's, in hundredths. Where
two backends are no further apart than two measurements are, these files do not tell which is the faster.

| cause | {columns} |
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
    found = [each for each in explained(packages) if breaks(each.choice)]
    return sorted(found, key=lambda each: -max(each.choice.regret, each.choice.stock or 0.0))


@cache
def explained(packages: Packages) -> tuple[Shortfall, ...]:
    """Return every choice with its cause, also those that break no bound."""
    return tuple(_explained(choice) for choice in choices(packages))


def _explained(choice: Choice) -> Shortfall:
    record, host = choice.record, host_of(choice.record, choice.packages)
    selection = select(record.call, host, load(), Policy())
    rival = choice.best
    if rival == choice.selected:
        kernel = predict(record.call, host, load()).backend
        rival = kernel if kernel in record.times else rival
    cause, more = _cause(choice, rival, selection)
    parts = [_beside(name, selection, record.times[name]) for name in dict.fromkeys((choice.selected, rival))]
    return Shortfall(choice, rival, cause, "; ".join([CAUSES[cause] + more, *parts]))


def _cause(choice: Choice, rival: str, selection: Selection) -> tuple[str, str]:
    """Return why a choice is not the best, and what is to be said besides."""
    record, behind = choice.record, max(choice.regret, choice.stock or 0.0)
    if choice.regret == 1.0 and not is_slower(choice):
        return "none", ""
    if behind <= _noise(record, selection):
        return "noise", ""
    if choice.regret <= TOLERATED and is_slower(choice):
        return "fastest", ""
    measured = again(record, choice.selected, rival)
    if measured is not None and measured[1] <= TOLERATED:
        return "again", f" ({measured[1]:.2f} of it in {measured[0]})"
    short = is_short(record, choice.took_ms)
    if choice.regret <= spreads()[short].most:
        return "short" if short else "repeat", ""
    return _misjudged(choice, rival, selection)


def _misjudged(choice: Choice, rival: str, selection: Selection) -> tuple[str, str]:
    """Return what of a decision is wrong, and by how much."""
    selected, other = (selection.judgements[name] for name in (choice.selected, rival))
    if selected.standing.time_ms is None or other.standing.time_ms is None:
        return "untimed", ""
    if other.standing.builds and not selected.standing.builds:
        return "memory", ""
    own, its = _exact_ms(selected), _exact_ms(other)
    if its < own:
        return "values", ""
    took, best = choice.record.times[choice.selected], choice.record.times[rival]
    longer, shorter = math.log(took.total_ms / own), math.log(its / best.total_ms)
    if choice.record.source not in OF_TODAY and longer > HOST_BOUND:
        if choice.selected in OWN or "backward_from_chunked" in selected.repairs:
            return "older kernel", _times(longer)
        if is_short(choice.record, took.total_ms):
            return "older host", _times(longer)
    if max(longer, shorter) <= NEAR:
        return "near", ""
    if longer >= shorter:
        return f"choice, {_part(took, selected)}", _times(longer)
    return f"best, {_part(best, other)}", _times(-shorter)


def _times(error: float) -> str:
    return f" ({math.exp(error):.2f} times)"


def _part(time: Time, judgement: Judgement) -> str:
    if time.host_us is None or time.device_ms is None:
        return "time"
    if time.host_us / 1e3 > time.device_ms:
        return "host"
    return "repairs" if judgement.stages.extra_bytes else "device"


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
    parts = [_head()]
    for packages in get_args(Packages):
        found = shortfalls(packages)
        title = f"## {packages.capitalize()}: {len(found)} of {len(explained(packages))} calls"
        lines = ["| call, file, part | over best | over stock | selected | best | why |"]
        lines.append("| --- | --: | --: | --- | --- | --- |")
        parts.append("\n".join([title, "", *lines, *map(_row, found)]))
    return "\n\n".join(parts) + "\n"


def by_cause(packages: Packages, part: Part) -> dict[str, list[Choice]]:
    """Return all choices of a part by cause."""
    found: dict[str, list[Choice]] = {cause: [] for cause in CAUSES}
    for each in explained(packages):
        if each.choice.record.part == part:
            found[each.cause].append(each.choice)
    return found


def share(its: list[Choice], calls: int) -> float:
    """Return what some of so many choices add to the logarithm of the geometric mean."""
    return sum(math.log(choice.regret) for choice in its) / calls


def _head() -> str:
    columns = [(packages, part) for packages in get_args(Packages) for part in get_args(Part)]
    found = [by_cause(*column) for column in columns]
    calls = [sum(map(len, causes.values())) for causes in found]
    spread = spreads()
    head = HEAD.format(
        worst=WORST,
        tolerated=TOLERATED,
        large=spread[False],
        small=spread[True],
        forward=SHORT_MS["inference"],
        training=SHORT_MS["training"],
        columns=" | ".join(f"{packages}, {part}" for packages, part in columns),
        lines=" | ".join(["--:"] * len(columns)),
    )
    rows = []
    for cause, sentence in CAUSES.items():
        if any(causes[cause] for causes in found):
            cells = [_cell(causes[cause], n) for causes, n in zip(found, calls, strict=True)]
            rows.append(f"| {sentence} | {' | '.join(cells)} |")
    sums = [
        _cell([c for its in causes.values() for c in its], n) for causes, n in zip(found, calls, strict=True)
    ]
    return head + "\n".join([*rows, f"| all | {' | '.join(sums)} |"])


def _cell(its: list[Choice], calls: int) -> str:
    return f"{len(its)}: {100 * share(its, calls):.2f}" if its else "-"


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
