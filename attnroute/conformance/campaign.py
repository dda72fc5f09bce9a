"""Holds every row that applies to a machine against its kernels: plans, runs, remembers, reports."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from attnroute.conformance.points import Points, points_of, size_of, stock_rows
from attnroute.conformance.pool import Job, Pool, Results
from attnroute.conformance.report import Entry, Half, Report, Result, entry_of
from attnroute.conformance.trials import Trial
from attnroute.question.host import Host
from attnroute.tables.folders import Tables

Say = Callable[[str], None]
Side = Literal["inside", "outside"]
SIDES: Final[tuple[Side, ...]] = ("outside", "inside")
_MOST_PROCESSES: Final = 16
"""On one card: more of them only wait for it."""
_SECONDS: Final = {True: 2.0, False: 0.2}
"""What a trial takes, about, of a backend that compiles and of another one."""
_EVERY: Final = 10.0
"""Seconds between two lines that say how far it is."""


def planned(tables: Tables, host: Host, backends: Iterable[str], rules: Collection[str] = ()) -> list[Points]:
    """Return the points of every row of some backends that applies to a machine, or of some of them."""
    found = [p for backend in backends for p in points_of(tables, host, backend)]
    found += [p for p in stock_rows(tables, host) if p.backend in set(backends)]
    # What may hang until its time is over comes first.
    found.sort(key=lambda points: points.row.rule.kind != "hang")
    return [points for points in found if not rules or points.row.id in rules]


def processes(device: str) -> int:
    """Return how many processes work side by side."""
    cores = os.cpu_count() or 1
    return max(1, min(_MOST_PROCESSES, cores - 1) if device == "cuda" else cores)


def key_of(points: Points, side: Side) -> str:
    """Return what one side of a row is remembered under: another row or other calls are another key."""
    trials = "\n".join(trial.model_dump_json() for trial in _trials(points, side))
    row = points.row.rule.model_dump_json(exclude={"evidence", "because", "argued"})
    said = hashlib.sha256(f"{row}\n{trials}".encode())
    return f"{points.row.id} {points.backend} {side} {said.hexdigest()[:12]}"


def _trials(points: Points, side: Side) -> tuple[Trial, ...]:
    return (points.inside if side == "inside" else points.outside).trials


def jobs_of(points: Points) -> Iterator[Job]:
    """Give one job for each side of a row that has trials."""
    for side in SIDES:
        if trials := _trials(points, side):
            seconds = len(trials) * _SECONDS[points.compiles]
            yield Job(key_of(points, side), points.backend, side, trials, size_of(trials), seconds)


class Campaign:
    """One run over many rows, which an interrupted one goes on from.

    Attributes:
        path: The report; beside it lies the file of what was finished, a line for each side of a row.
        host: The machine.
        say: Gets lines about what happens.
    """

    def __init__(self, path: Path, host: Host, say: Say, *, resume: bool = False) -> None:
        """Read what an earlier run left, if this one goes on from it.

        Args:
            path: The report.
            host: The machine.
            say: Gets lines about what happens.
            resume: Go on from what an interrupted run finished.
        """
        self.path, self.host, self.say = path, host, say
        self._lines = path.with_suffix(".jsonl")
        self._began = time.monotonic()
        self._told = 0.0
        self._counts: Counter[str] = Counter()
        self._halves: dict[str, Half] = {}
        self._head = hashlib.sha256(host.lasting.model_dump_json().encode()).hexdigest()[:16]
        if resume:
            self._read()
        elif self._lines.exists():
            self._lines.unlink()

    def run(self, plan: list[Points], pool: Pool) -> None:
        """Run what is not finished yet.

        Raises:
            KeyboardInterrupt: The user ended it; what was finished is in the file.
        """
        by_key = {key_of(points, side): points for points in plan for side in SIDES}
        jobs = [job for points in plan for job in jobs_of(points)]
        left = [job for job in jobs if job.key not in self._halves]
        if len(left) < len(jobs):
            self.say(f"{len(jobs) - len(left)} of {len(jobs)} sides were finished before")

        def handle(job: Job, results: Results) -> None:
            half = Half(key=job.key, results=tuple(Result.of(*pair) for pair in results))
            self._keep(half)
            self._tell(by_key[job.key], len(jobs))

        pool.run(left, handle)

    def entries(self, plan: list[Points]) -> list[Entry]:
        """Return what is known of each row."""
        return [self._entry(points) for points in plan]

    def report(self, plan: list[Points]) -> Report:
        """Write the report, and return it."""
        report = report_of(self.host, self._began, entries=tuple(self.entries(plan)))
        report.write(self.path)
        return report

    def _entry(self, points: Points) -> Entry:
        inside, outside = (self._halves.get(key_of(points, side)) for side in ("inside", "outside"))
        return entry_of(points, inside, outside)

    def _keep(self, half: Half) -> None:
        self._halves[half.key] = half
        with self._lines.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(f"{self._head}\n")
            file.write(f"{half.model_dump_json()}\n")

    def _tell(self, points: Points, count: int) -> None:
        """Say what is wrong at once, and now and then how far it is."""
        entry = self._entry(points)
        if entry.verdict in ("too loose", "too strict"):
            self._counts[entry.verdict] += 1
            self.say(f"{entry.verdict}: {entry.rule} for {entry.backend}: {entry.reason}")
        now = time.monotonic()
        if now - self._told >= _EVERY or len(self._halves) == count:
            self._told = now
            counts = "".join(f", {number} {verdict}" for verdict, number in sorted(self._counts.items()))
            self.say(f"{len(self._halves)}/{count} sides after {now - self._began:.0f} s{counts}")

    def _read(self) -> None:
        """Read the lines of an interrupted run; the last one may be cut off."""
        if not self._lines.is_file():
            self.say(f"there is no {self._lines}: the run begins anew")
            return
        head, *lines = self._lines.read_text(encoding="utf-8").splitlines() or [""]
        if head != self._head:
            self.say(f"{self._lines} begins anew: another machine or other versions wrote it")
            self._lines.unlink()
            return
        for line in lines:
            try:
                half = Half.model_validate_json(line)
            except ValidationError:
                continue
            self._halves[half.key] = half
        if not self._lines.read_text(encoding="utf-8").endswith("\n"):
            with self._lines.open("a", encoding="utf-8") as file:
                file.write("\n")


def report_of(host: Host, began: float, **found: Any) -> Report:
    """Return a report about a machine.

    Args:
        host: The machine.
        began: When, as `time.monotonic` says it.
        **found: Its entries, or what came of drawn calls.
    """
    return Report(
        date=datetime.now(tz=UTC).date().isoformat(),
        host=host.lasting,
        driver=driver() if host.arch != "cpu" else "",
        seconds=round(time.monotonic() - began, 1),
        **found,
    )


def driver() -> str:
    """Return the version of the card's driver, "" where nvidia-smi is not there."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.split()[0] if said.split() else ""
