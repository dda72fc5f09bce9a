"""Ring attention: keys and values pass from rank to rank, and the partial outputs are merged.

Each rank keeps its queries. In step i it attends to the keys of the rank i places before it, and passes them
on meanwhile. Partial outputs and log-sum-exps (L, O) of two sets of keys make those of both:
``L = logaddexp(L1, L2)`` and ``O = O1 + sigmoid(L2 - L1) * (O2 - O1)``, in float32 or wider.

A kernel's backward makes its weights again as exp(scores - L). Given the L and O of all keys, each step of
the backward gives that step's share of all gradients: those of the queries add up where they are, and those
of keys and values travel on with them, and home after the last step.

Under a causal mask a rank needs no keys of later tokens. With `load_balance` rank r holds chunks r and
2n - 1 - r of 2n ("head-tail"): of an earlier rank's keys all queries need the first half, and of a later
one's the last half of the queries needs all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from attnroute.distributed.context import Sharding
from attnroute.executors.batched_gradients import differentiable_once
from attnroute.executors.prepare.apply import PER_TENSOR, prepare_qkv
from attnroute.executors.protocol import ForwardResult, Inputs, Pair, Plan
from attnroute.executors.strides import fitted
from attnroute.masks.lowered.form import LoweredMask
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from torch.distributed import Work

Kind = Literal["own", "all", "first_keys", "last_queries"]
"""What of a rank's queries meets what of the visiting keys: all of both (those of the rank itself under the
call's mask), the first half of the keys, or the last half of the queries."""

_BACKWARD_TAG: Final = 2
"""Of the first message with gradients; those with keys and values have the tags before."""
_SEQUENCE: Final = 2
"""The dimension of tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel, on queries of this rank and keys of one.

    Attributes:
        pair: Forward and backward.
        plan: How both run.
        mask: Causal or nothing.
        scale: Factor on QK^T; None = head_dim_qk ** -0.5.
    """

    pair: Pair
    plan: Plan
    mask: LoweredMask
    scale: float | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> ForwardResult:
        """Return output, log-sum-exp, and what else the backward takes."""
        result = self.pair.forward(self._inputs(query, key, value), self.plan)
        return result._replace(out=result.out[..., : value.shape[-1]])

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, result: ForwardResult, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, for an output and log-sum-exp of all keys."""
        inputs = self._inputs(query, key, value)
        if missing := inputs.value.shape[-1] - value.shape[-1]:
            result = result._replace(out=torch.nn.functional.pad(result.out, (0, missing)))
            grad_out = torch.nn.functional.pad(grad_out, (0, missing))
        wanted = (True, True, True, False)
        grads = self.pair.backward(inputs, self.plan, result, grad_out, wanted)
        of_query, of_key, of_value = (
            _like(grad, given)  # type: ignore[arg-type] # All three are wanted.
            for grad, given in zip(grads, (query, key, value), strict=False)
        )
        return of_query, of_key, of_value

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        inputs = Inputs(query, key, value, self.mask, scale=scale)
        prepare_qkv(inputs, PER_TENSOR.intersection(self.plan.repairs))
        return inputs


@dataclass(frozen=True, slots=True)
class Ring:
    """How a class of calls goes round.

    Attributes:
        sharding: The ranks.
        causal: The call is causal.
        steps: The kernel for each kind of step that a rank of this sharding may have.
    """

    sharding: Sharding
    causal: bool
    steps: dict[Kind, Step]

    def kind(self, number: int) -> Kind | None:
        """Return what a step of this rank computes; None where it only passes keys on."""
        return kind_of(number, self.sharding.rank, causal=self.causal, halves=self.sharding.load_balance)


def kinds(*, causal: bool, load_balance: bool, size: int) -> tuple[Kind, ...]:
    """Return all kinds of steps that ranks have."""
    if size == 1:
        return ("own",)
    if causal and load_balance:
        return ("own", "first_keys", "last_queries")
    return ("own", "all")


def kind_of(number: int, rank: int, *, causal: bool, halves: bool) -> Kind | None:
    """Return what step `number` of a rank computes, None where nothing."""
    if number == 0:
        return "own"
    if not causal:
        return "all"
    is_earlier = number <= rank
    if halves:
        return "first_keys" if is_earlier else "last_queries"
    return "all" if is_earlier else None


def attend(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Attend to the keys of all ranks.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk): this rank's tokens.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        ring: How.

    Returns:
        This rank's part of the output, and its log-sum-exp, which carries no gradient.
    """
    out, lse = _Ring.apply(ring, query, dense(key), dense(value))  # type: ignore[no-untyped-call]
    return out, lse


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as messages hold it, which all ranks must have alike: each token's heads together."""
    tokens = tensor.transpose(1, 2)
    return tensor if tokens.is_contiguous() else tokens.contiguous().transpose(1, 2)


