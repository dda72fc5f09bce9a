"""The backward operators of FLASH, for an output and log-sum-exp that need not be those of its forward.

Each takes the arguments that `attnroute.executors.aten.flash` gave the forward, and what else that returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnroute.executors.aten.operators import attn_of, is_causal
from attnroute.executors.ragged import per_sequence, window_sizes

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.protocol import ForwardResult, Grads, Inputs


def cpu(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> Grads:
    """Run the backward of the CPU kernel."""
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad_out,
        inputs.query,
        inputs.key,
        inputs.value,
        result.out,
        result.lse,
        inputs.dropout_p,
        is_causal(inputs),
        attn_mask=attn_of(inputs),
        scale=inputs.scale,
    )
    return *grads, None


def plain(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> Grads:
    """Run the backward of the call without a window."""
    sums_q, sums_kv, longest_q, longest_kv, seed, offset, *_ = result.rest
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad_out,
        inputs.query,
        inputs.key,
        inputs.value,
        result.out,
        result.lse.contiguous(),
        sums_q,
        sums_kv,
        longest_q,
        longest_kv,
        inputs.dropout_p,
        inputs.mask.band_hi is not None,
        seed,
        offset,
        scale=inputs.scale,
    )
    return *grads, None


def window(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> Grads:
    """Run the backward of the call with a window over whole rows."""
    seed, offset, *_ = result.rest
    lengths = (inputs.query.shape[2], inputs.key.shape[2])
    tensors = tuple(t.transpose(1, 2) for t in _tensors(inputs, result, grad_out))
    grads = _lower(inputs, tensors, result.lse, (None, None, *lengths), (seed, offset))
    query, key, value = (t.transpose(1, 2) for t in grads)
    return query, key, value, None


def ragged(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> Grads:
    """Run the backward of the call on sequences."""
    seed, offset, sums_q, sums_kv, longest_q, longest_kv, is_padded = result.rest
    tensors = tuple(t.transpose(1, 2).flatten(0, 1) for t in _tensors(inputs, result, grad_out))
    lse = result.lse.transpose(0, 1).flatten(1)
    if is_padded:
        lse = per_sequence(lse, sums_q, longest_q)
    grads = _lower(inputs, tensors, lse, (sums_q, sums_kv, longest_q, longest_kv), (seed, offset))
    batch = inputs.query.shape[0]
    query, key, value = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in grads)
    return query, key, value, None


def _tensors(inputs: Inputs, result: ForwardResult, grad_out: Tensor) -> tuple[Tensor, ...]:
    return grad_out, inputs.query, inputs.key, inputs.value, result.out


def _lower(
    inputs: Inputs,
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator below, which takes heads after tokens and reads the log-sum-exp as packed."""
    left, right = window_sizes(inputs)
    return torch.ops.aten._flash_attention_backward.default(  # type: ignore[no-any-return]
        *tensors,
        lse.contiguous(),
        *lengths,
        inputs.dropout_p,
        False,
        *state,
        scale=inputs.scale,
        window_size_left=left,
        window_size_right=right,
    )
