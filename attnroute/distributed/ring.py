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

from typing import Any, Final, cast

import torch
from torch import Tensor

from attnroute.distributed.ring_steps import Kind, Ring, half
from attnroute.executors.batched_gradients import differentiable_once
from attnroute.executors.protocol import ForwardResult
from attnroute.executors.strides import fitted

_DIMS_OF_LSE: Final = 3


def attend(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of all ranks.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk): this rank's tokens.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        ring: How.
        scale: Factor on QK^T; None = head_dim_qk ** -0.5.

    Returns:
        This rank's part of the output, and its log-sum-exp, which carries no gradient.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _Ring.apply(ring, scale, query, key, value)  # type: ignore[no-untyped-call]
    return out, lse


class _Merged:
    """Output and log-sum-exp of the keys so far, in float32 or wider."""

    out: Tensor
    lse: Tensor
    _owns_lse = False

    def add(self, new: ForwardResult, kind: Kind) -> None:
        """Add the keys of a step."""
        if kind == "own":
            self.out, self.lse = new.out.to(_wide(new.out)), new.lse
            return
        out, lse = self.out, self.lse
        if kind == "last_queries":
            if not self._owns_lse:
                # A kernel's own may lie anyhow, and in memory that is not its own.
                lse = self.lse = lse.clone()
            out, lse = half(out, 1), half(lse, 1)
        share = (new.lse - lse).sigmoid_().to(out.dtype)
        out.lerp_(new.out.to(out.dtype), share.unsqueeze(-1))
        both = torch.logaddexp(lse, new.lse)
        if kind == "last_queries":
            lse.copy_(both)
        else:
            self.lse = both
        self._owns_lse = True


_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""In what sums of a dtype are made, where that is another one."""


def _wide(tensor: Tensor) -> torch.dtype:
    return _WIDE.get(tensor.dtype, tensor.dtype)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        message, merged, rests = ring.message, _Merged(), []
        visiting, its = message.write(key, value, key.dtype)
        for kind, kernel, passes_on in ring.steps:
            under_way = ring.start(visiting) if passes_on else None
            if kernel is not None:
                keys, values = its if kind == "own" else message.read(visiting, kind)
                result = kernel.forward(_queries(kind, query), keys, values, scale)
                rests.append(result.rest)
                merged.add(result, kind)
            if under_way is not None:
                visiting, _ = under_way.finish()
        out = merged.out.to(query.dtype)
        ctx.ring, ctx.scale, ctx.rests = ring, scale, rests
        # Not the message: the caller holds keys and values anyway, and it would stay beside them.
        ctx.save_for_backward(query, key, value, out, merged.lse)
        ctx.mark_non_differentiable(merged.lse)
        ctx.set_materialize_grads(False)
        return out, merged.lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * 5
        query, key, value, out, lse = ctx.saved_tensors
        known = (out, lse, fitted(grad_out, out))
        of_query, sums = _backward(ctx.ring, ctx.scale, (query, key, value), known, ctx.rests)
        of_key, of_value = ctx.ring.message.read(sums, "all")
        return None, None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _queries(kind: Kind, query: Tensor) -> Tensor:
    return half(query, 1) if kind == "last_queries" else query


def _backward(
    ring: Ring,
    scale: float,
    own: tuple[Tensor, Tensor, Tensor],
    known: tuple[Tensor, Tensor, Tensor],
    rests: list[Any],
) -> tuple[Tensor, Tensor]:
    """Go round once more; return the gradient of the query, and the message with those of key and value.

    Args:
        ring: How.
        scale: Factor on QK^T.
        own: Query, key and value of this rank.
        known: Its output, log-sum-exp and gradient of the output.
        rests: What else the steps of the forward returned, those that computed.
    """
    query, message, left = own[0], ring.message, iter(rests)
    visiting, *its = message.write(*own[1:], own[1].dtype)
    halves: tuple[Tensor, ...] = ()
    of_query, sums = query, None
    for kind, kernel, passes_on in ring.steps:
        # The gradients of the keys that visit now arrive while their next share is computed.
        under_way = ring.start(visiting if passes_on else None, sums)
        if kernel is None:
            visiting, sums = under_way.finish()
            continue
        if kind == "last_queries" and not halves:
            halves = tuple(_last_half(t) for t in known)
        out, lse, grad_out = halves if kind == "last_queries" else known
        qkv = (_queries(kind, query), *(its.pop() if its else message.read(visiting, kind)))
        grads = kernel.backward(qkv, ForwardResult(out, lse, next(left)), grad_out, scale)
        visiting, sums = under_way.finish()
        if sums is None:
            of_query, (sums, _) = grads[0].to(_wide(query)), message.write(*grads[1:], _wide(query))
        else:
            torch._foreach_add_((_queries(kind, of_query), *message.read(sums, kind)), grads)
        # They would stay in memory beside those of the next step.
        del grads, qkv
    if len(ring.steps) > 1:
        _, sums = ring.start(None, sums).finish()
    return of_query, cast("Tensor", sums)


def _last_half(tensor: Tensor) -> Tensor:
    """Return the last half of an output, its gradient or a log-sum-exp, without gaps, as the whole lies."""
    last = half(tensor, 1)
    batch, heads, *_, features = last.shape
    # Of one row whose tokens are outermost in memory, a log-sum-exp aside, the half has none.
    is_whole = batch == 1 and last.dim() > _DIMS_OF_LSE and last.stride(2) == heads * features
    return last if is_whole else last.clone()
