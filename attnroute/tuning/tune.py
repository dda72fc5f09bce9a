"""Measures recorded calls on this machine: backends that may run each and are right, timed in turns."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from attnroute import settings
from attnroute.api import routes
from attnroute.api.attention import attention
from attnroute.api.intake import take
from attnroute.api.tuned import Times, TunedCall, TuningFile, identity_of
from attnroute.engine.measured import key_of
from attnroute.errors import AttnRouteError, shortened
from attnroute.question.line import render
from attnroute.question.policy import Measured, Policy, merge
from attnroute.tables.load import load
from attnroute.tuning import gate
from attnroute.tuning.remake import Problem, remake
from attnroute.tuning.timing import Step, Timing, clock_of

if TYPE_CHECKING:
    from attnroute.api.recording import TracedCall
    from attnroute.engine.decision import Decision
    from attnroute.question.host import Host

MARGIN: Final = 0.03
"""By which share of its time another backend must be faster than the one that is predicted to be best."""
_ROUNDS: Final = 3
"""How often the backends of a call take turns."""

Say = Callable[[str], None]
Measure = Callable[[dict[str, Step], str], dict[str, Times]]
"""Times steps by name in turns, on a device."""


@dataclass(frozen=True)
class Task:
    """Recorded calls that are measured together.

    Attributes:
        key: What they have in common.
        traced: The one that ran most often, which is measured.
        count: How many ran in all; None where that is not known of any.
    """

    key: str
    traced: TracedCall
    count: int | None

    @property
    def work(self) -> float:
        """How much of the run they are, without knowing any time: the most comes first."""
        call = self.traced.call
        pairs = call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
        return (self.count or 1) * pairs * (call.head_dim_qk + call.head_dim_v)


def tasks_of(calls: tuple[TracedCall, ...], device: str) -> list[Task]:
    """Return the calls of one device in classes, those first that are most of the run."""
    classes: dict[str, list[TracedCall]] = {}
    for traced in calls:
        if traced.device.partition(":")[0] == device:
            classes.setdefault(key_of(traced.call), []).append(traced.changed(device=device))
    found = []
    for key, alike in classes.items():
        counts = [traced.count for traced in alike if traced.count is not None]
        most = max(alike, key=lambda traced: traced.count or 0)
        found.append(Task(key, most, sum(counts) if counts else None))
    return sorted(found, key=lambda task: -task.work)


@dataclass
class Tuner:
    """Measures tasks one after the other and writes each into the file at once.

    Attributes:
        path: The file.
        host: The machine.
        backends: Only these, and what would be selected without the file; all where empty.
        margin: As `MARGIN`.
        seconds: After so many no further task is begun.
        say: Gets lines about what happens.
        measure: Times the backends of a call.
    """

    path: Path
    host: Host
    backends: frozenset[str] = frozenset()
    margin: float = MARGIN
    seconds: float = float("inf")
    say: Say = print
    measure: Measure = field(default_factory=lambda: timed)
    _died: tuple[tuple[str, str], ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Read what an earlier run left; what was measured with other versions begins anew."""
        self.file = TuningFile(host=self.host)
        if self.path.is_file():
            found = TuningFile.read(self.path)
            if differences := found.differences(identity_of(self.host)):
                self.say(f"{self.path} begins anew: it was written with {', '.join(differences)}")
            else:
                self.file = found

    def run(self, tasks: list[Task]) -> None:
        """Measure what the file does not hold yet.

        Raises:
            KeyboardInterrupt: The user ended it; the file holds every call that was finished.
        """
        self._died = self.file.began
        try:
            self._run(tasks, time.monotonic() + self.seconds)
        finally:
            if self.file.began != self._died:
                self._write(began=self._died)

    def _run(self, tasks: list[Task], until: float) -> None:
        for at, task in enumerate(tasks, 1):
            if task.key in self.file.calls:
                self.say(f"{at}/{len(tasks)} measured before: {task.key}")
                continue
            if time.monotonic() >= until:
                self.say(f"the time is over; {len(tasks) - at + 1} kinds of calls are left for another run")
                return
            self.say(f"{at}/{len(tasks)} {task.traced.line}")
            tuned = self._tuned(task)
            if tuned is not None:
                self._died = tuple(pair for pair in self._died if pair[0] != task.key)
                self._write(began=self._died, calls={**self.file.calls, task.key: tuned})
                self.say(f"    {_told(tuned)}")

    def _write(self, **changes: object) -> None:
        self.file = self.file.model_copy(update=changes)
        self.file.write(self.path)

    def _tuned(self, task: Task) -> TunedCall | None:
        """Measure one task; None, with the reason said, where that is not possible."""
        try:
            problem = remake(task.traced)
            decision = decided(problem)
            want = _truth(problem, decision)
        except (AttnRouteError, torch.OutOfMemoryError) as error:
            self.say(f"    not measured: {_in_line(error)}")
            return None
        if key_of(decision.call) != task.key:
            self.say(f"    not measured: made again, it is another call: {render(decision.call)}")
            return None
        wrong, failed = self._checked(task, problem, decision, want)
        del want
        names = [b for b in self._candidates(decision) if b not in wrong and b not in failed]
        if decision.selected is None or not names:
            self.say("    not measured: no backend is left")
            return None
        with gate.deterministic(decision.call), _quiet():
            steps = {backend: step_of(problem, backend) for backend in names}
            times = self.measure(steps, problem.given.query.device.type)
        failed |= {backend: "it raised while it was timed" for backend in names if backend not in times}
        tuned = TunedCall(
            line=render(decision.call),
            day=datetime.now(tz=UTC).date().isoformat(),
            before=decision.selected,
            after=decision.selected,
            margin=self.margin,
            times=times,
            wrong=wrong,
            failed=failed,
        )
        after = decided(problem, tuned.measured(self.path, task.key)).selected
        return tuned.model_copy(update={"after": after or decision.selected})

    def _checked(
        self, task: Task, problem: Problem, decision: Decision, want: dict[str, torch.Tensor]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Run every candidate once; return the wrong ones and those that failed, each with the reason."""
        wrong: dict[str, str] = {}
        failed: dict[str, str] = {}
        for backend in self._candidates(decision):
            if (task.key, backend) in self._died:
                failed[backend] = "it ended the process, or was ended, in an earlier run"
            else:
                # Should it end the process, the next run knows which one it was.
                self._write(began=(*self._died, (task.key, backend)))
                try:
                    with gate.deterministic(decision.call), _quiet():
                        error = gate.wrong(gate.run(problem, backend), want, decision.call)
                except Exception as raised:  # noqa: BLE001 - a backend that raises is a result
                    failed[backend] = _in_line(raised)
                    self._check_device(problem, task, backend)
                else:
                    wrong |= {backend: error} if error else {}
            if backend in failed:
                self.say(f"    {backend} is left out: {failed[backend]}")
            elif backend in wrong:
                self.say(f"    {backend} is wrong and will not run such calls: {wrong[backend]}")
        return wrong, failed

    def _check_device(self, problem: Problem, task: Task, backend: str) -> None:
        """An error of the device stays until the process ends, and nothing more can be measured.

        Raises:
            AttnRouteError: There is one.
        """
        if problem.given.query.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self._died = (*self._died, (task.key, backend))
            raise AttnRouteError(
                f"{backend} left the device in error ({_in_line(error)}); run `attnroute tune` again, which"
                " goes on without it."
            ) from error

    def _candidates(self, decision: Decision) -> list[str]:
        """Return who may run, the slow tier aside: it comes last, however fast it is."""
        slow = load(decision.policy.tables).slow_tier
        names = [b for b in decision.order if b not in slow and (not self.backends or b in self.backends)]
        selected = [decision.selected] if decision.selected is not None else []
        return list(dict.fromkeys((*selected, *names)))


def decided(problem: Problem, measured: Measured | None = None) -> Decision:
    """Return the decision about a call as it is by what was measured of it, and by no file."""
    policy = merge(settings.current(), Policy(tuning=False))
    return routes.decision_of(take(problem.given), policy.changed(measured=measured))


def time_of(times: Times) -> float:
    """Return what an eager call takes: the larger of device and host, which work side by side."""
    return max(times.device_ms, times.host_ms)


def step_of(problem: Problem, backend: str) -> Step:
    """Return what is timed: the call as a model makes it."""
    arguments = problem.given._replace(backend=backend)._asdict()
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))

    def forward() -> torch.Tensor:
        result = attention(query, key, value, **arguments)
        return result[0] if isinstance(result, tuple) else result

    return Step(forward, tuple(problem.leaves.values()), problem.grad)


def timed(steps: dict[str, Step], device: str) -> dict[str, Times]:
    """Time steps in turns, so that what else the machine does hits all alike; one that raises is left out."""
    clock = clock_of(device)
    timings = {backend: Timing(step, clock) for backend, step in steps.items()}
    for at in range(1 + _ROUNDS):
        for backend, timing in list(timings.items()):
            try:
                timing.turn() if at else timing.warm_up()
            except RuntimeError:
                del timings[backend]
    totals = {backend: timing.samples.totals for backend, timing in timings.items()}
    return {b: Times(device_ms=device_ms, host_ms=host_ms) for b, (device_ms, host_ms) in totals.items()}


def _truth(problem: Problem, decision: Decision) -> dict[str, torch.Tensor]:
    with _quiet():
        return gate.truth(problem, decision.call)


def _quiet() -> warnings.catch_warnings[None]:
    """Return a block without warnings: that a backend holds all scores is known here."""
    return warnings.catch_warnings(action="ignore")


def _in_line(error: BaseException) -> str:
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), 200)


def _told(tuned: TunedCall) -> str:
    ordered = sorted(tuned.times.items(), key=lambda item: time_of(item[1]))
    times = ", ".join(f"{backend} {time_of(t):.3g} ms" for backend, t in ordered)
    what = f"{tuned.after} stays" if tuned.after == tuned.before else f"{tuned.after}, not {tuned.before}"
    return f"{what}: {times}"


def lines_of(tasks: list[Task]) -> Iterator[str]:
    """Say what would be measured, in order."""
    for task in tasks:
        times = "an unknown number of times" if task.count is None else f"{task.count} times"
        candidates = ", ".join(decided(remake(task.traced)).order)
        yield f"{task.traced.line} ({times}): {candidates}"
