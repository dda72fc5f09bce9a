"""Runs trials in processes side by side, each with a time limit; one that dies costs its trial alone."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from attnroute.conformance.trials import FAILURES, Outcome, Trial
from attnroute.settings import PREFIX

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

LIMIT: Final = {"cpu": 300.0, "cuda": 120.0}
"""Seconds after which a trial counts as hung: a first call may compile for half a minute."""
_FAILURES_SHOWN: Final = 3
"""So many failures inside of a row tell enough."""
_LEAVE: Final = 2.0
"""Seconds in which a process may end by itself, so that it leaves nothing behind."""
_KEPT_BYTES: Final = 2**29
"""Device memory that a process keeps between two trials."""
_NO_ROOM: Final = "OutOfMemoryError"
_UNTIL_ROOM: Final = 3.0
_WAIT: Final = 0.05
"""Seconds until a worker without a job looks for one again: jobs may still be drawn."""
_GRACE: Final = 10.0
"""Seconds that a drawn call has which runs when the time is over."""
_OVER: Final = "the time was over while it ran"
_LARGE: Final = "large"
_TOGETHER: Final = 17 * 2**30
"""Bytes of tensors of large calls that run at the same time; with gradients and truth they take the card."""
_THREADS: Final = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Processes side by side share the cores."""


class Job(NamedTuple):
    """Trials that one process runs one after the other.

    Attributes:
        key: What it is remembered under.
        group: Jobs of one group run in the same processes where that goes: they share what is compiled.
        side: "outside": it ends with the first failure, and with it the process; "inside": failures are few;
            "drawn": each trial is by itself, and whose kernel ran is told by the route.
        trials: What is run.
        size: Bytes of the tensors of its largest call where those are many, else 0.
        seconds: What it takes, about: groups that take longer are begun by more workers.
    """

    key: str
    group: str
    side: Literal["inside", "outside", "drawn"]
    trials: tuple[Trial, ...]
    size: int = 0
    seconds: float = 1.0


Results = tuple[tuple[Trial, Outcome], ...]


