"""How far two measurements of the same call are apart: what a comparison of two backends can tell.

Some calls are in several files of one card. What ranks backends is the ratio of two times of one run, so
that ratio is compared between the files.
Files differ in the day of our own code as well, which short calls feel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from attnroute.question.line import render
from attnroute.vocabulary import Phase
from benchmarks.recorded import Record, records

SHORT_MS: Final[dict[Phase, float]] = {"inference": 0.3, "training": 1.5}
"""Up to such a time the host may be what a call waits for."""
NEAR: Final = 2.0
"""A backend that takes longer than so many times the fastest is no rival."""
MOST: Final = 0.9
"""Share of the pairs that are no further apart than `Spread.most` says."""


class Spread(NamedTuple):
    """How far the ratio of two backends' times differs between files that have the same call.

    Attributes:
        pairs: How many pairs of times were compared.
        half: The factor that half of them stay below.
        most: That of nine in ten.
    """

    pairs: int
    half: float
    most: float


def is_short(record: Record, ms: float) -> bool:
    """Return whether the host may be what a call waits for that takes so long."""
    return ms < SHORT_MS[record.call.phase]


@cache
def spreads() -> dict[bool, Spread]:
    """Return how far ratios differ, of calls that are not short and of those that are."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for one, other in _pairs():
        names = sorted(_right(one).keys() & _right(other).keys())
        fastest = min((one.times[name].total_ms for name in names), default=0.0)
        rivals = [name for name in names if one.times[name].total_ms < NEAR * fastest]
        for first, second in combinations(rivals, 2):
            apart = abs(math.log(ratio(one, first, second) / ratio(other, first, second)))
            found[is_short(one, one.times[first].total_ms)].append(apart)
    return {
        short: Spread(len(apart), *(math.exp(float(q)) for q in np.quantile(apart, [0.5, MOST])))
        for short, apart in found.items()
    }


def ratio(record: Record, first: str, second: str) -> float:
    """Return the time of one backend over that of another."""
    return record.times[first].total_ms / record.times[second].total_ms


def again(record: Record, first: str, second: str) -> tuple[str, float] | None:
    """Return the file where the same call is measured again, and the least ratio of two backends there."""
    others = [
        (ratio(other, first, second), other.source)
        for other in _by_call()[_key(record)]
        if other.source != record.source and {first, second} <= _right(other).keys()
    ]
    if not others:
        return None
    least, source = min(others)
    return source, least


def _key(record: Record) -> tuple[str, str]:
    return render(record.call), record.host.device_name or ""


@cache
def _by_call() -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records():
        found[_key(record)].append(record)
    return found


def _pairs() -> Iterator[tuple[Record, Record]]:
    for its in _by_call().values():
        yield from ((one, other) for one, other in combinations(its, 2) if one.source != other.source)


def _right(record: Record) -> dict[str, float]:
    return {name: time.total_ms for name, time in record.times.items() if time.is_right}
