"""What backwards of our own share: no second derivative, and gradients of several outputs one after another.

`torch.autograd.grad(..., is_grads_batched=True)`, `jacobian(vectorize=True)` and `torch.func.vmap` around
`autograd.grad` run each backward once, on a tensor that stands for all samples. torch loops over the samples
for kernels that cannot take them together; this does the same for backwards of our own, so that memory stays
that of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnroute.masks.tracing import innermost_transform, is_wrapped

_functorch = torch._C._functorch
_is_batchedtensor, _is_legacy_batchedtensor = _functorch.is_batchedtensor, _functorch.is_legacy_batchedtensor
_LEVELS: Final = 64
"""Nested vmaps that torch allows (BatchedTensorImpl.h, kVmapNumLevels)."""

Gradients = tuple[Tensor | None, ...]


class _Samples(NamedTuple):
    """One level of vmap.

    Attributes:
        unwrapped: Each gradient with the samples in dimension 0; None where all samples share it.
        wrap: Makes a tensor with the samples in dimension 0 one of that level.
    """

    unwrapped: tuple[Tensor | None, ...]
    wrap: Callable[[Tensor], Tensor]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward whose gradients have none, as torch's `once_differentiable` does.

    Where no second derivative is asked for, that costs the host 5 us in a thread where all is slow.
    """
    marked = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (marked if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def in_turn(backward: Callable[..., Gradients], *grads: Tensor) -> Gradients:
    """Return what a backward makes of gradients, sample by sample where they are batched.

    Args:
        backward: Takes the gradients of one sample and returns those of the inputs.
        *grads: The gradients, batched or not.
    """
    samples = None
    for grad in grads:
        if _is_batchedtensor(grad) or _is_legacy_batchedtensor(grad):
            samples = _samples_of(grads)
    if samples is None:
        return backward(*grads) if not _is_in_vmap() else _outside(backward, grads)
    number = next(t.shape[0] for t in samples.unwrapped if t is not None)

    def of_sample(n: int) -> Gradients:
        given = (
            shared if several is None else several[n] if number else several.new_zeros(several.shape[1:])
            for shared, several in zip(grads, samples.unwrapped, strict=True)
        )
        return in_turn(backward, *given)

    # Without a sample one of zeros gives the shapes.
    found = [of_sample(n) for n in range(max(number, 1))]
    return tuple(
        None if parts[0] is None else samples.wrap(torch.stack(parts)[:number])  # type: ignore[arg-type]
        for parts in zip(*found, strict=True)
    )


def is_batched(grad: Tensor) -> bool:
    """Return whether a gradient is batched, or belongs to another functorch transform."""
    return is_wrapped(grad) or bool(_is_legacy_batchedtensor(grad))


def _samples_of(grads: tuple[Tensor, ...]) -> _Samples:
    """Take one level apart of gradients of which some are batched."""
    return _of_functorch(grads) if any(map(_is_batchedtensor, grads)) else _of_autograd(grads)


def _of_functorch(grads: tuple[Tensor, ...]) -> _Samples:
    """Take the outermost level apart, of which `torch.func.vmap` makes a tensor."""
    levels = [_functorch.maybe_get_level(grad) if _is_batchedtensor(grad) else 0 for grad in grads]
    level = max(levels)
    unwrapped: list[Tensor | None] = []
    for grad, own in zip(grads, levels, strict=True):
        if own != level:
            unwrapped.append(None)
            continue
        value, place = _functorch._unwrap_batched(grad, level)
        unwrapped.append(value.movedim(place or 0, 0))
    return _Samples(tuple(unwrapped), lambda tensor: _functorch._add_batch_dim(tensor, 0, level))


def _of_autograd(grads: tuple[Tensor, ...]) -> _Samples:
    """Take the level apart that `is_grads_batched` makes, with an older vmap than functorch's."""
    level = next(n for grad in grads for n in range(1, _LEVELS + 1) if _is_of(grad, n))
    unwrapped = (torch._remove_batch_dim(g, level, 1, 0) if _is_of(g, level) else None for g in grads)
    return _Samples(tuple(unwrapped), lambda tensor: torch._add_batch_dim(tensor, 0, level))


def _is_of(grad: Tensor, level: int) -> bool:
    """Return whether a tensor stands for samples at a level; only taking them out tells."""
    if not _is_legacy_batchedtensor(grad):
        return False
    return not _is_legacy_batchedtensor(torch._remove_batch_dim(grad, level, 1, 0))


def _is_in_vmap() -> bool:
    levels = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return levels > 1 or innermost_transform() is not None


def _outside(backward: Callable[..., Gradients], grads: tuple[Tensor, ...]) -> Gradients:
    """Leave all transforms that wrap no gradient: they refuse random numbers and autograd functions."""
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    with ExitStack() as stack:
        if not any(is_wrapped(grad) for grad in grads):
            while innermost_transform() is not None:
                stack.enter_context(temporarily_pop_interpreter_stack())
        while torch._C._vmapmode_increment_nesting() > 1:
            stack.callback(torch._C._vmapmode_increment_nesting)
            torch._C._vmapmode_decrement_nesting()
            torch._C._vmapmode_decrement_nesting()
        torch._C._vmapmode_decrement_nesting()
        return backward(*grads)
