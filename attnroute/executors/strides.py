"""Tensors in memory that kernels can read, the gradient of an output above all.

A gradient lies as whatever came after the call left it, which nobody knows while the call is decided. Kernels
read it in steps of 16 bytes and along its last dimension: a slice that starts elsewhere ends the process
("misaligned address"). cuDNN's backward in torch gets gradients that lie as the output does (aten/cudnn.py
says why). A gradient that fits is passed on as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnroute.executors.batched_gradients import is_batched
from attnroute.masks.tracing import address, guard_bool, is_traced, size_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnroute.executors.protocol import Plan

_WORD: Final = torch.complex128
"""The widest type that torch copies: in another order it moves words, and several elements in each."""
_SMALL: Final = 2**19
"""Elements up to which the copy is shorter than the launch of the next kernel. Above, words are worth their
views: 12.6 million elements of bfloat16 took 14 us on an H200, and 37 one by one (torch 2.11, 2026-11-29)."""


def watch(out: Tensor, plan: Plan, *, as_output: bool = False) -> None:
    """Have the gradient of an operator's output fitted before the operator's own backward gets it.

    Args:
        out: What the operator returned, or a view of it.
        plan: How the call runs; kernels of the CPU take gradients in any memory.
        as_output: The gradient must have the strides of the output.
    """
    if plan.training and plan.device_type != "cpu" and out.requires_grad:
        out.register_hook(Fit(out.stride(), as_output=as_output))  # type: ignore[no-untyped-call]


def hooks_of(out: Tensor, *, as_output: bool) -> OrderedDict[int, Any]:
    """Return hooks that fit gradients of outputs that lie as this one does, for `attach`."""
    # The handles that torch gives for other hooks count from 0.
    return OrderedDict({-1: Fit(out.stride(), as_output=as_output)})


def attach(out: Tensor, node: Any, hooks: OrderedDict[int, Any]) -> None:
    """Do what `Tensor.register_hook` does to a tensor without hooks, but for the handle to remove them.

    Args:
        out: The tensor.
        node: What made it, its ``grad_fn``.
        hooks: They are copied, because later hooks of one tensor are put beside them. It takes a third of the
            time that making them does.
    """
    out._backward_hooks = hooks.copy()
    node._register_hook_dict(out)


def fitted(grad: Tensor, out: Tensor, *, as_output: bool = False) -> Tensor:
    """Return a gradient as a kernel's backward takes it, for backwards that we call ourselves.

    Args:
        grad: The gradient.
        out: The output that it belongs to.
        as_output: It must have the strides of the output.
    """
    return Fit(out.stride(), as_output=as_output)(grad)


class Fit:
    """A hook that fits gradients; a class, as torch warns about other hooks where a tensor is saved."""

    __slots__ = ("_as_output", "_strides")
    __torch_unserializable__ = True

    def __init__(self, strides: Sequence[int], *, as_output: bool) -> None:
        self._strides = strides
        self._as_output = as_output

    def __call__(self, grad: Tensor) -> Tensor:
        """Return the gradient as a kernel's backward takes it."""
        strides = self._strides
        try:
            # Most lie as the output does, and the backward waits for this.
            if grad.__class__ is Tensor and grad.stride() == strides and not grad.data_ptr() % 16:
                return grad
        except RuntimeError:
            # A gradient of several samples at once has no address; each is taken out of the copy later.
            return _permuted(grad, strides)
        if is_batched(grad):
            return _permuted(grad, strides)
        if _lies_as(grad, strides) if self._as_output else is_packed(grad):
            return grad
        return _permuted(grad, strides) if is_traced(grad) else _copied(grad, strides)


def _permuted(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """Copy a gradient that cannot be seen as words: of several samples at once, or of a tracer."""
    outermost = sorted(range(grad.dim()), key=lambda dim: -size_hint(strides[dim]))
    whole = grad.permute(outermost).clone(memory_format=torch.contiguous_format)
    return whole.permute([outermost.index(dim) for dim in range(grad.dim())])


def _copied(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """Copy a gradient in one operator, a large one 16 bytes at a time."""
    whole = grad.new_empty_strided(grad.shape, strides)
    if grad.numel() > _SMALL and _has_words(grad) and _has_words(whole):
        whole.view(_WORD).copy_(grad.view(_WORD))
        return whole
    return whole.copy_(grad)


def _has_words(tensor: Tensor) -> bool:
    """Return whether every row is whole words, of which nothing asks for a gradient."""
    words, (*strides, last) = _WORD.itemsize // tensor.element_size(), tensor.stride()
    places = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and gcd(words, *places) == words and not tensor.requires_grad


def is_packed(tensor: Tensor) -> bool:
    """Return whether the last stride is 1 and the start and every row lie at multiples of 16 bytes."""
    size = tensor.element_size()
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    if not all(guard_bool(n <= 1) or guard_bool(s * size % 16 == 0) for n, s in rows):
        return False
    return (tensor.shape[-1] <= 1 or guard_bool(tensor.stride(-1) == 1)) and address(tensor) % 16 == 0


def _lies_as(grad: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a gradient has these strides and starts at a multiple of 16 bytes."""
    sizes = zip(grad.shape, grad.stride(), strides, strict=True)
    return all(n <= 1 or own == other for n, own, other in sizes) and address(grad) % 16 == 0
