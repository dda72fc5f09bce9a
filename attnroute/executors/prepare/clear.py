"""Gives keys and values zeros where no query attends, for kernels that read padding with a weight of zero.

Zero times NaN is NaN, and padding may hold anything. Each tensor is read and written once, 8 bytes at a time;
where tensors are small, the host is waited for, and one operator that moves single elements is sooner there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import gcd
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from attnroute.executors.fused import ALIGNED, Prebound, compiles_for
from attnroute.executors.prepare.kernels import CLEAR
from attnroute.executors.protocol import Bound, Inputs
from attnroute.masks.tracing import is_wrapped

_WORD: Final = torch.int64
_SMALL: Final = 2**19
"""Elements of a tensor that any kernel clears before the host has launched the next one."""


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
    if max(inputs.key.numel(), inputs.value.numel()) <= _SMALL and not _trains(inputs.key, inputs.value):
        return _with_zeros(run, inputs)
    kept, dtype, words = weakref.ref(_bits(inputs)), inputs.key.dtype, _words(inputs.key)
    is_short = not _trains(inputs.key, inputs.value) and _has_words(inputs.key) and _has_words(inputs.value)

    def run_cleared(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor | None:
        bits = kept()
        if bits is None:
            return None
        if is_short and gcd(words, key.storage_offset(), value.storage_offset()) == words:
            # As `_cleared` does it, without what is the same in every call.
            key, value = (key.view(_WORD) & bits).view(dtype), (value.view(_WORD) & bits).view(dtype)
        else:
            key, value = _cleared(key, value, bits)
        return run(query, key, value, *rest)

    return run_cleared


def _with_zeros(run: Bound, inputs: Inputs) -> Bound:
    """Clear small tensors without gradients before a kernel, on most GPUs both in one launch."""
    kept, zero = weakref.ref(_flags(inputs)), inputs.value.new_zeros(())
    fused = Prebound(CLEAR) if compiles_for(inputs.value.device) else None

    def run_cleared(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor | None:
        keep = kept()
        if keep is None:
            return None
        # Of calls alike it is known whether all start so, and not which one does not.
        if fused is not None and not (key.data_ptr() | value.data_ptr()) % ALIGNED:
            made_key, made_value = torch.empty_like(key), torch.empty_like(value)
            if fused(key, value, made_key, made_value, keep):
                return run(query, made_key, made_value, *rest)
        return run(query, torch.where(keep, key, zero), torch.where(keep, value, zero), *rest)

    return run_cleared


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own: no tracer's, functorch transform's or subclass's."""
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and not (tensor.is_meta or is_wrapped(tensor))


def _bits(inputs: Inputs) -> Tensor:
    """Return int64 (batch or 1, 1, seqlen_kv, 1), made once for each mask: -1 for a key to keep, else 0."""
    return _kept(inputs, "bits of keys", lambda keep: keep.to(_WORD).neg_())


def _flags(inputs: Inputs) -> Tensor:
    """Return bool (batch or 1, 1, seqlen_kv, 1), made once for each mask: True for a key to keep."""
    return _kept(inputs, "flags of keys", torch.clone)


def _kept(inputs: Inputs, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    keep, keeper = cast("Tensor", inputs.mask.key_keep), inputs.keeper
    what = (name, tuple(keep.shape), keep.device)
    flags = keep[:, None, :, None]
    return make(flags) if keeper is None else keeper.keep(what, lambda: make(flags))


def _trains(key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)


def _cleared(key: Tensor, value: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    if _trains(key, value):
        return cast("tuple[Tensor, Tensor]", _Cleared.apply(key, value, bits))  # type: ignore[no-untyped-call]
    return _zeroed(key, bits), _zeroed(value, bits)


def _zeroed(tensor: Tensor, bits: Tensor) -> Tensor:
    """Return a copy of a tensor with zeros where the bits are 0."""
    if not _has_words(tensor) or tensor.storage_offset() % _words(tensor):
        return torch.where(bits != 0, tensor, tensor.new_zeros(()))
    return (tensor.view(_WORD) & bits).view(tensor.dtype)


def _words(tensor: Tensor) -> int:
    """Return how many elements a word has."""
    return _WORD.itemsize // tensor.element_size()


def _has_words(tensor: Tensor) -> bool:
    """Return whether every row is whole words, if the first one begins with a word."""
    words, (*strides, last) = _words(tensor), tensor.stride()
    return last == 1 and gcd(words, tensor.shape[-1], *strides) == words


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
