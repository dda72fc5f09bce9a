"""Runs one trial in this process: makes the call, computes the truth, runs the kernel, compares."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute import settings
from attnroute.api import routes
from attnroute.api.attention import attention
from attnroute.api.intake import take
from attnroute.api.question import call_of
from attnroute.api.recording import TracedCall
from attnroute.conformance import dropout, values
from attnroute.conformance.judge import wrong
from attnroute.conformance.kernels import own_kernels, stranger, watched
from attnroute.conformance.past import past
from attnroute.conformance.trials import Outcome, Trial
from attnroute.engine.evaluate import Form, outcomes_of, prepared
from attnroute.errors import (
    ArgumentError,
    AttnRouteError,
    KernelRefusedError,
    NoBackendError,
    RerouteWarning,
    shortened,
)
from attnroute.executors import launch
from attnroute.probes.torch_host import host_of
from attnroute.question.call import Context
from attnroute.question.normalize import normalize
from attnroute.tables.load import load
from attnroute.tuning import gate
from attnroute.tuning.remake import Problem, remake

if TYPE_CHECKING:
    from attnroute.api.choices import Choice
    from attnroute.api.records import Output
    from attnroute.api.routes import Route
    from attnroute.question.call import Call

_LARGE = 2**26
"""Elements of an output beyond which a call is made once: such calls wait for each other."""
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
    with warnings.catch_warnings(record=True, action="always") as heard:
        try:
            outcome = _run(trial, look=look)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            outcome = Outcome(status="untested", said=_said(error))
        except (ArgumentError, NoBackendError) as error:
            outcome = Outcome(status="untested", said=_unable(error, trial))
    reroutes = [str(w.message) for w in heard if isinstance(w.message, RerouteWarning)]
    if reroutes and outcome.status == "right":
        outcome = outcome.changed(status="refused", said=shortened(reroutes[0], _TOLD))
    return outcome.changed(seconds=round(time.monotonic() - began, 3))


def _run(trial: Trial, *, look: bool) -> Outcome:
    traced = TracedCall(
        line=trial.line, device=trial.device, backend=trial.backend or "", memory=trial.memory
    )
    if traced.call.context.cuda_graph and trial.device == "cpu":
        return Outcome(status="untested", said="graphs are captured on CUDA devices")
    problem, call = remake(traced), traced.call
    values.fill(problem, trial.values)
    if call.dropout_p and (call.context.compiled or call.context.cuda_graph):
        return Outcome(status="untested", said="what is dropped is read off eager calls only")
    is_plain = trial.values in ("usual", "zeros") and not call.strides.kv_heads_expanded
    if call.dropout_p and not dropout.is_readable(call) and not is_plain:
        said = "so many dropped weights are told from normal numbers with heads of their own only"
        return Outcome(status="untested", said=said)
    # What is dropped only the kernel knows.
    want = {} if call.dropout_p else gate.truth(problem, call)
    if trial.values == "garbage":
        values.spoil(problem, call)
    with gate.deterministic(call):
        is_rejected = not trial.past or _rejects(problem, call, trial)
    if not is_rejected:
        return Outcome(status="untested", said=f"made again, {trial.past[0]} lets it pass")
    with past(trial.past), gate.deterministic(call):
        try:
            return _held(trial, problem, call, want, look=look)
        except (torch.OutOfMemoryError, ArgumentError, NoBackendError):
            raise
        except Exception as error:  # noqa: BLE001 - a kernel that raises is a result
            return _raised(error, trial.device)


def _held(
    trial: Trial,
    problem: Problem,
    call: Call,
    want: dict[str, torch.Tensor],
    *,
    look: bool,
) -> Outcome:
    """Run the kernel and compare what it gives with what is true."""
    run = partial(_kernel, problem, trial.backend, call)
    ran: list[Choice] = []

    def listener(route: Route, _: object, attend: Callable[[], Output]) -> Output:
        output = attend()
        ran.append(route.choice)
        return output

    replaced: list[launch.Replaced] = []
    note = replaced.append
    routes.LISTENERS.append(listener)
    launch.listen(note)
    try:
        attend = partial(_captured, run) if call.context.cuda_graph else partial(run, call.dropout_p)
        # Where a row is lifted each process is new, and looking at the device would take it a second.
        device = "cpu" if trial.past else trial.device
        got, seen = watched(attend, device) if look else (attend(), None)
    finally:
        routes.LISTENERS.remove(listener)
        launch.unlisten(note)
    names = {choice.backend for choice in ran}
    backend = trial.backend or min(names, default="")
    if replaced or names != {backend}:
        said = f"{replaced[0].instead}: {replaced[0].reason}" if replaced else f"{', '.join(names)} ran"
        return Outcome(status="refused", said=shortened(said, _TOLD), ran=min(names, default=""))
    if seen is not None:
        helpers = ["chunked"] if any("backward_from_chunked" in choice.repairs for choice in ran) else []
        if said := stranger(seen, backend, load(settings.current().tables), helpers):
            return Outcome(status="refused", said=shortened(said, _TOLD), ran=backend)
    check = partial(dropout.wrong, problem, call, run) if call.dropout_p else _beside(problem, call, want)
    error = check(got) or _repeated(trial, call, run, check, got)
    kernels = own_kernels(seen, backend) if seen is not None else ()
    return Outcome(status="wrong" if error else "right", said=error, ran=backend, kernels=kernels)


def _beside(
    problem: Problem, call: Call, want: dict[str, torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], str]:
    return lambda got: wrong(problem, call, got, want)


def _kernel(problem: Problem, backend: str | None, call: Call, dropout_p: float) -> dict[str, torch.Tensor]:
    """Run a call's kernel on what its tensors hold, always with the same seed."""
    if call.dropout_p:
        torch.manual_seed(0)
    return gate.run(problem, backend, _way(call), dropout_p=dropout_p)


