"""Gives keys and values zeros where no query attends, for kernels that read padding with a weight of zero.

Zero times NaN is NaN, and padding may hold anything. Each tensor is read and written once, 8 bytes at a time.
"""

from __future__ import annotations

import weakref
from math import gcd
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from attnroute.executors.protocol import Bound, Inputs
from attnroute.masks.tracing import is_wrapped

_WORD: Final = torch.int64


def cleared(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return keys and values with zeros where no query attends, in the memory layout that they have."""
    key, value = inputs.key, inputs.value
    if _is_plain(key) and _is_plain(value) and forward_ad._current_level < 0:
        return _cleared(key, value, _bits(inputs))
    # The zero is a tensor, because a device is waited for where it gets a number.
    keep, zero = cast("Tensor", inputs.mask.key_keep)[:, None, :, None], value.new_zeros(())
    return torch.where(keep, key, zero), torch.where(keep, value, zero)


def with_cleared(run: Bound, inputs: Inputs) -> Bound:
    """Clear before a kernel, for as long as it is kept with the mask which keys are left out."""
    kept = weakref.ref(_bits(inputs))

    def run_cleared(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor | None:
        bits = kept()
        return None if bits is None else run(query, *_cleared(key, value, bits), *rest)

    return run_cleared


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own: no tracer's, functorch transform's or subclass's."""
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and not (tensor.is_meta or is_wrapped(tensor))


def _bits(inputs: Inputs) -> Tensor:
    """Return int64 (batch or 1, 1, seqlen_kv, 1), made once for each mask: -1 for a key to keep, else 0."""
    keep = cast("Tensor", inputs.mask.key_keep)

    def make() -> Tensor:
        return keep[:, None, :, None].to(_WORD).neg_()

    what = ("bits of keys", tuple(keep.shape), keep.device)
    return make() if inputs.keeper is None else inputs.keeper.keep(what, make)


def _cleared(key: Tensor, value: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return cast("tuple[Tensor, Tensor]", _Cleared.apply(key, value, bits))  # type: ignore[no-untyped-call]
    return _zeroed(key, bits), _zeroed(value, bits)


def _zeroed(tensor: Tensor, bits: Tensor) -> Tensor:
    """Return a copy of a tensor with zeros where the bits are 0."""
    words = 8 // tensor.element_size()
    *strides, last = tensor.stride()
    if last != 1 or gcd(words, tensor.shape[-1], tensor.storage_offset(), *strides) != words:
        return torch.where(bits != 0, tensor, tensor.new_zeros(()))
    return torch.bitwise_and(tensor.view(_WORD), bits).view(tensor.dtype)


class _Cleared(torch.autograd.Function):
    """Keys and values that were cleared, and gradients as the kernel gives them.

    Its weights of keys that are left out are exactly zero, and so are their gradients: none is cleared.
    """

    @staticmethod
    def forward(_: Any, key: Tensor, value: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return _zeroed(key, bits), _zeroed(value, bits)

    @staticmethod
    def backward(_: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad_key, grad_value, None
