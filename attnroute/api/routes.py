"""Routes: how calls with one key run, made from a decision, remembered, looked up, executed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from attnroute import settings
from attnroute.api import choices, guards, lengths, lowering
from attnroute.api.choices import Choice
from attnroute.api.keys import key_of
from attnroute.api.question import call_of
from attnroute.api.records import Output, Problem, RouteKey
from attnroute.api.validate import check
from attnroute.engine.classes import Span, class_of_keys, span_of
from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.engine.rounding import rounded_down
from attnroute.executors import first_call, registry
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Executor, Inputs, Plan
from attnroute.masks import Causal, Window
from attnroute.masks.kept import Keeper
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.masks.tracing import is_exporting
from attnroute.memory import Memory
from attnroute.probes.torch_host import free_memory, host_of
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.nodes import AnyNode, FunctionNode, NotNode
from attnroute.question.policy import Policy
from attnroute.report import log
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.machines import machine

if TYPE_CHECKING:
    from collections.abc import Callable

LIKE_KEPT = 256
"""Kinds of calls of which only the number of keys differs."""
NUMBERS_KEPT = 128
"""Classes of that number for each kind."""
ROUTES_KEPT = 4096
"""Routes of calls that are the same but for the values of tensors."""
MUCH_MEMORY = 64 * 2**20
"""Bytes from which on the device is asked whether they are free."""

_PROGRAMMED = (AnyNode, FunctionNode, NotNode)


@dataclass(frozen=True, slots=True)
class Route:
    """The executable outcome of one decision.

    Attributes:
        choice: What was decided.
        plan: How it runs.
        executor: The backend's.
        mask: The lowered mask where no tensor takes part in it, else None: it is then lowered per call.
        recognizes: Dense masks are replaced by what each was recognized as.
        keeps: The lowered mask may be kept with its owner, as it refers neither to that nor to a function.
    """

    choice: Choice
    plan: Plan
    executor: Executor
    mask: LoweredMask | None
    recognizes: bool
    keeps: bool


_ROUTES: Memory[object, Route] = Memory(
    ROUTES_KEPT,
    f"{__name__}._ROUTES",
    "when its backend fails",
)
_LIKE: Memory[object, tuple[Call, Memory[object, Route]]] = Memory(
    LIKE_KEPT,
    f"{__name__}._LIKE",
    "when a backend fails",
)
"""The first of such calls, and the route for each class of numbers of keys."""


LISTENERS: list[Callable[[Route, Problem, Callable[[], Output]], Output]] = []
"""Who runs each call along its route, with what does so, the first one innermost; twice is once."""


def lookup(key: object) -> Route | None:
    """Return the remembered route of a class of calls."""
    return _ROUTES.get(key)


def with_keys(place: object, number: int, arch: str, policy: Policy) -> Route | None:
    """Return the route of a call that differs from earlier ones in its number of keys alone.

    Args:
        place: `lengths.place_of` of such calls.
        number: How many keys there are.
        arch: The architecture of their device.
        policy: The settings in force.

    Returns:
        None where no call of its class was made, or where the device must be asked for free memory.
    """
    like = _LIKE.get(place)
    if like is None:
        return None
    call, routes = like
    route = routes.get(class_of_keys(call.changed(seqlen_kv=number), arch, load(policy.tables)))
    return None if route is None or route.choice.needed_bytes >= MUCH_MEMORY else route


def numbers_from(place: object, number: int, arch: str, policy: Policy) -> Span | None:
    """Return numbers of keys from one on whose classes a few conditions tell; the arguments are the same."""
    like = _LIKE.get(place)
    return None if like is None else span_of(like[0].changed(seqlen_kv=number), arch, load(policy.tables))


def drop(backend: str, concerns: Callable[[Choice], bool]) -> list[Choice]:
    """Drop the routes to a backend whose choice `concerns` picks out; return these choices."""
    _LIKE.forget()
    gone = _ROUTES.drop(lambda route: route.choice.backend == backend and concerns(route.choice))
    return [route.choice for route in gone] + choices.drop(backend, concerns)


def make(problem: Problem, policy: Policy, key: RouteKey, *, is_free: bool = True) -> Route:
    """Decide and remember, but for what a want of memory or a capture made the choice.

    Args:
        problem: The call.
        policy: The settings in force.
        key: What the route is remembered under.
        is_free: The free memory counts; it does not near a checkpoint, whose recompute must choose alike.

    Raises:
        ArgumentError: The arguments mean nothing.
        NoBackendError: No backend may run the call; the message holds every reason.
    """
    varies, place = lengths.note_shape(problem, key), lengths.place_of(problem, key)
    place = None if place is None else (place, varies)
    like = None if place is None else _LIKE.get(place)
    call, host, tables = _question(problem, policy, None if like is None else like[0], shapes_vary=varies)
    number, routes = None, None
    if place is not None:
        number = class_of_keys(call, host.arch, tables)
        routes = _LIKE.keep(place, lambda: (call, Memory(NUMBERS_KEPT)))[1] if like is None else like[1]
    known = None if routes is None or number is None else routes.get(number)
    choice = choices.chosen(call, host, tables, policy) if known is None else known.choice
    if is_free and (free := _wanting(choice, problem)) is not None:
        host = host.model_copy(update={"free_memory": rounded_down(free)})
        choice = choices.chosen(call, host, tables, policy)
    route = _route(problem, call, choice) if known is None or known.choice is not choice else known
    # What is chosen while a CUDA graph is captured may compile nothing, and memory may be free again; other
    # calls may choose otherwise.
    if not call.context.cuda_graph and host.free_memory is None:
        _ROUTES.put(key, route)
        if routes is not None and number is not None and choices.is_shared(choice.backend, tables):
            routes.put(number, route)
    return route


def _wanting(choice: Choice, problem: Problem) -> int | None:
    """Return the free memory where a choice needs more; None where it does not, or nobody knows.

    The device is asked only where much is needed, as that takes some microseconds.
    """
    if choice.needed_bytes < MUCH_MEMORY or choice.call.context.cuda_graph:
        return None
    free = free_memory(*problem.device)
    return free if free is not None and choice.needed_bytes > free else None


def trace(problem: Problem, policy: Policy) -> Route:
    """Decide for the tensors of a tracer; the lengths that it leaves open stay open as far as rows allow.

    Raises:
        ArgumentError: The arguments mean nothing.
        NoBackendError: No backend may run the call; the message holds every reason.
    """
    call, host, tables = _question(problem, policy)
    extent = problem.extent
    if is_exporting():
        # An exported program is never traced anew, so what is chosen must do for every length.
        call = guards.open_lengths(call, extent)
        return _route(problem, call, choices.chosen(call, host, tables, policy))
    choice, decision = choices.decided(call, host, tables, policy)
    guards.guard_decision(decision.model_copy(update={"call": call}), extent, tables)
    return _route(problem, call, choice)


def decision_of(problem: Problem, policy: Policy, *, advise: bool = False) -> Decision:
    """Check the arguments and decide, running nothing.

    Raises:
        ArgumentError: The arguments mean nothing.
    """
    call, host, tables = _question(problem, policy, shapes_vary=_vary(problem, policy))
    choice, decision = choices.explained(call, host, tables, policy, advise=advise)
    if choice is not None and (free := _wanting(choice, problem)) is not None:
        host = host.model_copy(update={"free_memory": free})
        choice, decision = choices.explained(call, host, tables, policy, advise=advise)
    return decision if choice is None or not advise else _with_compile_time(decision, choice, call, problem)


def decision_on(arch: str, problem: Problem, policy: Policy) -> Decision:
    """Check the arguments and decide for another machine, by the name of its architecture or card.

    Raises:
        ArgumentError: The arguments mean nothing, or nothing is called so.
    """
    call, _, tables = _question(problem, policy, shapes_vary=_vary(problem, policy))
    return decide(call, machine(arch, tables, argument="arch"), tables, policy, advise=True)


def _vary(problem: Problem, policy: Policy) -> bool:
    """Return whether shapes vary for `attention()`: as the route of the call says, where there is one."""
    if problem.traced:
        return False
    try:
        key = lengths.lasting(key_of(problem, policy))
        route = lookup(key)
    except (AttributeError, RuntimeError, TypeError):
        # What no key can be made of is malformed, and the checks name the argument.
        return False
    return lengths.do_vary(problem, key) if route is None else route.choice.call.context.shapes_vary


def _with_compile_time(decision: Decision, choice: Choice, call: Call, problem: Problem) -> Decision:
    """Say how long the structure of the call took to compile, where it was compiled already."""
    if not registry.is_imported(_module_of(choice.backend, choice.policy)):
        return decision
    route = _route(problem, call, choice)
    if route.executor.compiled_seconds is None:
        return decision
    seconds = route.executor.compiled_seconds(inputs_of(route, problem), route.plan)
    verdicts = tuple(
        v.model_copy(update={"compiled_seconds": seconds}) if v.backend == choice.backend else v
        for v in decision.verdicts
    )
    return decision.model_copy(update={"verdicts": verdicts})


def _question(
    problem: Problem, policy: Policy, like: Call | None = None, *, shapes_vary: bool = False
) -> tuple[Call, Host, Tables]:
    """Return what is asked about a call; of one like an earlier one only the number of keys is new."""
    tables = load(policy.tables)
    if like is not None:
        call = like.changed(seqlen_kv=problem.key.shape[2])
        return call, host_of(*problem.device, tables.providers), tables
    check(problem)
    # The key of a call inside a transform does not contain what a dense mask was recognized as, and the masks
    # of a tracer have no values to read.
    recognize = policy.recognize and problem.transform is None and not problem.traced
    call = call_of(problem, recognize=recognize, shapes_vary=shapes_vary)
    return call, host_of(*problem.device, tables.providers), tables


def execute(route: Route, problem: Problem, keeper: Keeper | None = None) -> Output:
    """Run one call along its route. The result has the layout of the user's tensors."""
    inputs = inputs_of(route, problem, keeper)
    if not LISTENERS:
        return problem.in_given_layout(*run_repaired(route.executor, inputs, route.plan))
    return heard(
        route,
        problem,
        lambda: problem.in_given_layout(*run_repaired(route.executor, inputs, route.plan)),
    )