class Worker:
    """A process that runs trials, and is started again after one that ended it."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def is_new(self) -> bool:
        """Whether the next trial is the first of its process."""
        return self._connection is None

    def ask(self, trial: Trial, limit: float, *, look: bool = True) -> Outcome:
        """Run one trial in the process; `look` at a profile of it."""
        connection = self._started()
        began = time.monotonic()
        try:
            connection.send((trial, look))
            outcome = connection.recv() if connection.poll(limit) else None
        except (EOFError, OSError):
            self._process.join(_LEAVE)
            outcome = Outcome(status="crashed", said=_end(self._process.exitcode))
        if outcome is None:
            self._process.kill()
            outcome = Outcome(status="hung", said=f"nothing came of it in {limit:g} s")
        if outcome.status in ("crashed", "hung"):
            self.end()
            return outcome.changed(seconds=round(time.monotonic() - began, 3))
        return outcome

    def end(self) -> None:
        """End the process; the next trial gets a new one."""
        if self._process is not None:
            with suppress(OSError):
                self._connection.close()  # type: ignore[union-attr]
            self._process.join(_LEAVE)
            self._process.kill()
            # One that waits for a kernel which hangs may take as long to go.
            self._process.join(_LEAVE)
        self._process = self._connection = None

    def _started(self) -> Connection:
        if self._connection is None:
            context = _context()
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, _settings()), daemon=True)  # type: ignore[attr-defined]
            self._process.start()
            theirs.close()
        return self._connection


class Pool:
    """Several workers that take jobs until none is left.

    Attributes:
        count: How many.
        until: The time, as `time.monotonic` says it, after which no job is begun.
    """

    def __init__(self, count: int, until: float = float("inf")) -> None:
        """Start nothing yet."""
        self.count = count
        self.until = until
        self._lock = threading.Lock()
        self._held = 0
        self._stopped = threading.Event()
        self._given = threading.Event()

    def run(self, jobs: Iterable[Job], handle: Callable[[Job, Results], None]) -> None:
        """Run jobs; `handle` gets the results of each, one at a time.

        Raises:
            KeyboardInterrupt: The user ended it; processes are ended too.
        """
        queues: dict[str, deque[Job]] = {}
        self._given.clear()
        busy: Counter[str] = Counter()
        workers = [Worker() for _ in range(self.count)]
        threads = [
            threading.Thread(target=self._follow, args=(worker, queues, busy, handle), daemon=True)
            for worker in workers
        ]
        for thread in threads:
            thread.start()
        try:
            for job in jobs:
                with self._lock:
                    _put(job, queues)
                if time.monotonic() >= self.until:
                    break
            self._given.set()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        finally:
            self._stopped.set()
            for worker in workers:
                worker.end()

    def _follow(
        self,
        worker: Worker,
        queues: dict[str, deque[Job]],
        busy: Counter[str],
        handle: Callable[[Job, Results], None],
    ) -> None:
        group = ""
        while not self._stopped.is_set() and time.monotonic() < self.until:
            with self._lock:
                busy[group] -= 1
                if group == _LARGE or not queues.get(group):
                    group = _next(queues, busy, self._held)
                job = queues[group].popleft() if queues.get(group) else None
                busy[group] += 1
                self._held += job.size if job is not None else 0
            if job is None:
                if self._given.is_set() and not any(queues.values()):
                    break
                self._stopped.wait(_WAIT)
                continue
            results = run_job(worker, job, self.until)
            with self._lock:
                self._held -= job.size
                if not self._stopped.is_set():
                    handle(job, results)
        worker.end()


def _put(job: Job, queues: dict[str, deque[Job]]) -> None:
    """Put a job where it waits: large ones together, the smallest first."""
    if not job.size:
        queues.setdefault(job.group, deque()).append(job)
    else:
        queues[_LARGE] = deque(sorted((*queues.get(_LARGE, ()), job), key=attrgetter("size")))


def _next(queues: dict[str, deque[Job]], busy: Counter[str], held: int) -> str:
    """Return the group that needs one more worker most; large calls first, as many as have room."""
    large = queues.get(_LARGE)
    if large and (not held or held + large[0].size <= _TOGETHER):
        return _LARGE
    left = {
        name: sum(job.seconds for job in jobs) / (1 + max(0, busy[name]))
        for name, jobs in queues.items()
        if name != _LARGE
    }
    return max(left, key=left.__getitem__, default="")


def run_job(worker: Worker, job: Job, until: float = float("inf")) -> Results:
    """Run the trials of a job until they tell enough; drawn ones also until a time."""
    found: list[tuple[Trial, Outcome]] = []
    # What runs outside of its limits may write anywhere, and leave behind what later calls stumble over.
    is_spoilt = job.side == "outside"
    for trial in job.trials:
        limit = LIMIT[trial.device] / (2 if trial.past else 1)
        if job.side == "drawn":
            outcome = _drawn(worker, trial, limit, until)
        else:
            outcome = _asked(worker, trial, limit, retried=job.side == "inside")
        found.append((trial, outcome))
        if job.side == "drawn":
            if time.monotonic() > until:
                break
            continue
        failures = sum(o.status in FAILURES for _, o in found)
        is_spoilt |= failures > 0
        if failures >= (1 if job.side == "outside" else _FAILURES_SHOWN) or outcome.status in (
            "crashed",
            "hung",
        ):
            break
    if is_spoilt:
        worker.end()
    return tuple(found)


def _drawn(worker: Worker, trial: Trial, limit: float, until: float) -> Outcome:
    """Run a drawn trial: one that the end of the time cuts off is untested, not hung."""
    left = max(0.0, until - time.monotonic()) + _GRACE
    outcome = _asked(worker, trial, min(limit, left), look=False, retried=left >= 2 * limit)
    if outcome.status == "hung" and left < limit:
        return outcome.changed(status="untested", said=_OVER)
    return outcome


def _asked(worker: Worker, trial: Trial, limit: float, *, look: bool = True, retried: bool) -> Outcome:
    """Run a trial; one that found no memory waits for it, one that failed runs `retried` in a new process."""
    is_new = worker.is_new
    outcome = worker.ask(trial, limit, look=look)
    if outcome.said.startswith(_NO_ROOM):
        # Calls of other processes have it for some seconds.
        time.sleep(_UNTIL_ROOM)
        outcome = worker.ask(trial, limit, look=look)
    if outcome.status not in FAILURES or is_new or not retried:
        return outcome
    # What ran before may have brought it about.
    worker.end()
    again = worker.ask(trial, limit)
    if again.status != "right":
        return again
    return again.changed(said=f"right in a new process; behind other calls {outcome.status}: {outcome.said}")


def _context() -> BaseContext:
    """Return how processes are started: from one that has imported torch already, where the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attnroute.conformance.run"])
    return context


def _settings() -> dict[str, str]:
    """Return what the environment says here: the process that others are forked from has an older one."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def _serve(connection: Connection, settings: dict[str, str]) -> None:
    """Run the trials that come until none does."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(_THREADS | settings)
    with Path(os.devnull).open("w") as nowhere:
        # Profilers and compilers talk; what counts goes through the connection.
        os.dup2(nowhere.fileno(), sys.stdout.fileno() if sys.stdout is not None else 1)
        os.dup2(nowhere.fileno(), 2)
    import torch

    from attnroute.conformance.run import run

    torch.set_num_threads(1)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            trial, look = connection.recv()
            connection.send(run(trial, look=look))
            if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
                torch.cuda.empty_cache()


def _end(code: int | None) -> str:
    return (
        f"the process ended with signal {-code}"
        if code is not None and code < 0
        else f"the process ended with {code}"
    )
