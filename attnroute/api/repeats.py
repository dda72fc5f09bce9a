"""The short way of a call that repeats an earlier one but for values: few reads, one lookup, the kernel.

A call with another number of keys or another mask object alone, as the first layer of each step of decoding
is, repeats one too, where its class of that number or its form of a mask was seen: it is kept for the other
layers, and nothing is described anew.

What is compared here is all that a route depends on. Sizes, strides, dtypes, devices, gradients and types of
tensors, and autocast, inference mode and functorch's transforms, which torch keeps beside the dispatch keys,
are compared in one call of C++, which dynamo has for its graphs. All else goes the long way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from attnroute.api import checkpoint, lengths, lowering, packed, routes
from attnroute.api.alike import NEW, OF_MASK, alike, apart, of_any_keys, of_form, together
from attnroute.api.families import HAS_GUARDS, Family, guards_of
from attnroute.api.keys import key_of
from attnroute.api.records import Given, Problem
from attnroute.distributed.torchs import STOCK, is_around
from attnroute.errors import KernelRefusedError
from attnroute.executors.prepare.bound import bind, bind_form, in_layout
from attnroute.masks import Mask
from attnroute.masks.kept import Keeper, keeper_of
from attnroute.masks.tracing import is_capturing
from attnroute.memory import Memory
from attnroute.scopes import scope_here
from attnroute.settings import call_policy, environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnroute.api.choices import Choice
    from attnroute.api.records import Output, RouteKey
    from attnroute.api.routes import Route
    from attnroute.executors.prepare.bound import Lower
    from attnroute.executors.protocol import Bound
    from attnroute.question.policy import Policy
    from attnroute.vocabulary import Distributed

_Kind = TypeVar("_Kind")
_KEPT: Final = 4096
_FAMILIES_KEPT: Final = 256
_VARIANTS: Final = 8
"""Kinds of tensors that are told apart under one key: layers on other devices, layers that do not train."""
STEPS_IN_A_ROW: Final = 4
"""After calls of one shape in a row that make so many steps of a model, they are none: the shape stays."""
_saved_tensors_hooks, _backward_pass = checkpoint.saved_tensors_hooks, checkpoint.backward_pass
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_only_deterministic = torch._C._get_deterministic_algorithms


@dataclass(frozen=True, slots=True)
class Repeat:
    """A call that may be repeated.

    Attributes:
        check: Returns whether tensors are of the same kind as its own.
        settings: What the environment and `override()` said.
        route: Its route.
        bound: A shorter way than that of the route, where the kernel has one.
        noted: What is noted of it for recomputes, of a call inside of `override()`; None outside.
        serves_form: That way may be taken with any mask of the form of its own.
    """

    check: Callable[..., bool]
    settings: Policy
    route: Route
    bound: Bound | None
    noted: tuple[RouteKey, object] | None
    serves_form: bool

    def holds_in(self, policy: Policy) -> bool:
        """Return whether a call inside of `override()` repeats it, and is noted as it was."""
        return (
            self.noted is not None and self.settings.key == policy.key and checkpoint.is_noted_as(*self.noted)
        )


_REPEATS: Memory[object, tuple[Repeat, ...]] = Memory(_KEPT, f"{__name__}._REPEATS", "when its backend fails")
_FAMILIES: Memory[object, tuple[Family, ...]] = Memory(
    _FAMILIES_KEPT, f"{__name__}._FAMILIES", "when any backend fails"
)
_LATEST: Memory[str, RouteKey] = Memory(1, f"{__name__}._LATEST", "with the next call that is counted")
"""The last call of a shape that may turn out to last."""


def run(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    sink: Any,
    is_causal: Any,
    window: Any,
    scale: Any,
    rest: tuple[Any, ...] | None,
    *,
    distributed: Distributed | None = None,
) -> Output | None:
    """Run a call that repeats an earlier one; None where it does not, or goes no short way.

    Args:
        query: As for `alike`.
        key: As for `alike`.
        value: As for `alike`.
        mask: As for `alike`.
        bias: As for `alike`.
        sink: As for `alike`.
        is_causal: As for `alike`.
        window: As for `alike`.
        scale: As for `alike`.
        rest: As for `alike`.
        distributed: Its place among the calls of several ranks.
    """
    if (
        _saved_tensors_hooks(False) is not None
        or _backward_pass() != -1
        # The check in C++ sees them too, but torch warns where the address of a tracer's tensor is read.
        or _count_dispatch_modes()
        or _only_deterministic()
        or routes.LISTENERS
        or forward_ad._current_level >= 0
        # The same call outside of torch's block attends to other keys.
        or (functional.scaled_dot_product_attention is not STOCK and is_around())
    ):
        return None
    try:
        place, tensors, keeper = alike(query, key, value, mask, bias, sink, is_causal, window, scale, rest)
        if distributed is not None:
            place = (*place, distributed)
        kept = _REPEATS.entries.get(place)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        # What cannot be read or hashed is malformed, or nothing that is kept.
        return None
    scope = scope_here()
    if kept is not None:
        kept.used, found = True, kept.value
    elif scope is None:
        arguments = (query, key, value, mask, bias, sink, is_causal, window, scale, rest)
        found = _with_news(arguments, place, tensors)
    else:
        return None
    for repeat in found:
        if repeat.check(*tensors) and (
            repeat.settings is environment() if scope is None else repeat.holds_in(scope.policy)
        ):
            if (bound := repeat.bound) is not None:
                attn = mask if bias is None else bias
                out = bound(query, key, value, attn) if sink is None else bound(query, key, value, attn, sink)
                if out is not None:
                    return out, None
            given = together(query, key, value, mask, bias, sink, is_causal, window, scale, rest)
            return _run(repeat.route, given, keeper)
    return None


def keep(given: Given, problem: Problem, route: Route, key: RouteKey) -> None:
    """Keep a call that ran, so that the next one like it goes the short way.

    Args:
        given: The arguments of the call.
        problem: What was made of them.
        route: The route of the problem, under the settings of the environment.
        key: What that is remembered under.
    """
    if not HAS_GUARDS or checkpoint.is_inside() or not _is_simple(given, problem):
        return
    scope = scope_here()
    if scope is None and checkpoint.POLICIES.entries and checkpoint.is_noted(key):
        return
    if route.choice.call.context.cuda_graph or route.choice.host.free_memory is not None:
        # As for routes: what a capture or a want of memory made the choice is not for other calls.
        return
    place, tensors, keeper = alike(*apart(given))
    if place is None:
        return
    place, other = (*place, *filter(None, [problem.distributed])), None  # As `run` does.
    # Bands stand for themselves.
    if isinstance(given.mask, Mask) and scope is None and (keeper is not None or place[OF_MASK] is NEW):
        other = of_form(place, given)
    if place[OF_MASK] is NEW:
        # Nothing is kept under a mask that may be written unnoticed.
        place, other = other, None
    if place is None:
        return
    lower = None if problem.mask is None else lowering.of_any(route, problem)
    made = _kept(problem, route, key, (place, tensors, keeper), lower)
    if made is None or scope is not None:
        return
    if other is not None:
        _add(_REPEATS, other, made)
    if given.layout != "bhsd" or problem.query.shape[-2] >= problem.key.shape[-2]:
        return
    # The first shapes of a family are noted where routes are made.
    of_lengths = lengths.place_of(problem, key) if route.choice.call.context.shapes_vary else None
    if of_lengths is not None and _family(place, tensors, given.mask) is None:
        family = Family(tensors, (of_lengths, True), route.choice.host.arch)
        _add(_FAMILIES, of_any_keys(place, given.mask), family)


def _with_news(arguments: tuple[Any, ...], place: Any, tensors: tuple[Any, ...]) -> tuple[Repeat, ...]:
    """Keep and return the repeat of a call that is new in its mask object or its number of keys alone.

    None where it is in more.
    """
    mask, keeper, key = arguments[3], None, None
    if place is None or checkpoint.POLICIES.entries:
        return ()
    is_object = mask is not None and isinstance(mask, Mask)
    like = _of_form(together(*arguments), place, tensors) if is_object else None
    if like is None:
        family = _family(place, tensors, mask)
        route = None if family is None else family.route_of(tensors[1].shape[2])
    else:
        route = like.route
    if route is None or is_capturing(tensors[0]):
        return ()
    if is_object:
        keeper = keeper_of(mask)
        if keeper is None:
            return () if like is None or not like.serves_form or like.route.choice.repaid_after else (like,)
        place = (*place[:OF_MASK], keeper.token, *place[OF_MASK + 1 :])
    problem = _problem(route, together(*arguments))
    # One padding is not met often enough at a new number of keys, but others of its form may have been.
    lasts = mask is None or like is not None or lengths.LASTING.entries
    if route.choice.repaid_after is not None and lasts:
        key = key_of(problem, call_policy(problem.given.backend, problem.given.prefer))
        if lengths.LASTING.get(key):
            return ()
    made = like
    if like is not None and like.serves_form:
        _add(_REPEATS, place, like)
    else:
        made = _kept(problem, route, key, (place, tensors, keeper))
    return () if made is None else (made,)


def _of_form(given: Given, place: Any, tensors: tuple[Any, ...]) -> Repeat | None:
    """Return what a call repeats but for its mask object."""
    other = of_form(place, given)
    found = () if other is None else _REPEATS.get(other) or ()
    return next((r for r in found if r.check(*tensors) and r.settings is environment()), None)


def _family(place: object, tensors: tuple[Any, ...], mask: object) -> Family | None:
    """Return the family of a call that has a place."""
    if mask is not None and not lengths.is_padding(mask, tensors[1]):
        return None
    found = _FAMILIES.get(of_any_keys(place, mask)) or ()
    return next((family for family in found if family.has(tensors)), None)


def _kept(
    problem: Problem,
    route: Route,
    key: RouteKey | None,
    where: tuple[object, tuple[Any, ...], Keeper | None],
    lower: Lower | None = None,
) -> Repeat | None:
    """Keep a call in its place; None where its tensors are none that can be compared.

    Args:
        problem: The call.
        route: Its route.
        key: That of the route; needed where the call may have another one, once its shape came back often.
        where: Its place, tensors and keeper.
        lower: Lowers any mask of the form of its own; None where others are not expected.
    """
    given, (place, tensors, keeper) = problem.given, where
    check = guards_of(tensors)
    if not check(*tensors):
        return None
    attn = given.mask if given.bias is None else given.bias
    inputs, bound = routes.inputs_of(route, problem, keeper), None
    if lower is not None:
        bound = bind_form(route.executor, inputs, route.plan, attn, lower)
    serves_form = bound is not None
    # What is known of a tensor without a token is its form alone.
    if bound is None and (keeper is not None or not isinstance(problem.mask, Tensor)):
        bound = bind(route.executor, inputs, route.plan, attn)
    if bound is not None and given.layout != "bhsd":
        bound = in_layout(bound, given.layout)
    if route.choice.repaid_after is not None and key is not None:
        bound = _counted(bound, route.choice, key)
    scope = scope_here()
    noted = None if scope is None or key is None else (checkpoint.signature_of(key), key.policy)
    settings = environment() if scope is None else scope.policy
    new = Repeat(check, settings, route, bound, noted, serves_form)
    _add(_REPEATS, place, new)
    return new


def _add(memory: Memory[object, tuple[_Kind, ...]], place: object, new: _Kind) -> None:
    """Keep one more kind of tensors in a place, the newest one first."""
    memory.put(place, (new, *(memory.get(place) or ())[: _VARIANTS - 1]))


def drop(backend: str, concerns: Callable[[Choice], bool]) -> list[Choice]:
    """Drop what is kept of a backend and whose choice `concerns` picks out; return these choices."""
    _FAMILIES.forget()
    _REPEATS.drop(
        lambda kept: any(r.route.choice.backend == backend and concerns(r.route.choice) for r in kept)
    )
    return routes.drop(backend, concerns)


def forget() -> None:
    """Forget every repeat, so that the next call like each goes the long way."""
    _REPEATS.forget()
    _FAMILIES.forget()


def _is_simple(given: Given, problem: Problem) -> bool:
    """Return whether a problem is made of the arguments as they are, and nothing surrounds the call."""
    return (
        problem.given is given
        and problem.transform is None
        and not (problem.dispatch_mode or problem.deterministic or problem.no_values)
        and forward_ad._current_level < 0
        and problem.query.shape[-1] == given.query.shape[-1]
        and (problem.bias is given.bias or problem.bias is given.mask)
        and not torch.is_autocast_enabled(problem.query.device.type)
    )


def _counted(run: Bound | None, choice: Choice, key: RouteKey) -> Bound:
    """Make a way count its calls, which threads may do twice, and end when the shape proves to last.

    That is when its calls would have repaid a plan, or more follow each other than a step of a model has.
    """
    left, row, most = choice.repaid_after or 0, 0, STEPS_IN_A_ROW * choice.policy.calls_per_step

    def counted(*tensors: Tensor | None) -> Tensor | None:
        nonlocal left, row
        left -= 1
        if _LATEST.get("key") is key:
            row += 1
        else:
            _LATEST.put("key", key)
            row = 1
        if left <= 0 or row >= most:
            _end(key, counted)
        return None if run is None else run(*tensors)

    return counted


def _end(key: RouteKey, bound: Bound) -> None:
    """End the way of a shape that lasts: the next call is decided as if shapes did not vary."""
    lengths.LASTING.put(key, True)
    # Every mask of a form has it.
    _REPEATS.drop(lambda kept: any(repeat.bound is bound for repeat in kept))


def _run(route: Route, given: Given, keeper: Keeper | None) -> Output | None:
    """Run a call along its route, without asking what surrounds it; None where its kernel is refused."""
    try:
        return routes.execute(route, _problem(route, given), keeper)
    except KernelRefusedError:
        # On the long way it is refused again, and another backend runs the call.
        return None


def _problem(route: Route, given: Given) -> Problem:
    """Return what a call of a route computes, which repeats one in all but values, and perhaps its keys."""
    mask: Any
    bias: Any
    query, key, value, mask, bias = given[:5]
    if given.layout == "bshd":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(mask, Tensor) and mask.dtype is not torch.bool:
        mask, bias = None, mask
    problem = Problem(
        given,
        query,
        key,
        value,
        mask,
        given.is_causal,
        given.window,
        bias,
        None,
        (),
        given.scale,
        traced=False,
        distributed=route.choice.call.context.distributed,
    )
    if given.layout == "thd":
        packed.pack(problem)
    problem.training = route.plan.training
    return problem