def part(kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what of query, key and value meets in a kind of step."""
    if kind == "first_keys":
        return query, _half(key, 0), _half(value, 0)
    if kind == "last_queries":
        return _half(query, 1), key, value
    return query, key, value


def _half(tensor: Tensor, which: int) -> Tensor:
    """Return the first or the last half of the tokens."""
    half = tensor.shape[_SEQUENCE] // 2
    return tensor.narrow(_SEQUENCE, which * half, half)


class _Rotation:
    """Tensors under way to the next rank, and others from the one before.

    Messages of two rotations may be under way at once, so each has tags of its own.
    """

    def __init__(self, sharding: Sharding, first_tag: int) -> None:
        self._sharding, self._tag = sharding, first_tag
        self._sent: tuple[Tensor, ...] = ()
        self._received: tuple[Tensor, ...] = ()
        self._works: list[Work] = []

    def start(self, *tensors: Tensor) -> None:
        """Send tensors on, all ranks at once."""
        self._sent = tuple(tensor.transpose(1, 2) for tensor in tensors)
        if is_traced(tensors[0]):
            self._received = tuple(_permuted(tensor, self._sharding) for tensor in self._sent)
            return
        group, rank, size = self._sharding.group, self._sharding.rank, self._sharding.size
        following = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._received = tuple(torch.empty_like(tensor) for tensor in self._sent)
        messages = []
        for tag, (sent, received) in enumerate(zip(self._sent, self._received, strict=True), self._tag):
            messages.append(dist.P2POp(dist.isend, sent, following, group, tag))
            messages.append(dist.P2POp(dist.irecv, received, before, group, tag))
        self._works = dist.batch_isend_irecv(messages)

    def finish(self) -> tuple[Tensor, ...]:
        """Return what arrived; nothing that was sent may be freed or written before."""
        for work in self._works:
            work.wait()
        received = tuple(tensor.transpose(1, 2) for tensor in self._received)
        self._sent, self._received, self._works = (), (), []
        return received


def _permuted(tensor: Tensor, sharding: Sharding) -> Tensor:
    """Return what the rank before sends, for graphs, which know no messages between two ranks."""
    import torch.distributed._functional_collectives as functional

    following = [(rank + 1) % sharding.size for rank in range(sharding.size)]
    received = functional.permute_tensor(tensor.flatten(), following, sharding.group)
    return functional.wait_tensor(received).view(tensor.shape)  # type: ignore[no-any-return]


class _Merged:
    """Output and log-sum-exp of the keys so far, in float32 or wider."""

    out: Tensor
    lse: Tensor

    def add(self, new: ForwardResult, kind: Kind) -> None:
        """Add the keys of a step."""
        if kind == "own":
            self.out = new.out.to(_wide(new.out))
            self.lse = new.lse.to(_wide(new.lse), copy=True)
            return
        out, lse = (_half(t, 1) if kind == "last_queries" else t for t in (self.out, self.lse))
        share = torch.sigmoid(new.lse - lse).to(out.dtype)
        out.lerp_(new.out.to(out.dtype), share.unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, new.lse))


class _Sums:
    """Gradients of query, key and value, in float32 or wider."""

    query: Tensor
    key: Tensor
    value: Tensor

    def add(self, grads: tuple[Tensor, Tensor, Tensor], kind: Kind) -> None:
        """Add the gradients of a step."""
        if kind == "own":
            self.query, self.key, self.value = (dense(grad.to(_wide(grad))) for grad in grads)
            return
        for total, grad in zip(part(kind, self.query, self.key, self.value), grads, strict=True):
            total.add_(grad)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        merged, rests = _Merged(), []
        for kind, visiting in _visits(ring, key, value):
            if kind is not None:
                result = ring.steps[kind].forward(*part(kind, query, *visiting))
                rests.append(result.rest)
                merged.add(result, kind)
        out = merged.out.to(query.dtype)
        ctx.ring, ctx.rests = ring, rests
        ctx.save_for_backward(query, key, value, out, merged.lse)
        ctx.mark_non_differentiable(merged.lse)
        return out, merged.lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        known = (out, lse, fitted(grad_out, out))
        sums = _backward(ctx.ring, (query, key, value), known, ctx.rests)
        return None, sums.query.to(query.dtype), sums.key.to(key.dtype), sums.value.to(value.dtype)


def _visits(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[Kind | None, tuple[Tensor, Tensor]]]:
    """Yield the kind of each step, and the keys and values that visit."""
    rotation, size = _Rotation(ring.sharding, 0), ring.sharding.size
    for number in range(size):
        if number:
            key, value = rotation.finish()
        if number < size - 1:
            rotation.start(key, value)
        yield ring.kind(number), (key, value)


def _backward(
    ring: Ring, qkv: tuple[Tensor, Tensor, Tensor], known: tuple[Tensor, Tensor, Tensor], rests: list[Any]
) -> _Sums:
    """Go round once more.

    Args:
        ring: How.
        qkv: Query, key and value of this rank.
        known: Its output, log-sum-exp and gradient of the output.
        rests: What else the steps of the forward returned, those that computed.
    """
    query, key, value = qkv
    halves = tuple(_without_gaps(_half(t, 1)) for t in known) if "last_queries" in ring.steps else known
    rotation, sums, left = _Rotation(ring.sharding, _BACKWARD_TAG), _Sums(), iter(rests)
    for kind, visiting in _visits(ring, key, value):
        if kind != "own":
            # The gradients of the keys that visit now arrive while their next share is computed.
            rotation.start(sums.key, sums.value)
        grads = None
        if kind is not None:
            out, lse, grad_out = halves if kind == "last_queries" else known
            result = ForwardResult(out, lse, next(left))
            grads = ring.steps[kind].backward(*part(kind, query, *visiting), result, grad_out)
        if kind != "own":
            sums.key, sums.value = rotation.finish()
        if grads is not None and kind is not None:
            sums.add(grads, kind)
    if ring.sharding.size > 1:
        rotation.start(sums.key, sums.value)
        sums.key, sums.value = rotation.finish()
    return sums


def _without_gaps(tensor: Tensor) -> Tensor:
    """Return an output, its gradient or a log-sum-exp as kernels that read no strides take it to lie."""
    return dense(tensor) if tensor.dim() > 3 else tensor.contiguous()  # A log-sum-exp has 3.


def _like(grad: Tensor, given: Tensor) -> Tensor:
    """Undo padding and repeated key/value heads."""
    if grad.shape[-1] != given.shape[-1]:
        grad = grad[..., : given.shape[-1]]
    if grad.shape[1] != given.shape[1]:
        grad = grad.unflatten(1, (given.shape[1], -1)).sum(2)
    return grad
