"""Runs one trial in this process: makes the call, computes the truth, runs the kernel, compares."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute import settings
from attnroute.api import routes
from attnroute.api.attention import attention
from attnroute.api.intake import take
from attnroute.api.trace import TracedCall
from attnroute.conformance import values
from attnroute.conformance.judge import wrong
from attnroute.conformance.kernels import own_kernels, stranger, watched
from attnroute.conformance.past import past
from attnroute.conformance.trials import Outcome, Trial
from attnroute.errors import ArgumentError, AttnRouteError, KernelRefusedError, NoBackendError, shortened
from attnroute.executors import launch
from attnroute.question.line import render
from attnroute.question.policy import Policy, merge
from attnroute.tables.load import load
from attnroute.tuning import gate
from attnroute.tuning.remake import Problem, remake

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.question.call import Call

_TOLD = 300
"""Characters of what an error says."""


class _NothingToSay(TorchDispatchMode):
    """A mode that changes no operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def run(trial: Trial, *, look: bool = True) -> Outcome:
    """Run a trial and never raise, but for what ends the process.

    Args:
        trial: What to run.
        look: Profile the call, to see whose kernel ran.
    """
    began = time.monotonic()
    with warnings.catch_warnings(action="ignore"):
        try:
            outcome = _run(trial, look=look)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            outcome = Outcome(status="untested", said=_said(error))
        except (ArgumentError, NoBackendError) as error:
            outcome = Outcome(status="untested", said=_said(error), launched=False)
    return outcome.changed(seconds=round(time.monotonic() - began, 3))


def _run(trial: Trial, *, look: bool) -> Outcome:
    traced = TracedCall(
        line=trial.line, device=trial.device, backend=trial.backend or "", memory=trial.memory
    )
    problem, call = remake(traced), traced.call
    values.fill(problem, trial.values)
    want = gate.truth(problem, call)
    if trial.values == "garbage":
        values.spoil(problem, call)
    if trial.past and not _rejects(_decided(problem, trial.backend), trial):
        return Outcome(status="untested", said=f"made again, {trial.past[0]} lets it pass", launched=False)
    with past(trial.past):
        decision = _decided(problem, trial.backend)
        if decision.selected is None:
            return Outcome(status="untested", said=_rejected(decision, trial.backend), launched=False)
        try:
            return _held(trial, problem, call, want, decision, look=look)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a kernel that raises is a result
            return _raised(error, trial.device)


def _held(
    trial: Trial,
    problem: Problem,
    call: Call,
    want: dict[str, torch.Tensor],
    decision: Decision,
    *,
    look: bool,
) -> Outcome:
    """Run the kernel and compare what it gives with what is true."""
    ran: list[str] = []
    listener = lambda route, _: ran.append(route.choice.backend)  # noqa: E731
    replaced: list[launch.Replaced] = []
    note = replaced.append
    routes.LISTENERS.append(listener)
    launch.listen(note)
    try:
        with gate.deterministic(call):
            attend = partial(gate.run, problem, trial.backend, _way(call))
            attend = partial(_captured, attend) if call.context.cuda_graph else attend
            # Where a row is lifted each process is new, and looking at the device would take it a second.
            device = "cpu" if trial.past else trial.device
            got, seen = watched(attend, device) if look else (attend(), None)
    finally:
        routes.LISTENERS.remove(listener)
        launch.unlisten(note)
    backend = trial.backend or decision.selected or ""
    if replaced or set(ran) != {backend}:
        said = f"{replaced[0].instead}: {replaced[0].reason}" if replaced else f"{', '.join(set(ran))} ran"
        return Outcome(status="refused", said=shortened(said, _TOLD), ran=(ran or [""])[0])
    if seen is not None:
        helpers = ["chunked"] if "backward_from_chunked" in decision.verdict(backend).repairs else []
        if said := stranger(seen, backend, load(settings.current().tables), helpers):
            return Outcome(status="refused", said=shortened(said, _TOLD), ran=backend)
    error = wrong(problem, call, got, want)
    kernels = own_kernels(seen, backend) if seen is not None else ()
    return Outcome(status="wrong" if error else "right", said=error, ran=backend, kernels=kernels)


def _decided(problem: Problem, backend: str | None) -> Decision:
    policy = merge(settings.current(), Policy(tuning=False))
    policy = policy if backend is None else merge(policy, Policy(require=backend))
    return routes.decision_of(take(problem.given), policy)


def _rejects(decision: Decision, trial: Trial) -> bool:
    """Return whether the first row that is lifted keeps the call from its backend, made again as it is."""
    verdicts = [verdict for verdict in decision.verdicts if verdict.backend == trial.backend]
    found = [f for v in verdicts for f in v.findings if f.rule == trial.past[0]]
    return any(f.outcome == "fail" or f.repaired_by for f in found)


def _rejected(decision: Decision, backend: str | None) -> str:
    verdicts = [verdict for verdict in decision.verdicts if verdict.backend == backend]
    rows = [
        f.rule for v in verdicts for f in v.findings if f.outcome in ("fail", "unknown") and not f.repaired_by
    ]
    return f"made again, the call may not run: {', '.join(rows[:3]) or render(decision.call)}"


def _way(call: Call) -> Callable[..., Any]:
    """Return how a call is made that its line says: as it stands, compiled, captured, or below a mode."""
    if call.context.compiled:
        return torch.compile(_called, backend="aot_eager")
    if call.context.dispatch_mode:
        return _below_a_mode
    return attention


def _called(**given: Any) -> Any:
    return attention(**given)


def _captured(run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Capture a first call into a CUDA graph, and return what a replay gives."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    return found


def _below_a_mode(**given: Any) -> Any:
    with _NothingToSay():  # type: ignore[no-untyped-call]
        return attention(**given)


def _raised(error: BaseException, device: str) -> Outcome:
    """Return what an error means: one of the device leaves nothing in this process to be trusted."""
    if isinstance(error, AttnRouteError) and not isinstance(error, KernelRefusedError):
        return Outcome(status="untested", said=_said(error), launched=False)
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as broken:
        return Outcome(status="crashed", said=_said(broken))
    return Outcome(status="refused", said=_said(error), launched=not isinstance(error, KernelRefusedError))


def _said(error: BaseException) -> str:
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), _TOLD)
