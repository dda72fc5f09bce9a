"""Ulysses: ranks exchange tokens for heads, so that each attends over whole sequences with some of the heads.

Before attention each rank has all heads of its tokens, and after the exchange all tokens of its heads; after
attention the output goes back. Both are one all-to-all, and each is the other's backward.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnroute.distributed.context import Sharding
from attnroute.errors import argument_error
from attnroute.executors.batched_gradients import differentiable_once
from attnroute.masks.tracing import is_traced


def check_heads(num_heads_q: int, sharding: Sharding) -> None:
    """Raise an ArgumentError where the query heads cannot be shared out equally."""
    if num_heads_q % sharding.size:
        required = f"a number of heads that the {sharding.size} ranks of the mesh divide"
        to_do = "spread over fewer ranks, or make a causal or full call, which the ring takes"
        raise argument_error("query", required, num_heads_q, to_do)


def heads_of(num_heads_q: int, sharding: Sharding) -> slice:
    """Return the query heads of this rank."""
    own = num_heads_q // sharding.size
    return slice(sharding.rank * own, (sharding.rank + 1) * own)


def to_heads(sharding: Sharding, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of all tokens, in the order of the sequence.

    Key/value heads that the ranks do not divide are repeated before, as often as is needed for each rank to
    have those of its query heads; the gradients of the copies are summed.

    Args:
        sharding: The ranks.
        query: (batch, num_heads_q, tokens of this rank, head_dim_qk).
        key: (batch, num_heads_kv, tokens of this rank, head_dim_qk).
        value: (batch, num_heads_kv, tokens of this rank, head_dim_v).
    """
    copies = sharding.size // gcd(key.shape[1], sharding.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    found: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(sharding, query, key, value)  # type: ignore[no-untyped-call]
    return found


def like_heads(sharding: Sharding, tensor: Tensor) -> Tensor:
    """Return a tensor that lies as one of `to_heads` does, with nothing in it."""
    batch, heads, tokens, features = tensor.shape
    shape = (tokens * sharding.size, batch, lcm(heads, sharding.size) // sharding.size, features)
    return tensor.new_empty(shape).movedim(0, 2).requires_grad_(tensor.requires_grad)


def to_tokens(sharding: Sharding, tensor: Tensor) -> Tensor:
    """Return all heads of this rank's tokens: (batch, heads, tokens of this rank, ...)."""
    return _ToTokens.apply(sharding, tensor)  # type: ignore[no-untyped-call,no-any-return]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharding: Sharding, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sharding = sharding
        return tuple(_heads_from_tokens(sharding, tensor) for tensor in tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_tokens_from_heads(ctx.sharding, grad) for grad in grads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharding: Sharding, tensor: Tensor) -> Tensor:
        ctx.sharding = sharding
        return _tokens_from_heads(sharding, tensor)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, _heads_from_tokens(ctx.sharding, grad)


def _heads_from_tokens(sharding: Sharding, tensor: Tensor) -> Tensor:
    """Exchange tokens for heads; the result has its tokens outermost in memory, which saves a copy."""
    # To rank, tokens, batch, heads of that rank, features.
    sent = tensor.unflatten(1, (sharding.size, -1)).movedim((1, 3), (0, 1))
    # From rank, the same.
    received = _all_to_all(sharding, sent)
    if sharding.load_balance:
        parts, order = received.unflatten(1, (2, -1)).flatten(0, 1), sharding.order
        tokens = torch.cat([parts[order.index(chunk)] for chunk in range(sharding.chunks)])
    else:
        tokens = received.flatten(0, 1)
    return tokens.movedim(0, 2)


def _tokens_from_heads(sharding: Sharding, tensor: Tensor) -> Tensor:
    """Exchange heads for tokens."""
    tokens = tensor.movedim(2, 0)
    if sharding.load_balance:
        parts = tokens.chunk(sharding.chunks)
        tokens = torch.cat([parts[chunk] for chunk in sharding.order])
    # From rank, tokens of this rank, batch, heads of that rank, features.
    received = _all_to_all(sharding, tokens.unflatten(0, (sharding.size, -1)))
    return received.movedim((0, 1), (1, 3)).flatten(1, 2)


def _all_to_all(sharding: Sharding, tensor: Tensor) -> Tensor:
    """Send row r of a tensor to rank r, and return the rows that arrive, by rank."""
    tensor = tensor.contiguous()
    if is_traced(tensor):
        import torch.distributed._functional_collectives as functional

        received = functional.all_to_all_single(tensor, None, None, sharding.group)
        return functional.wait_tensor(received)  # type: ignore[no-any-return]
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=sharding.group)
    return received
