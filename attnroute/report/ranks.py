"""What the ranks of a job are, side by side: a table, and every difference between them by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from attnroute.question.host import Host
from attnroute.report.layout import WIDTH, Line, field, laid_out, wrapped

_COLUMNS: Final = ("torch", "cuda", "cudnn")
_NOTHING: Final = "-"
_ABSENT: Final = "nothing"
_GAP: Final = "  "
_LABEL: Final = 10
"""Letters of a name that stands as a label."""


class Rank(BaseModel):
    """One process of a job.

    Attributes:
        rank: Its number.
        machine: The name of the machine that it runs on.
        attnroute: The version of attnroute there.
        host: Its device with everything installed.
        settings: Every variable `ATTNROUTE_*` that is set there.
        problem: Why it could not be probed; empty where it was.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    machine: str
    attnroute: str
    host: Host | None = None
    settings: dict[str, str] = {}
    problem: str = ""


Difference = tuple[str, dict[str, list[int]]]
"""What differs, and the ranks that have each value of it."""


def differences(ranks: list[Rank]) -> list[Difference]:
    """Return what is not the same on all ranks; where they run does not count."""
    found = [_facts(rank) for rank in ranks]
    names = dict.fromkeys(name for facts in found for name in facts)
    result = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, facts in zip(ranks, found, strict=True):
            values.setdefault(facts.get(name, _ABSENT), []).append(rank.rank)
        if len(values) > 1:
            result.append((name, values))
    return result


def render_ranks(ranks: list[Rank], width: int = WIDTH) -> str:
    """Return a row for each group of ranks that are alike on one machine, and what differs below."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        rows.setdefault(_row(rank), []).append(rank.rank)
    head = ("ranks", "machine", "device", *_COLUMNS)
    table = [head, *((_numbers(numbers), *row) for row, numbers in rows.items())]
    widths = [max(len(row[at]) for row in table) for at in range(len(head))]
    lines = [
        Line(_GAP.join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip(), wraps=False)
        for row in table
    ]
    return "\n".join([laid_out([*lines, Line("")], width), *_told(differences(ranks), len(ranks), width)])


def ranks_data(ranks: list[Rank]) -> dict[str, Any]:
    """Return all ranks and differences as data."""
    named = [
        {"name": name, "values": [{"value": value, "ranks": numbers} for value, numbers in values.items()]}
        for name, values in differences(ranks)
    ]
    return {"ranks": [rank.model_dump(mode="json") for rank in ranks], "differences": named}


def _facts(rank: Rank) -> dict[str, str]:
    """Return what must be the same on all ranks, so that all choose the same kernels."""
    facts = {"attnroute": rank.attnroute, "problem": rank.problem or _ABSENT}
    if rank.host is not None:
        host = rank.host
        facts |= {"architecture": host.arch, "device": host.device_name, **host.versions}
        facts |= {name: f"broken: {why}" for name, why in host.broken.items()}
    return facts | rank.settings


def _row(rank: Rank) -> tuple[str, ...]:
    if rank.host is None:
        return (rank.machine, _NOTHING, *(_NOTHING for _ in _COLUMNS))
    device = f"{rank.host.device_name} ({rank.host.arch})"
    return (rank.machine, device, *(rank.host.versions.get(name, _NOTHING) for name in _COLUMNS))


def _told(found: list[Difference], count: int, width: int) -> Iterable[str]:
    if not found:
        yield from wrapped(f"All {count} ranks are alike: device, packages and settings.", "", "", width)
        return
    for name, values in found:
        text = "; ".join(f"{value} on {_on(numbers)}" for value, numbers in values.items())
        yield laid_out([Line(text, f"{name}: ", "  ")] if len(name) > _LABEL else [field(name, text)], width)


def _on(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {_numbers(numbers)}"


def _numbers(numbers: list[int]) -> str:
    """Say numbers in ascending order: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
