"""Runs drawn calls against float64, and shrinks those that fail."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from attnroute.conformance.pool import LIMIT, Job, Pool, Results, Worker
from attnroute.conformance.report import Drawn, Result
from attnroute.conformance.shrink import shrunk
from attnroute.conformance.trials import FAILURES, Outcome, Trial

_MOST_SHRUNK = 24
"""Failures of different kinds that are made simple."""
_SHRINKING = 45.0
"""Seconds for each: where a call compiles, each simpler one does."""
_EVERY = 10.0
_REASONS = 12


def fuzz(jobs: Iterable[Job], count: int, pool: Pool, say: Callable[[str], None]) -> Drawn:
    """Run drawn calls, and return how many were right and the simplest that were not.

    Args:
        jobs: The calls, which are drawn while earlier ones run.
        count: How many they are, about.
        pool: Who runs them.
        say: Gets lines about what happens.

    Raises:
        KeyboardInterrupt: The user ended it.
    """
    counts: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    untested: Counter[str] = Counter()
    failed: dict[str, list[tuple[Trial, Outcome]]] = {}
    began = time.monotonic()
    told = [began]

    def handle(_: Job, results: Results) -> None:
        for trial, outcome in results:
            counts[outcome.status] += 1
            ran[outcome.ran] += outcome.status == "right"
            untested[outcome.said] += outcome.status == "untested"
            if outcome.status in FAILURES:
                kind = kind_of(trial, outcome)
                if kind not in failed:
                    say(f"{outcome.status}: {outcome.said}; {trial.command}")
                failed.setdefault(kind, []).append((trial, outcome))
        if time.monotonic() - told[0] >= _EVERY:
            told[0] = time.monotonic()
            said = ", ".join(f"{number} {status}" for status, number in counts.most_common())
            say(f"{counts.total()}/{count} calls after {told[0] - began:.0f} s: {said}")

    pool.run(jobs, handle)
    kinds = sorted(failed.values(), key=len, reverse=True)
    took = time.monotonic() - began
    say(f"{counts.total()} calls in {took:.0f} s; {len(kinds)} kinds of failures are made simple")
    with ThreadPoolExecutor(pool.count) as threads:
        found = list(threads.map(_simplest, [pairs[0] for pairs in kinds[:_MOST_SHRUNK]]))
    failures = {simple: Result.of(simple, outcome) for simple, outcome in found}
    return Drawn(
        counts=dict(counts),
        right=dict(+ran),
        untested=dict((+untested).most_common(_REASONS)),
        failures=tuple(failures.values()),
    )


def kind_of(trial: Trial, outcome: Outcome) -> str:
    """Return what failures have in common that are shrunk once: who, and what is said but for numbers."""
    return f"{outcome.ran or trial.backend} {outcome.status} {re.sub(r'[0-9.e+-]+', '', outcome.said)}"


def _simplest(failure: tuple[Trial, Outcome]) -> tuple[Trial, Outcome]:
    trial, outcome = failure
    worker, until = Worker(), time.monotonic() + _SHRINKING
    try:
        return shrunk(
            trial,
            outcome,
            lambda other: worker.ask(other, LIMIT[other.device] / 4, look=False),
            lambda: time.monotonic() > until,
        )
    finally:
        worker.end()