def _repeated(
    trial: Trial,
    call: Call,
    run: Callable[[float], dict[str, torch.Tensor]],
    check: Callable[[dict[str, torch.Tensor]], str],
    first: dict[str, torch.Tensor],
) -> str:
    """Return what is wrong with a call that repeats an earlier one and goes the short way; "" = nothing."""
    is_large = max(t.numel() for t in first.values()) > _LARGE
    if trial.values != "usual" or call.context != Context() or is_large:
        return ""
    second = run(call.dropout_p)
    apart = (
        [name for name in first if not torch.equal(first[name], second[name])] if call.deterministic else []
    )
    if apart:
        return f"two deterministic calls require the same {apart[0]} to the last bit; got others"
    said = check(run(call.dropout_p))
    return said and f"the first call is right, the third is not: {said}"


def _rejects(problem: Problem, call: Call, trial: Trial) -> bool:
    """Return whether the first row that is lifted rejects the call as it was made again."""
    tables, taken = load(settings.current().tables), take(problem.given)
    rows = prepared(tables, host_of(*taken.device, tables.providers))[trial.backend or ""]
    row = tuple(row for row in rows.rows or () if row.id == trial.past[0])
    made = normalize(call_of(taken, recognize=True)).changed(context=call.context)
    return outcomes_of(replace(rows, rows=row), Form(made)) == ["fail"]


def _unable(error: AttnRouteError, trial: Trial) -> str:
    """Return why a call may not run: the rows that reject it, or what means nothing about it."""
    decision = getattr(error, "decision", None)
    verdicts = [] if decision is None else [v for v in decision.verdicts if v.backend == trial.backend]
    failed = [f for v in verdicts for f in v.findings if f.outcome in ("fail", "unknown")]
    rows = [f.rule for f in failed if f.repaired_by is None]
    return f"made again, it is rejected by {', '.join(rows[:3])}" if rows else _said(error)


def _way(call: Call) -> Callable[..., Any]:
    """Return how a call is made that its line says: as it stands, compiled, captured, or below a mode."""
    if call.context.compiled:
        # What an earlier trial compiled for the same function would run in place of this one.
        torch.compiler.reset()
        return torch.compile(_called, backend="aot_eager")
    if call.context.dispatch_mode:
        return _below_a_mode
    return attention


def _called(**given: Any) -> Any:
    return attention(**given)


def _captured(run: Callable[[float], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Capture a first call into a CUDA graph, and return what a replay gives."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(0.0)
    graph.replay()
    return found


def _below_a_mode(**given: Any) -> Any:
    with _NothingToSay():  # type: ignore[no-untyped-call]
        return attention(**given)


def _raised(error: BaseException, device: str) -> Outcome:
    """Return what an error means: one of the device leaves nothing in this process to be trusted."""
    if isinstance(error, AttnRouteError) and not isinstance(error, KernelRefusedError):
        return Outcome(status="untested", said=_said(error))
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as broken:
        return Outcome(status="crashed", said=_said(broken))
    return Outcome(status="refused", said=_said(error))


def _said(error: BaseException) -> str:
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), _TOLD)
