"""From a question to something that runs: decide once per class of calls, remember, look up."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attnroute.api import compiling, failures, guards, recompute
from attnroute.api.question import Arguments, bias_of, call_of, example_of, extent_of, mask_of
from attnroute.api.validate import check_extras, check_tensors
from attnroute.call import AnyNode, Call, FunctionNode, NotNode
from attnroute.engine.classes import class_of
from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.errors import NoBackendError, QuadraticAttentionWarning
from attnroute.executors._inputs import Inputs, Plan
from attnroute.executors._repairs import Run, run_repaired
from attnroute.executors.registry import executor
from attnroute.host import Host
from attnroute.masks import Causal, Dense, Mask, Window
from attnroute.masks.look import look_into
from attnroute.masks.lowered import FULL, LoweredMask
from attnroute.masks.nodes import Extent
from attnroute.masks.ragged import Ragged
from attnroute.masks.tensors import keeper_of
from attnroute.masks.tracing import is_exporting, is_tracing
from attnroute.probes import imports, packages
from attnroute.probes.torch_host import host_of
from attnroute.report.log import announce
from attnroute.report.text import render_failure, render_quadratic
from attnroute.settings import explain_mode
from attnroute.tables.load import Tables, load
from attnroute.vocabulary import SLOW_TIER

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnroute.policy import Policy

ROUTE_LIMIT = 16384
"""Remembered routes; above this the memory starts anew, so that new lengths cannot grow it without end."""

_PROGRAMMED = (AnyNode, FunctionNode, NotNode)

COMPILES = frozenset({"flex", "flex_fa4"})
"""The backends that torch compiles at the first call of a structure."""

Output = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Route:
    """The executable outcome of one decision.

    Attributes:
        decision: What was decided and why, for the first call of its class.
        plan: How it runs.
        run: The backend's executor.
        mask: The lowered mask where no tensor takes part in it, else None: it is then lowered per call.
        seen: Dense tensors are replaced by what a look into them showed, where it showed something.
        keeps: The lowered mask may be kept with its owner, as it holds neither that nor a function.
    """

    decision: Decision
    plan: Plan
    run: Run
    mask: LoweredMask | None
    seen: bool
    keeps: bool


_ROUTES: dict[object, Route] = {}
_CLASSES: dict[object, Decision] = {}


def lookup(key: object) -> Route | None:
    """Return the remembered route of a class of calls."""
    return _ROUTES.get(key)


def forget() -> None:
    """Drop every remembered route, e.g. after tables changed, every remembered failure and forward."""
    _ROUTES.clear()
    _CLASSES.clear()
    failures.forget()
    recompute.forget()


def drop(backend: str, concerns: Callable[[Decision], bool]) -> list[Decision]:
    """Drop the routes to a backend whose decision `concerns` picks out; return these decisions."""
    routes = {key: r.decision for key, r in _ROUTES.copy().items()}
    memories: tuple[tuple[dict[Any, Any], dict[object, Decision]], ...]
    memories = ((_ROUTES, routes), (_CLASSES, _CLASSES.copy()))
    gone = []
    for memory, decisions in memories:
        for key, decision in decisions.items():
            if decision.selected == backend and concerns(decision):
                memory.pop(key, None)
                gone.append(decision)
    return gone


def make(args: Arguments, policy: Policy, key: object) -> Route:
    """Decide and remember.

    Raises:
        ArgumentError: The arguments mean nothing.
        NoBackendError: No backend may run the call; the message holds every reason.
    """
    call, host, tables = _question(args, policy)
    route = _route(args, call, _decided(call, host, tables, policy))
    # What is chosen while a CUDA graph is captured may compile nothing; other calls may.
    if not call.context.cuda_graph:
        _remember(_ROUTES, key, route)
    return route


def trace(args: Arguments, policy: Policy) -> Route:
    """Decide for the tensors of a tracer; the lengths that it leaves open stay open as far as rows allow.

    Raises:
        ArgumentError: The arguments mean nothing.
        NoBackendError: No backend may run the call; the message holds every reason.
    """
    call, host, tables = _question(args, policy)
    extent = extent_of(args)
    if is_exporting():
        # An exported program is never traced anew, so what is chosen must do for every length.
        call = guards.open_lengths(call, extent)
        return _route(args, call, _decided(call, host, tables, policy))
    decision = _decided(call, host, tables, policy)
    guards.hold(decision.model_copy(update={"call": call}), extent, tables)
    return _route(args, call, decision)


def _decided(call: Call, host: Host, tables: Tables, policy: Policy) -> Decision:
    """Return the decision for a class of calls, made once."""
    policy = failures.known(call, host, policy)
    group = class_of(call, host.arch, tables)
    where = None if group is None else (group, host, policy.key, tables)
    decision = _CLASSES.get(where)
    if decision is not None:
        return decision
    decision = _importable(decide(call, host, tables, policy), tables, policy)
    _check(decision, policy)
    announce(decision, explain_mode())
    # The slow tier says its bytes, which every length changes, so each of its calls is decided by itself.
    if where is not None and decision.selected not in SLOW_TIER:
        _remember(_CLASSES, where, decision)
    return decision


def _importable(decision: Decision, tables: Tables, policy: Policy) -> Decision:
    """Decide again for as long as what was selected cannot be imported, which only trying it shows."""
    # A tracer's modes would make fake what packages prepare while they are imported.
    tried: set[str] = set()
    with _disable_current_modes() if is_tracing() else nullcontext():
        while (selected := decision.selected) is not None and imports.settle(selected) is not None:
            if selected in tried:
                # What failed is nothing that it needs by name: its executor says so, and is replaced.
                break
            tried.add(selected)
            broken = {**decision.host.broken, **packages.broken()}
            host = decision.host.model_copy(update={"broken": broken})
            decision = decide(decision.call, host, tables, policy)
    return decision


def _remember(memory: dict[Any, Any], key: object, value: object) -> None:
    if len(memory) >= ROUTE_LIMIT:
        memory.clear()
    memory[key] = value


def _check(decision: Decision, policy: Policy) -> None:
    """Raise when nothing may run, warn when the slow tier would compute many scores."""
    if decision.selected is None:
        raise NoBackendError(render_failure(decision), decision)
    verdict = decision.verdict(decision.selected)
    if decision.selected in SLOW_TIER and verdict.score_bytes > policy.quadratic_limit_bytes:
        warnings.warn(render_quadratic(decision), QuadraticAttentionWarning, stacklevel=6)


def decision_of(args: Arguments, policy: Policy, *, advise: bool = False) -> Decision:
    """Check the arguments and decide, running nothing.

    Raises:
        ArgumentError: The arguments mean nothing.
    """
    call, host, tables = _question(args, policy)
    decision = decide(call, host, tables, failures.known(call, host, policy), advise=advise)
    return _with_compile_time(decision, call, args) if advise else decision


def _with_compile_time(decision: Decision, call: Call, args: Arguments) -> Decision:
    """Say how long the structure of the call took to compile, where it was compiled already."""
    if decision.selected not in COMPILES or not compiling.has_compiled():
        return decision
    route = _route(args, call, decision)
    seconds = compiling.seconds(_inputs(route, args), route.plan)
    verdicts = tuple(
        v.model_copy(update={"compiled_seconds": seconds}) if v.backend == decision.selected else v
        for v in decision.verdicts
    )
    return decision.model_copy(update={"verdicts": verdicts})


def _question(args: Arguments, policy: Policy) -> tuple[Call, Host, Tables]:
    check_tensors(args)
    extent = extent_of(args)
    check_extras(args, extent)
    # The key of a call inside a transform does not hold what a look would find, and a tracer's masks have
    # nothing to look at.
    look = policy.recognize and args.transform is None and not args.traced
    call = call_of(args, example_of(extent), mask_of(args), look=look)
    host = host_of(args.query.device.type, args.query.device.index)
    return call, host, load(policy.tables)


def execute(route: Route, args: Arguments) -> Output:
    """Run one call along its route. Shapes of the result are those of the caller's layout."""
    out, lse = run_repaired(route.run, _inputs(route, args), route.plan)
    if args.layout == "bhsd":
        return out, lse
    if args.layout == "bshd":
        return out.transpose(1, 2), lse
    return out[0].transpose(0, 1), None if lse is None else lse[0]


