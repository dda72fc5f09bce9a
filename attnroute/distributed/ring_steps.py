"""How a class of calls goes round a ring, decided once: kernels, steps, messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attnroute.distributed.context import Sharding
from attnroute.executors.prepare.apply import PER_TENSOR, prepare_qkv
from attnroute.executors.protocol import ForwardResult, Inputs, Pair, Plan
from attnroute.masks.lowered.form import LoweredMask
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Work

Kind = Literal["own", "all", "first_keys", "last_queries"]
"""What of a rank's queries meets what of the visiting keys: all of both (those of the rank itself under the
call's mask), the first half of the keys, or the last half of the queries."""

_SEQUENCE: Final = 2
"""The dimension of tokens."""
_APART: Final = 64
"""Values start in a message at a multiple of so many elements: kernels read memory in steps of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes one kind of step.

    Attributes:
        pair: Forward and backward.
        plan: How both run.
        mask: Causal or nothing.
    """

    pair: Pair
    plan: Plan
    mask: LoweredMask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> ForwardResult:
        """Return output, log-sum-exp, and what else the backward takes."""
        result = self.pair.forward(self._inputs(query, key, value, scale), self.plan)
        features = value.shape[-1]
        return result if result.out.shape[-1] == features else result._replace(out=result.out[..., :features])

    def backward(
        self, qkv: tuple[Tensor, Tensor, Tensor], result: ForwardResult, grad_out: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, for an output and log-sum-exp of all keys."""
        inputs, value = self._inputs(*qkv, scale), qkv[2]
        if missing := inputs.value.shape[-1] - value.shape[-1]:
            result = result._replace(out=torch.nn.functional.pad(result.out, (0, missing)))
            grad_out = torch.nn.functional.pad(grad_out, (0, missing))
        grads = self.pair.backward(inputs, self.plan, result, grad_out, (True, True, True, False))
        of_query, of_key, of_value = (
            _like(grad, given)  # type: ignore[arg-type] # All three are wanted.
            for grad, given in zip(grads, qkv, strict=False)
        )
        return of_query, of_key, of_value

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Inputs:
        inputs = Inputs(query, key, value, self.mask, scale=scale)
        if self.plan.repairs:
            prepare_qkv(inputs, PER_TENSOR.intersection(self.plan.repairs))
        return inputs


class Step(NamedTuple):
    """What a rank does while keys and values visit it.

    Attributes:
        kind: What meets what.
        kernel: What computes that; None where the rank only passes keys on.
        passes_on: Keys and values go on to the next rank meanwhile.
    """

    kind: Kind
    kernel: Kernel | None
    passes_on: bool


_View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset."""


@dataclass(frozen=True, slots=True)
class Message:
    """How keys and values, and the sums of their gradients, lie in one message: the same on all ranks.

    Each token's heads lie together, and the values behind the keys: one message costs the host half of two.

    Attributes:
        length: Its elements.
        whole: The keys and the values in it.
        first_half: The same of the first half of the tokens.
    """

    length: int
    whole: tuple[_View, _View]
    first_half: tuple[_View, _View]

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Message:
        """Return how tensors of these shapes lie in a message."""
        start = -(-key.numel() // _APART) * _APART
        whole = _view(key, 0), _view(value, start)
        first, second = (
            ((*size[:2], size[2] // 2, size[3]), strides, offset) for size, strides, offset in whole
        )
        return cls(start + value.numel(), whole, (first, second))

    def write(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return a message of keys and values, and both as they lie in it."""
        message = key.new_empty((self.length,), dtype=dtype)
        keys, values = self.read(message, "all")
        torch._foreach_copy_((keys, values), (key, value))
        return message, (keys, values)

    def read(self, message: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        """Return what of keys and values meets in a kind of step."""
        key, value = self.first_half if kind == "first_keys" else self.whole
        return message.as_strided(*key), message.as_strided(*value)


def _view(tensor: Tensor, offset: int) -> _View:
    batch, heads, tokens, features = tensor.shape
    size, row = (batch, heads, tokens, features), heads * features
    return size, (tokens * row, features, row, 1), offset


@dataclass(frozen=True, slots=True)
class Ring:
    """How a class of calls goes round, from the view of this rank: all of it is decided once.

    Attributes:
        sharding: The ranks.
        steps: What this rank does, step after step.
        message: How keys and values lie in one.
        following: The rank to which messages go, counted over all processes.
        before: That from which they come.
    """

    sharding: Sharding
    steps: tuple[Step, ...]
    message: Message
    following: int
    before: int

    @classmethod
    def of(
        cls, sharding: Sharding, kernels: dict[Kind, Kernel], key: Tensor, value: Tensor, *, causal: bool
    ) -> Ring:
        """Return how calls with keys and values of these shapes go round.

        Args:
            sharding: The ranks.
            kernels: What computes each kind of step that ranks have.
            key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
            value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
            causal: The calls are causal.
        """
        rank, size, halves = sharding.rank, sharding.size, sharding.load_balance
        steps = []
        for number in range(size):
            kind = kind_of(number, rank, causal=causal, halves=halves)
            kernel = None if kind is None else kernels[kind]
            steps.append(Step(kind or "all", kernel, number < size - 1))
        following, before = (dist.get_global_rank(sharding.group, at % size) for at in (rank + 1, rank - 1))
        return cls(sharding, tuple(steps), Message.of(key, value), following, before)

    def start(self, visiting: Tensor | None, sums: Tensor | None = None) -> _UnderWay:
        """Send messages to the next rank, and begin to receive those of the one before; all do so at once.

        Args:
            visiting: Keys and values that go on, None where they end here.
            sums: Gradients of keys and values that go on.
        """
        tensors = visiting if sums is None else sums
        if tensors is None or is_traced(tensors):
            return _UnderWay(_permuted(visiting, self.sharding), _permuted(sums, self.sharding), (), ())
        group, sent = self.sharding.group, (visiting, sums)
        arriving: list[Tensor | None] = [None, None]
        operators = []
        # Messages of both kinds may be under way at once, so each has a tag of its own.
        for tag, own in enumerate(sent):
            if own is not None:
                arriving[tag] = new = torch.empty_like(own)
                operators.append(dist.P2POp(dist.isend, own, self.following, group, tag))
                operators.append(dist.P2POp(dist.irecv, new, self.before, group, tag))
        return _UnderWay(arriving[0], arriving[1], dist.batch_isend_irecv(operators), sent)


class _UnderWay(NamedTuple):
    """Messages under way; nothing that was sent may be freed or written before they are here.

    Attributes:
        visiting: Keys and values that arrive, None where no rank sends such.
        sums: Gradients of keys and values, likewise.
        works: What to wait for.
        sent: What must live until then.
    """

    visiting: Tensor | None
    sums: Tensor | None
    works: Sequence[Work]
    sent: tuple[Tensor | None, ...]

    def finish(self) -> tuple[Any, Any]:
        """Return what arrived; None in the place of what was not sent."""
        for work in self.works:
            work.wait()
        return self.visiting, self.sums


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


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor that lies as in messages: each token's heads together, on all ranks alike."""
    tokens = tensor.transpose(1, 2)
    return tensor if tokens.is_contiguous() else tokens.contiguous().transpose(1, 2)


def part(kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what of query, key and value meets in a kind of step."""
    if kind == "first_keys":
        return query, half(key, 0), half(value, 0)
    if kind == "last_queries":
        return half(query, 1), key, value
    return query, key, value


def half(tensor: Tensor, which: int) -> Tensor:
    """Return the first or the last half of the tokens."""
    tokens = tensor.shape[_SEQUENCE] // 2
    return tensor.narrow(_SEQUENCE, which * tokens, tokens)


def _permuted(tensor: Tensor | None, sharding: Sharding) -> Tensor | None:
    """Return what the rank before sends, for graphs, which know no messages between two ranks."""
    if tensor is None:
        return None
    import torch.distributed._functional_collectives as functional

    following = [(rank + 1) % sharding.size for rank in range(sharding.size)]
    return functional.wait_tensor(functional.permute_tensor(tensor, following, sharding.group))  # type: ignore[no-any-return]


def _like(grad: Tensor, given: Tensor) -> Tensor:
    """Undo padding and repeated key/value heads."""
    if grad.shape[-1] != given.shape[-1]:
        grad = grad[..., : given.shape[-1]]
    if grad.shape[1] != given.shape[1]:
        grad = grad.unflatten(1, (given.shape[1], -1)).sum(2)
    return grad
