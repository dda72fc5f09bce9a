"""Calls inside of `context_parallel()`: a ring where a kernel can, else tokens are exchanged for heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from attnroute.api import routes
from attnroute.api.intake import take
from attnroute.api.keys import key_of
from attnroute.api.validate import check
from attnroute.distributed import consensus, ring, ring_steps, ulysses
from attnroute.distributed.context import Sharding, check_alike, sharding_of
from attnroute.errors import ArgumentError, AttnRouteError, KernelRefusedError, NoBackendError, argument_error
from attnroute.executors.prepare.apply import PER_TENSOR
from attnroute.masks import All, Causal, Dense, Mask
from attnroute.masks.lowered.form import FULL
from attnroute.masks.tracing import is_capturing
from attnroute.memory import Memory
from attnroute.question.nodes import DenseNode, FunctionNode, nested
from attnroute.settings import seeks_consensus

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from attnroute.api.records import Given, Output, Problem, RouteKey
    from attnroute.api.routes import Route
    from attnroute.question.call import Call
    from attnroute.question.host import Host
    from attnroute.question.policy import Policy

_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class Way:
    """How calls of one key go.

    Attributes:
        inner: The settings of the calls that a rank makes.
        group: The ranks.
        routes: Of each kind of step of the ring; empty where the ring has no kernel.
        ring: How calls go round; None likewise.
        why_not_ring: Why they do not.
    """

    inner: Policy
    group: ProcessGroup
    routes: dict[ring_steps.Kind, Route] = field(default_factory=dict)
    ring: ring_steps.Ring | None = None
    why_not_ring: NoBackendError | None = None


_WAYS: Memory[RouteKey, Way] = Memory(
    _KEPT, f"{__name__}._WAYS", "when a kernel refuses such a call, or its process group is made anew"
)


def run(
    problem: Problem, policy: Policy, key: RouteKey | None, run_whole: Callable[[Given, Policy], Output]
) -> Output:
    """Run a call on this rank's tokens.

    Args:
        problem: The call.
        policy: The settings in force, which name the sharding.
        key: That of the call; None for a tracer's.
        run_whole: Runs a call on whole sequences under other settings.

    Raises:
        ArgumentError: The call has no meaning for a part of sequences, or cannot be shared out.
        NoBackendError: The ring was required, and has no kernel; the message holds every reason.
    """
    sharding = sharding_of(policy.context_parallel or "")
    way = None if key is None else _WAYS.get(key)
    if way is None or way.group is not sharding.group:
        way = _new_way(problem, policy.changed(context_parallel=None), sharding)
        if key is not None:
            _WAYS.put(key, way)
    if way.ring is None:
        return _by_exchange(problem, way.inner, sharding, run_whole)
    try:
        return _round_the_ring(problem, way.routes["own"], way.ring)
    except KernelRefusedError:
        if key is not None:
            _WAYS.pop(key)
        raise


def described(problem: Problem, policy: Policy) -> tuple[Problem, Policy]:
    """Return the call that a kernel of this rank gets, and settings that say why it is that one.

    Raises:
        ArgumentError: The call has no meaning for a part of sequences, or cannot be shared out.
        NoBackendError: The ring was required, and has no kernel.
    """
    sharding = sharding_of(policy.context_parallel or "")
    inner, says = policy.changed(context_parallel=None), policy.origin_of("context_parallel")
    _check(problem, sharding)
    way = _way(problem, inner, sharding)
    if way.routes:
        return _of_ring(problem, sharding), _said(inner, sharding._replace(method="ring"), says)
    if way.why_not_ring is not None:
        says = f"{says}; the ring {_first_reason(way.why_not_ring)}"
    ulysses.check_heads(problem.query.shape[1], sharding)
    return _of_exchange(problem, sharding), _said(inner, sharding._replace(method="ulysses"), says)


def _of_exchange(problem: Problem, sharding: Sharding) -> Problem:
    """Return the call on whole sequences that a rank makes with its heads, described without an exchange."""
    given = _with_heads(problem, ulysses.heads_of(problem.query.shape[1], sharding))
    query, key, value = (ulysses.like_heads(sharding, t) for t in (problem.query, problem.key, problem.value))
    return take(given._replace(query=query, key=key, value=value))


def _said(policy: Policy, sharding: Sharding, says: str) -> Policy:
    return policy.changed(context_parallel=sharding.name, origin={**policy.origin, "context_parallel": says})


def _first_reason(error: NoBackendError) -> str:
    """Return what a row about steps of the ring says of a call, or else that no kernel takes it."""
    verdicts = () if error.decision is None else error.decision.verdicts
    for finding in (finding for verdict in verdicts for finding in verdict.findings):
        if finding.outcome == "fail" and "/ring-" in finding.rule:
            return f"requires {finding.requires}; got {finding.got}"
    return "has no kernel for the call"


def _new_way(problem: Problem, policy: Policy, sharding: Sharding) -> Way:
    """Return how calls like one go, once all ranks are known to go the same way.

    Raises:
        ArgumentError: The call has no meaning for a part of sequences, or other ranks make another one.
        NoBackendError: The ring was required, and has no kernel.
    """
    error: AttnRouteError | None = None
    way = Way(policy, sharding.group)
    try:
        _check(problem, sharding)
        way = _way(problem, policy, sharding)
        if not way.routes:
            ulysses.check_heads(problem.query.shape[1], sharding)
    except AttnRouteError as found:
        error = found
    # A tracer sends nothing, nor may a capture.
    if not (problem.traced or is_capturing(problem.query)):
        said = "an error" if error else "ring" if way.routes else "ulysses"
        try:
            check_alike(
                sharding, tuple(tuple(t.shape) for t in (problem.query, problem.key, problem.value)), said
            )
        except ArgumentError as differ:
            error = error or differ
    if error is not None:
        raise error
    if seeks_consensus() and not is_capturing(problem.query):
        # All ranks come here, or none: they went the same way so far.
        host, runs = _runs(problem, way, sharding)
        consensus.seek_among(sharding, problem.given, host, runs, traced=problem.traced)
    return way


def _runs(problem: Problem, way: Way, sharding: Sharding) -> tuple[Host, list[tuple[str, Call]]]:
    """Return the machine, and what this rank would run: each kind of step of a ring, or the whole call."""
    if way.routes:
        choices = [route.choice for route in way.routes.values()]
        return choices[0].host, [(choice.backend, choice.call) for choice in choices]
    decision = routes.decision_of(_of_exchange(problem, sharding), way.inner)
    return decision.host, [(decision.selected or "none", decision.call)]


def _check(problem: Problem, sharding: Sharding) -> None:
    """Check what does not speak of whole sequences."""
    if problem.given.layout == "thd":
        required, got = (
            '"bhsd" or "bshd" inside of context_parallel()',
            "thd, whose sequences would end on other ranks",
        )
        to_do = (
            "pass the tokens as one row of layout bshd, and masks.Documents(cu_seqlens=...) of all of them"
        )
        raise argument_error("layout", required, got, to_do)
    given, lengths = _without_masks(problem.given), (problem.query.shape[-2], problem.key.shape[-2])
    check(replace(problem, given=given, mask=None, bias=None, is_causal=False, window=None))
    for name, length in zip(("query", "key"), lengths, strict=True):
        if sharding.load_balance and length % 2:
            required = f"an even number of tokens on each of the {sharding.size} ranks with load_balance"
            to_do = f"pad sequences to a multiple of {sharding.chunks} tokens"
            raise argument_error(name, required, length, to_do)


def _without_masks(given: Given) -> Given:
    return given._replace(mask=None, bias=None, is_causal=False, causal_alignment=None, window=None)


def _way(problem: Problem, policy: Policy, sharding: Sharding) -> Way:
    if sharding.method == "ulysses":
        return Way(policy, sharding.group)
    try:
        found = _routes(problem, policy, sharding)
    except NoBackendError as error:
        if sharding.method == "ring":
            raise
        return Way(policy, sharding.group, why_not_ring=error)
    kernels = {kind: _kernel(route) for kind, route in found.items()}
    causal = "first_keys" in kernels or kernels["own"].mask.band_hi is not None
    made = ring_steps.Ring.of(sharding, kernels, problem.key, problem.value, causal=causal)
    return Way(policy, sharding.group, found, made)


def _kernel(route: Route) -> ring_steps.Kernel:
    pair: Any = route.executor.pair
    return ring_steps.Kernel(pair, route.plan, FULL if route.mask is None else route.mask)


def _routes(problem: Problem, policy: Policy, sharding: Sharding) -> dict[ring_steps.Kind, Route]:
    """Return a route for each kind of step, all of one backend.

    Raises:
        NoBackendError: No backend can run all steps.
    """
    whole = _of_ring(problem, sharding)
    while True:
        first = _route(whole, policy)
        backend, causal = first.plan.backend, first.mask is not None and first.mask.band_hi is not None
        found: dict[ring_steps.Kind, Route] = {"own": first}
        origin = {**policy.origin, "require": "the first step of the ring"}
        same = policy.changed(require=backend, allow=None, prefer=(), origin=origin)
        try:
            for kind in ring_steps.kinds(
                causal=causal, load_balance=sharding.load_balance, size=sharding.size
            )[1:]:
                query, key, value = ring_steps.part(kind, whole.query, whole.key, whole.value)
                given = _without_masks(whole.given)
                step = replace(
                    whole, given=given, query=query, key=key, value=value, mask=None, is_causal=False
                )
                found[kind] = _route(step, same)
        except NoBackendError:
            if policy.require is not None:
                raise
        else:
            if all(PER_TENSOR.issuperset(route.plan.repairs) for route in found.values()):
                return found
        origin = {**policy.origin, "ban": "a step of the ring that it cannot run"}
        policy = policy.changed(ban=(*policy.ban, backend), origin=origin)


def _of_ring(problem: Problem, sharding: Sharding) -> Problem:
    """Return a call as the ring makes it; one with masks or biases of whole sequences is described so."""
    query, key, value = problem.query, ring_steps.dense(problem.key), ring_steps.dense(problem.value)
    nodes = () if problem.whole_mask is None else problem.whole_mask.nodes
    if problem.bias is not None or not all(isinstance(node, Causal) for node in nodes):
        query, key, value = (_as_long(t, sharding.size) for t in (query, key, value))
    given = problem.given._replace(return_lse=True)
    return replace(problem, given=given, query=query, key=key, value=value, distributed="ring")


def _as_long(tensor: Tensor, size: int) -> Tensor:
    """Return what has the shape of whole sequences, and is only described."""
    return tensor[:, :, :1].expand(-1, -1, size * tensor.shape[2], -1)


def _route(problem: Problem, policy: Policy) -> Route:
    if problem.traced:
        return routes.trace(problem, policy)
    key = key_of(problem, policy)
    key = key._replace(policy=("ring", key.policy))
    return routes.lookup(key) or routes.make(problem, policy, key)


def _round_the_ring(problem: Problem, route: Route, whole: ring_steps.Ring) -> Output:
    def round_() -> Output:
        out, lse = ring.attend(problem.query, problem.key, problem.value, whole, problem.scale)
        return problem.in_given_layout(out, lse)

    return routes.heard(route, problem, round_)


def _by_exchange(
    problem: Problem, policy: Policy, sharding: Sharding, run_whole: Callable[[Given, Policy], Output]
) -> Output:
    heads = problem.query.shape[1]
    given = _with_heads(problem, ulysses.heads_of(heads, sharding))
    query, key, value = ulysses.to_heads(sharding, problem.query, problem.key, problem.value)
    out, lse = run_whole(given._replace(query=query, key=key, value=value), policy)
    out = ulysses.to_tokens(sharding, out)
    if lse is not None:
        lse = ulysses.to_tokens(sharding, lse.detach())
    return problem.in_given_layout(out, lse)


def _with_heads(problem: Problem, heads: slice) -> Given:
    """Return the arguments for some of the heads.

    Raises:
        ArgumentError: A mask or bias is a function that may tell heads apart by their index.
    """
    given, number = problem.given, problem.query.shape[1]
    if problem.score_mod is not None:
        raise _indexed("bias", "a score function, which is given the index of a head")
    mask: Any = problem.mask
    if isinstance(mask, Mask):
        extent = problem.extent._replace(seqlen_q=0, seqlen_kv=0)
        mask = All(tuple(_node_with_heads(node, heads, number, extent) for node in mask.nodes))
    elif mask is not None:
        mask = _tensor_with_heads(mask, heads, number)
    return given._replace(
        mask=mask,
        bias=_tensor_with_heads(problem.bias, heads, number),
        is_causal=problem.is_causal,
        window=problem.window,
        scale=problem.scale,
        sink=None if given.sink is None else given.sink[..., heads],
        alibi_slopes=None if given.alibi_slopes is None else given.alibi_slopes[..., heads],
        layout="bhsd",
        backend=None,
        prefer=None,
    )


def _tensor_with_heads(tensor: Tensor | None, heads: slice, number: int) -> Tensor | None:
    """Return the part of a mask or bias for some heads: the dimension of heads is its third last."""
    if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != number or number == 1:
        return tensor
    return tensor[..., heads, :, :]


def _node_with_heads(node: Mask, heads: slice, number: int, extent: Any) -> Mask:
    if isinstance(node, Dense):
        return Dense(_tensor_with_heads(node.tensor, heads, number))  # type: ignore[arg-type] # It is a tensor.
    for found in nested(node.describe(extent)):
        if isinstance(found, FunctionNode) and found.per_head:
            raise _indexed("mask", f"{node!r}, which is given the index of a head")
        if isinstance(found, DenseNode) and found.shape[1:2] == (number,) and number > 1:
            raise _indexed("mask", f"{node!r}, a tensor for each head inside of another mask")
    return node


def _indexed(argument: str, got: str) -> ArgumentError:
    required = "what is the same for all heads, as each rank has some of them"
    to_do = "pass a tensor, or masks.Function(..., per_head=False) where a mask function reads no head"
    return argument_error(argument, required, got, to_do)
