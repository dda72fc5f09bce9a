"""Says how far `attention()` is from the best backend and from stock attention in a file of `sweep.py`.

python benchmarks/sweep_report.py results/h200-torch2.11-sweep.json [--part unseen] [--worst 10]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sweep_calls import SweepCall, length_class, read

TOLERATED = 1.02
DEVIATES = 0.05
"""A result that is further from the others' is not a way to run the call."""


class Row(NamedTuple):
    """What one call says.

    Attributes:
        call: The call.
        line: The same in the words of `attnroute explain`.
        selected: What `attention()` chose.
        best: The fastest backend, stock attention among them.
        regret: Time of the selected backend over the best one's.
        auto: Time of `attention()` as it chooses over the best one's.
        stock: Time of `attention()` over stock attention's; None where that cannot say the call.
        ms: The best time.
    """

    call: SweepCall
    line: str
    selected: str
    best: str
    regret: float
    auto: float
    stock: float | None
    ms: float


def total_ms(result: dict[str, Any]) -> float | None:
    """Return what an eager call takes: the larger of its host time and its device time."""
    if "status" in result or "fwd_ms" not in result:
        return None
    device = result["fwd_ms"] + result.get("bwd_ms", 0.0)
    host = (result["fwd_host_us"] + result.get("bwd_host_us", 0.0)) / 1e3
    return max(device, host)


def _is_right(result: dict[str, Any]) -> bool:
    deviation = result.get("deviation", 0.0)
    return not isinstance(deviation, str) and deviation <= DEVIATES


def row_of(found: dict[str, Any]) -> Row | None:
    """Return what a call of the file says; None where its selected backend was not timed."""
    times = {n: t for n, r in found["backends"].items() if (t := total_ms(r)) is not None}
    selected = found.get("selected")
    if selected not in times or "auto" not in times:
        return None
    right = {n: t for n, t in times.items() if n != "auto" and _is_right(found["backends"][n])}
    right.setdefault(selected, times[selected])
    best = min(right, key=right.__getitem__)
    least = right[best]
    stock = times["auto"] / right["stock"] if "stock" in right else None
    auto, regret = times["auto"] / least, times[selected] / least
    return Row(read(found["key"]), found["line"], selected, best, regret, auto, stock, least)


def mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean; NaN of none."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _regime(call: SweepCall) -> str:
    if call.seqlen_q == call.seqlen_kv:
        return f"self, {length_class(call.seqlen_q)}"
    if call.seqlen_kv == 77:
        return "cross to 77 keys"
    return "decode" if call.seqlen_q <= 16 else "unequal"


KINDS: dict[str, Callable[[SweepCall], str]] = {
    "mask": lambda call: call.mask,
    "scores": lambda call: call.extra,
    "head dims": lambda call: "/".join(map(str, dict.fromkeys(call.dims))),
    "direction": lambda call: call.phase,
    "memory": lambda call: "thd" if call.is_thd else call.memory,
    "heads": lambda call: "MQA" if call.heads[1] == 1 else f"group {call.heads[0] // call.heads[1]}",
    "lengths": _regime,
    "part": lambda call: call.part,
}


def _summary(name: str, rows: list[Row]) -> str:
    stock = [row.stock for row in rows if row.stock is not None]
    slower = sum(ratio > TOLERATED for ratio in stock)
    auto = mean(row.auto for row in rows)
    return (
        f"{name:22}{len(rows):6}{mean(row.regret for row in rows):10.3f}{max(r.regret for r in rows):8.2f}"
        f"{auto:10.3f}{mean(stock):10.3f}{slower:6} of {len(stock)}"
    )


def report(found: dict[str, Any], *, part: str | None, worst: int) -> str:
    """Return the report on a file's calls as text."""
    calls = [call for call in found["calls"] if part in (None, call["part"])]
    rows = [row for call in calls if (row := row_of(call)) is not None]
    lines = [str(found["environment"]), f"{len(calls)} calls, {len(rows)} of them with times"]
    if rows:
        lines += _tables(rows, worst)
    failures = Counter(
        (name, result["status"])
        for call in calls
        for name, result in call["backends"].items()
        if "status" in result
    )
    lines += ["", "without a time:"]
    lines += [f"  {name:12}{status:16}{count:5}" for (name, status), count in sorted(failures.items())]
    strange = Counter(n for c in calls for n, r in c["backends"].items() if not _is_right(r))
    lines += ["result far from the others':"]
    lines += [f"  {name:12}{count:5}" for name, count in sorted(strange.items())]
    return "\n".join(lines)


def _tables(rows: list[Row], worst: int) -> list[str]:
    header = f"{'calls':>28}{'selected':>10}{'worst':>8}{'auto':>10}{'/stock':>10}{'slower by 2 %':>14}"
    lines = ["geometric means of selected over best, attention() over best, attention() over stock", header]
    lines.append(_summary("all", rows))
    for kind, name_of in KINDS.items():
        lines += ["", kind]
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            groups[name_of(row.call)].append(row)
        lines += [_summary(f"  {name}", group) for name, group in sorted(groups.items())]
    lines += ["", f"the worst {worst}:"]
    for row in sorted(rows, key=lambda row: -row.regret)[:worst]:
        lines.append(f"  {row.regret:6.2f}  {row.selected:9} best {row.best:9}{row.ms:9.3f} ms  {row.line}")
    return lines


def main() -> None:
    """Print the report on each file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--part", choices=("fit", "unseen"), help="only these calls")
    parser.add_argument("--worst", type=int, default=10)
    options = parser.parse_args()
    for path in options.files:
        found = json.loads(path.read_text(encoding="utf-8"))
        print(report(found, part=options.part, worst=options.worst))


if __name__ == "__main__":
    main()
