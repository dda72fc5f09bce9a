"""A ring over ranks as people write it by hand on torch's own kernels, to time attnroute's beside it.

It is the usual one: keys and values pass on in one batch of messages while the kernel of a step runs, outputs
are merged by their log-sum-exp in float32, and in the backward float32 gradients of keys and values travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
Forward = Callable[..., tuple[Tensor, Tensor, Any]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return out, lse, ()


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, _: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, lse, 0.0, causal
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
    out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse, rest


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums_q, sums_kv, max_q, max_kv, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, lse, sums_q, sums_kv, max_q, max_kv, 0.0, causal, seed, offset
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor, Any]:
    out, lse, *rest, _ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)
    return out, lse.squeeze(-1), rest


def _cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums_q, sums_kv, max_q, max_kv, seed, offset = rest
    if grad.stride() != out.stride():  # cuDNN's backward takes them alike.
        grad, out = grad.contiguous(), out.contiguous()
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad,
        query,
        key,
        value,
        out,
        lse.unsqueeze(-1),
        seed,
        offset,
        None,
        sums_q,
        sums_kv,
        max_q,
        max_kv,
        0.0,
        causal,
    )


KERNELS: dict[str, tuple[Forward, Backward]] = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "cudnn": (_cudnn, _cudnn_backward),
}


class Ring:
    """A ring over the ranks of a group; a call is query, key and value of this rank's tokens."""

    def __init__(self, group: dist.ProcessGroup, kernel: str, *, is_causal: bool, load_balance: bool) -> None:
        """Choose the kernel, whether the call is causal, and the order of tokens."""
        self.group, self.is_causal, self.halves = group, is_causal, load_balance and is_causal
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.forward, self.backward = KERNELS[kernel]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return this rank's part of the output."""
        return _Ring.apply(self, query, key, value)  # type: ignore[no-untyped-call,no-any-return]

    def send(self, *tensors: Tensor) -> tuple[list[Tensor], list[Any]]:
        """Send tensors to the next rank; return those on their way here, and what to wait for."""
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        received = [torch.empty_like(tensor) for tensor in tensors]
        messages = [dist.P2POp(dist.isend, tensor, following, self.group) for tensor in tensors]
        messages += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        return received, dist.batch_isend_irecv(messages)

    def parts(self, step: int) -> tuple[slice, slice, bool] | None:
        """Return which halves of queries and keys a step is about, and whether it is causal; None = none."""
        all_, first, last = slice(None), slice(0, 1), slice(1, 2)
        if step == 0 or not self.is_causal:
            return all_, all_, self.is_causal
        if step <= self.rank:
            return all_, first if self.halves else all_, False
        return (last, all_, False) if self.halves else None


def _cut(tensor: Tensor, which: slice) -> Tensor:
    if which == slice(None):
        return tensor
    return tensor.chunk(2, 2)[which.start]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        own = key, value
        rests = []
        for step in range(ring.size):
            last = step == ring.size - 1
            if not last:
                received, works = ring.send(key, value)
            if (parts := ring.parts(step)) is not None:
                queries, keys, causal = parts
                new, new_lse, rest = ring.forward(
                    _cut(query, queries), _cut(key, keys), _cut(value, keys), causal
                )
                rests.append(rest)
                if step == 0:
                    out, lse = new.float(), new_lse.clone()
                else:
                    old, old_lse = _cut(out, queries), _cut(lse, queries)
                    merged = old - torch.sigmoid(new_lse - old_lse).unsqueeze(-1) * (old - new)
                    merged_lse = old_lse - functional.logsigmoid(old_lse - new_lse)
                    if old is out:
                        out, lse = merged, merged_lse
                    else:
                        old.copy_(merged)
                        old_lse.copy_(merged_lse)
            if not last:
                for work in works:
                    work.wait()
                key, value = received
        out = out.to(query.dtype)
        ctx.ring, ctx.rests = ring, rests
        ctx.save_for_backward(query, *own, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ring, left = ctx.ring, iter(ctx.rests)
        arrived: list[Tensor] = []
        grad_works: list[Any] = []
        query, key, value, out, lse = ctx.saved_tensors
        for step in range(ring.size):
            last = step == ring.size - 1
            if not last:
                received, works = ring.send(key, value)
            grads = None
            if (parts := ring.parts(step)) is not None:
                queries, keys, causal = parts
                grads = ring.backward(
                    _cut(grad, queries).contiguous(),
                    _cut(query, queries),
                    _cut(key, keys),
                    _cut(value, keys),
                    _cut(out, queries),
                    _cut(lse, queries).contiguous(),
                    causal,
                    next(left),
                )
            if step == 0:
                sum_q, sum_k, sum_v = (t.float().contiguous() for t in grads)
            else:
                for work in grad_works:
                    work.wait()
                sum_k, sum_v = arrived
                if grads is not None:
                    _cut(sum_q, queries).add_(grads[0])
                    _cut(sum_k, keys).add_(grads[1])
                    _cut(sum_v, keys).add_(grads[2])
            if not last:
                for work in works:
                    work.wait()
                key, value = received
            arrived, grad_works = ring.send(sum_k, sum_v)
        for work in grad_works:
            work.wait()
        sum_k, sum_v = arrived
        return None, sum_q.to(query.dtype), sum_k.to(key.dtype), sum_v.to(value.dtype)