def _inputs(route: Route, args: Arguments) -> Inputs:
    query, key, value = args.query, args.key, args.value
    if args.layout == "bshd":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    inputs = Inputs(
        query,
        key,
        value,
        FULL if route.mask is None else route.mask,
        None,
        bias_of(args),
        None,
        args.scale,
        args.softcap,
        args.sink,
        args.alibi_slopes,
        args.dropout_p,
    )
    if route.mask is None:
        _lower(inputs, route, args)
    inputs.score_mod = args.score_mod
    return inputs


def _route(args: Arguments, call: Call, decision: Decision) -> Route:
    verdict = decision.verdict(decision.selected or "")
    plan = Plan(
        backend=verdict.backend,
        repairs=tuple(r for r in verdict.repairs if r != "recognize_mask"),
        training=args.training,
        return_lse=args.return_lse,
        device_type=args.query.device.type,
        options=verdict.options,
        deterministic=bool(args.deterministic),
        may_reroute=decision.policy.require is None and not decision.policy.strict,
    )
    if verdict.first_call_seconds is not None:
        compiling.show_progress()
    seen = "recognize_mask" in verdict.repairs
    parts = _parts(mask_of(args), seen, extent_of(args))
    constant = None
    if all(isinstance(p, Causal | Window) for p in parts):
        constant = _lowered(parts, extent_of(args))
    keeps = not isinstance(args.mask, Tensor) and not any(isinstance(n, _PROGRAMMED) for n in call.mask)
    return Route(decision, plan, executor(verdict.backend), constant, seen, keeps)


