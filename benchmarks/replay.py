"""Asks the engine for every recorded call and reads what its choice took: the price of a ranking.

python -m benchmarks.replay [--part unseen] [--source h200] [--by mask] [--worst 10]
python -m benchmarks.replay --file sweep/sweep.json   # of a sweep that is not committed

A call is decided on the machine that measured it, with every package that was there and with torch alone. A
backend without a time is banned, because it cannot be compared.

Beside stock it is the kernel that counts, since that is what a ranking chooses: stock's time is that of its
kernel as `attention()` would call it. Where the choice is that very kernel, neither is faster. Elsewhere
stock's host time counts with what `attention()` itself added to it on the day of measuring, the median over
calls of the file that ran stock's kernel; `host_times.py` measures what that is today.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, get_args

from attnroute.engine.select import Selection, select
from attnroute.engine.stock import predict
from attnroute.question.host import Host
from attnroute.question.line import render
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks.kinds import BY
from benchmarks.recorded import Part, Record, records, swept, untimed

Packages = Literal["everything", "torch alone"]
TOLERATED = 1.02
"""Two runs of one kernel differ by so much."""
SHARED = frozenset({"align_bias", "cast_mask", "materialize_mask", "pad_head_dim"})
"""Repairs that are made for stock attention too, by torch or by whoever calls it with a mask tensor."""


class Choice(NamedTuple):
    """What the engine chooses for a recorded call, and what that costs.

    Attributes:
        record: The call and its times.
        packages: What was installed.
        selected: The choice.
        best: The fastest backend that may run and was right.
        regret: Time of the choice over the best one's.
        stock: Time of the choice over that of stock's kernel as `attention()` would call it; None where stock
            cannot say the call or was wrong.
        options: How many backends were timed, were right and may run.
    """

    record: Record
    packages: Packages
    selected: str
    best: str
    regret: float
    stock: float | None
    options: int

    @property
    def id(self) -> str:
        """The record's name, and what was installed."""
        return f"{self.record.id}, {self.packages}"

    @property
    def speed_up(self) -> float | None:
        """Stock attention's time, as it was measured, over that of the choice."""
        stock = self.record.stock
        return None if stock is None or self.stock is None else stock.total_ms / self.took_ms

    @property
    def took_ms(self) -> float:
        """What the choice took."""
        return self.record.times[self.selected].total_ms

    @property
    def ours(self) -> float | None:
        """Time of `attention()` on the day of measuring over the best one's, with what was installed then."""
        ours, best = self.record.ours, self.record.times[self.best]
        return None if ours is None or self.packages != "everything" else ours.total_ms / best.total_ms

    @property
    def text(self) -> str:
        """The choice in one line."""
        took = {name: self.record.times[name].total_ms for name in (self.selected, self.best)}
        times = f"{self.selected} {took[self.selected]:.3f} ms, {self.best} {took[self.best]:.3f} ms"
        stock = "" if self.stock is None else f", {self.stock:.2f} of stock"
        line = render(self.record.call)
        return f"{self.regret:6.2f}{stock}: {times}: {self.id}{'' if line in self.id else f': {line}'}"


def host_of(record: Record, packages: Packages) -> Host:
    """Return the machine of a record with these packages."""
    return record.host if packages == "everything" else record.torch_alone


def choose(record: Record, packages: Packages) -> Choice | None:
    """Return the choice for a record; None where no backend that was timed may run.

    Raises:
        ValueError: The choice was measured and gave a wrong result.
    """
    tables = load()
    host = host_of(record, packages)
    untimed = tuple(backend for backend in tables.backends if backend not in record.times)
    # What `decide` describes, without its sentences.
    selection = select(record.call, host, tables, Policy(ban=untimed))
    right = {n: t.total_ms for n in selection.order if (t := record.times[n]).is_right}
    if selection.selected is None:
        return None
    if selection.selected not in right:
        msg = f"{selection.selected} is selected for {record.id} and was wrong there."
        raise ValueError(msg)
    took = right[selection.selected]
    best = min(right, key=right.__getitem__)
    stock = _over_stock(record, selection, took) if record.stock and record.stock.is_right else None
    return Choice(record, packages, selection.selected, best, took / right[best], stock, len(right))