def heard(route: Route, problem: Problem, run: Callable[[], Output]) -> Output:
    """Run a call in the hearing of all who listen.

    Args:
        route: Its route.
        problem: The call.
        run: Does what the call does.
    """
    for listener in dict.fromkeys(LISTENERS):
        run = partial(listener, route, problem, run)
    return run()


def inputs_of(route: Route, problem: Problem, keeper: Keeper | None = None) -> Inputs:
    """Return what an executor gets, repairs aside.

    Args:
        route: The route of the call.
        problem: The call.
        keeper: That of the mask, where the caller has it already.
    """
    given = problem.given
    inputs = Inputs(
        problem.query,
        problem.key,
        problem.value,
        FULL if route.mask is None else route.mask,
        None,
        problem.bias,
        None,
        problem.scale,
        given.softcap,
        given.sink,
        given.alibi_slopes,
        given.dropout_p,
        problem.score_mod,
    )
    if route.mask is None:
        lowering.put_into(inputs, route, problem, keeper)
    return inputs


def _route(problem: Problem, call: Call, choice: Choice) -> Route:
    plan = Plan(
        backend=choice.backend,
        repairs=tuple(r for r in choice.repairs if r != "recognize_mask"),
        training=problem.training,
        return_lse=problem.given.return_lse,
        device_type=problem.device[0],
        options=choice.options,
        deterministic=problem.deterministic,
        may_reroute=choice.policy.require is None and not choice.policy.strict,
    )
    if choice.compiles:
        show_compilations(choice.backend)
    recognizes = "recognize_mask" in choice.repairs
    parts = lowering.parts_of(problem.whole_mask, recognizes, problem.extent)
    constant = None
    if all(isinstance(p, Causal | Window) for p in parts):
        constant = lowering.lowered(parts, problem.extent)
    keeps = not isinstance(problem.mask, Tensor) and not any(isinstance(n, _PROGRAMMED) for n in call.mask)
    found = registry.executor(choice.backend, _module_of(choice.backend, choice.policy))
    return Route(choice, plan, found, constant, recognizes, keeps)


def _module_of(backend: str, policy: Policy) -> str:
    return load(policy.tables).backends[backend].module


def show_compilations(backend: str) -> None:
    """Print to stderr from now on when a kernel of a backend is compiled, and for how long."""
    first_call.listen(backend, _print_compilation)


def _print_compilation(backend: str, what: str, seconds: float | None) -> None:
    log.compiling(backend, what, seconds, settings.explain_mode())