def _parts(mask: Mask | None, seen: bool, extent: Extent) -> tuple[Mask, ...]:
    """The route is shared by tensors that look the same to a decision, so each is asked what it says."""
    if mask is None or not seen:
        return () if mask is None else mask.nodes
    parts: list[Mask] = []
    for part in mask.nodes:
        found = look_into(part.tensor, extent) if isinstance(part, Dense) else None
        parts.extend((part,) if found is None or found.masks is None else found.masks)
    return tuple(parts)


def _lowered(parts: tuple[Mask, ...], extent: Extent) -> LoweredMask:
    lowered = FULL
    for part in parts:
        lowered = part.lower(lowered, extent)
    return _simplified(lowered, extent)


def _simplified(lowered: LoweredMask, extent: Extent) -> LoweredMask:
    """Open the sides of the band that rule nothing out, as `masks.normalize` does for the decision."""
    # An exported program holds for all lengths, also for those at which the band rules something out.
    if lowered.diagonal is not None or is_exporting():
        return lowered
    low, high = lowered.band_lo, lowered.band_hi
    if 0 in (extent.seqlen_q, extent.seqlen_kv):
        low = high = None
    if low is not None and low <= -(extent.seqlen_q - 1):
        low = None
    if high is not None and high >= extent.seqlen_kv - 1:
        high = None
    return replace(lowered, band_lo=low, band_hi=high)


def _lower(inputs: Inputs, route: Route, args: Arguments) -> None:
    extent = extent_of(args)
    # Before anything makes views of a tensor: then it is plain that the memory is its own.
    keeper = inputs.keeper = keeper_of(_owner(args))

    def make() -> LoweredMask:
        return _lowered(_parts(mask_of(args), route.seen, extent), extent)

    # Tensors that are made inside a transform belong to it.
    if keeper is None or not route.keeps or args.transform is not None or args.traced:
        inputs.mask = make()
        return
    band: object = (args.is_causal, args.window, args.causal_alignment)
    if isinstance(args.mask, Ragged):
        band = (args.mask.left, args.mask.right, args.mask.max_seqlen)
    inputs.mask = keeper.keep(("lowered", extent, band, route.seen), make)


def _owner(args: Arguments) -> object:
    """Return the object that says a mask, the band aside, under which what is prepared from it is kept.

    A packed batch has a new mask object in each call, and its sums stay; of two of them neither says all.
    """
    if args.layout == "thd":
        return args.cu_seqlens_q if len(cast("Mask", args.mask).tensors) == 1 else None
    if isinstance(args.mask, Tensor) and args.mask.dtype != torch.bool:
        return None
    return args.mask