def _over_stock(record: Record, selection: Selection, took: float) -> float:
    if runs_stock(record, selection):
        return 1.0
    assert record.stock is not None
    host_ms = (record.stock.host_us or 0.0) / 1e3
    called = host_ms + added_us(record.source, record.call.phase) / 1e3 if host_ms else 0.0
    return took / max(record.stock.total_ms, called)


def runs_stock(record: Record, selection: Selection) -> bool:
    """Return whether the choice is the kernel that stock runs, prepared as stock or its caller does."""
    selected = selection.selected
    if selected is None or not SHARED.issuperset(selection.judgements[selected].repairs):
        return False
    return predict(record.call, record.host, load()).backend == selected


@cache
def added_us(source: str, phase: str) -> float:
    """Return what `attention()` added to the host's time of stock's kernel when a file was measured."""
    found = []
    for record in records():
        if (record.source, record.call.phase) == (source, phase) and record.stock and record.stock.host_us:
            named = record.times.get(predict(record.call, record.host, load()).backend)
            if named and named.host_us and not record.call.mask and record.call.bias is None:
                found.append(named.host_us - record.stock.host_us)
    return median(found) if found else 0.0


def choices(packages: Packages, found: Iterable[Record] | None = None) -> tuple[Choice, ...]:
    """Return the choices for records, all by default, where there was anything to choose."""
    made = (choose(record, packages) for record in (records() if found is None else found))
    return tuple(choice for choice in made if choice is not None and choice.options > 1)


class Summary(NamedTuple):
    """What choices cost together.

    Attributes:
        calls: How many there are.
        mean: Geometric mean of their regrets.
        worst: The largest.
        slower: How many take more than `TOLERATED` of stock attention's time.
        with_stock: How many stock attention can say.
    """

    calls: int
    mean: float
    worst: float
    slower: int
    with_stock: int


def summary(made: Iterable[Choice]) -> Summary:
    """Sum up choices."""
    regrets, stock = [], []
    for choice in made:
        regrets.append(choice.regret)
        if choice.stock is not None:
            stock.append(choice.stock)
    slower = sum(ratio > TOLERATED for ratio in stock)
    return Summary(len(regrets), mean(regrets), max(regrets, default=math.nan), slower, len(stock))


def mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean; NaN of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def report(made: Iterable[Choice], *, worst: int, by: str = "source") -> str:
    """Return choices as text: sums by file or kind and by part, and the worst calls.

    Args:
        made: The choices.
        worst: How many of the worst are listed.
        by: `source`, or a name of `benchmarks.kinds.BY`.
    """
    made = tuple(made)
    groups: dict[tuple[str, str], list[Choice]] = defaultdict(list)
    for choice in made:
        name = choice.record.source if by == "source" else BY[by](choice.record.call)
        for key in (name, choice.record.part), ("~ all", choice.record.part):
            groups[key].append(choice)
    lines = [
        f"{'':34}{'part':8}{'calls':>6}{'mean':>8}{'worst':>8}{'that day':>10}  over {TOLERATED} of stock"
    ]
    for (name, part), group in sorted(groups.items()):
        calls, average, most, slower, with_stock = summary(group)
        then = mean(choice.ours for choice in group if choice.ours is not None)
        lines.append(
            f"{name:34}{part:8}{calls:6}{average:8.3f}{most:8.2f}"
            f"{'-' if math.isnan(then) else f'{then:.3f}':>10}{slower:6} of {with_stock}"
        )
    lines += [choice.text for choice in sorted(made, key=lambda choice: -choice.regret)[:worst]]
    return "\n".join(lines)


def main() -> None:
    """Print what today's choices cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="of sweep.py, in place of the committed ones")
    parser.add_argument("--part", choices=get_args(Part), help="only these calls")
    parser.add_argument("--source", default="", help="files whose names contain this")
    parser.add_argument("--by", choices=("source", *BY), default="source")
    parser.add_argument("--worst", type=int, default=10)
    options = parser.parse_args()
    given = swept(options.file) if options.file else records()
    found = [r for r in given if options.source in r.source and options.part in (None, r.part)]
    for packages in get_args(Packages):
        print(f"\n{packages}\n{report(choices(packages, found), worst=options.worst, by=options.by)}")
    if options.file:
        wrong = Counter(name for r in found for name, time in r.times.items() if not time.is_right)
        print("\nresults far from the others':", dict(wrong))
        print("without a time:", {" ".join(key): count for key, count in untimed(options.file).items()})


if __name__ == "__main__":
    main()
