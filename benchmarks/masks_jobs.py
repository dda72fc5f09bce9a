"""Jobs that compile side by side, each in a process of its own, and are timed one at a time.

A job is a generator that may yield twice. What stands before the first `yield` is done while other jobs do
the same, then it has the card to itself, and what stands after a second `yield` is again done together. What
a job does to its process, a CUDA error that stays included, does not reach another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from masks_common import Job, raised, release

LONGEST_SECONDS = 240.0
"""Of what stands before, between and after the yields, each."""
SECONDS_TO_END = 10.0

_SPAWN = get_context("spawn")


class _Worker(NamedTuple):
    name: str
    process: Any
    line: Any

    def answer(self, until: float) -> dict[str, Any] | None:
        """Return what the job found or how it failed, None when it waits to go on."""
        if not self.line.poll(max(0.0, until - time.monotonic())):
            self.process.kill()
            return {"error": f"no answer within {LONGEST_SECONDS:.0f} s"}
        try:
            found: dict[str, Any] | None = self.line.recv()
        except (EOFError, OSError):
            self.process.join(SECONDS_TO_END)
            return {"error": f"the process ended with {self.process.exitcode}"}
        return found

    def go_on(self) -> None:
        """Let the job go on; that its process has died meanwhile is found by `answer`."""
        with suppress(OSError):
            self.line.send(None)

    def end(self) -> None:
        """Wait until the process has ended, and end it where it does not."""
        self.process.join(SECONDS_TO_END)
        self.process.kill()


def run_all(jobs: dict[str, Job], at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run jobs, `at_once` at a time, and yield the name and the result of each as it comes.

    Args:
        jobs: By name; picklable, as the processes are spawned.
        at_once: Processes that prepare together, and whose jobs are then timed one after the other.
    """
    # A pool of compilers in each of the processes would be more than there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    names = list(jobs)
    for start in range(0, len(names), at_once):
        yield from _wave([(name, jobs[name]) for name in names[start : start + at_once]])


def _wave(jobs: list[tuple[str, Job]]) -> Iterator[tuple[str, dict[str, Any]]]:
    workers = [_start(name, job) for name, job in jobs]
    prepared = yield from _collected(workers)
    measured = []
    for worker in prepared:
        worker.go_on()
        measured += yield from _collected([worker])
    for worker in measured:
        worker.go_on()
    for worker in (yield from _collected(measured)):
        worker.process.kill()
        yield worker.name, {"error": "a job may yield twice; got one more"}
    for worker in workers:
        worker.end()


def _collected(workers: list[_Worker]) -> Generator[tuple[str, dict[str, Any]], None, list[_Worker]]:
    """Yield the names and results of those that are through, and return those that wait to go on."""
    until = time.monotonic() + LONGEST_SECONDS
    waiting = []
    for worker in workers:
        found = worker.answer(until)
        if found is None:
            waiting.append(worker)
        else:
            yield worker.name, found
    return waiting


def _start(name: str, job: Job) -> _Worker:
    line, far_end = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_work, args=(far_end, job), daemon=True)
    process.start()
    # Without this the end of the process would not end the line.
    far_end.close()
    return _Worker(name, process, line)


def _work(line: Any, job: Job) -> None:
    """Run one job in its process, from seed 0."""
    try:
        torch.manual_seed(0)
        steps = job()
        while True:
            next(steps)
            release()
            line.send(None)
            line.recv()
    except StopIteration as end:
        line.send(end.value)
    except Exception as error:  # noqa: BLE001 - no kind of failure is excepted
        line.send({"error": raised(error)})
