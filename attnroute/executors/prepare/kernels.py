"""The kernels of `kernels_triton` as calls have them: what each is compiled for, and its numbers."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.executors.fused import ALIGNED, LARGEST, Kernel, Launch, bind, reaches

_ELEMENTS: Final = 4096
"""Elements that a program holds at once."""
_STEPS: Final = 8
"""Most times so many elements that one program sums without others."""
_PROGRAMS: Final = 1024
"""Programs that sums are spread over: a few for each multiprocessor of a large card."""
_UNIT: Final = 8
"""Elements of 16 bits that are moved at once."""
_FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def pieces(out: Tensor) -> int:
    """Return how many programs sum the gradient of one head's sink."""
    batch, heads, seqlen, dim = out.shape
    tiles = -(-batch * seqlen // _tile(dim)[0])
    return 1 if tiles <= _STEPS else min(tiles, max(_PROGRAMS // heads, 1))


def _tile(dim: int) -> tuple[int, int]:
    """Return how many rows a program holds at once, and how many columns."""
    block = 1 << max(dim - 1, 0).bit_length()
    return max(_ELEMENTS // block, 1), block


def _kind(wide: tuple[Tensor, ...], others: tuple[Tensor, ...], dtype: torch.dtype) -> Hashable:
    """Return what a kernel is compiled for; None where it does not know the elements, or they lie too far.

    Args:
        wide: Tensors of rows, of which each lies together.
        others: More of them.
        dtype: Which the first of these has.
    """
    tensors = (*wide, *others)
    lie_together = all(t.stride(-1) == 1 and t.dtype in _FLOATS for t in wide)
    if not lie_together or others[0].dtype is not dtype or any(reaches(t) >= LARGEST for t in tensors):
        return None
    starts = tuple(t.data_ptr() % ALIGNED == 0 for t in tensors)
    return (tuple(t.dtype for t in tensors), starts, _constants(*wide))


def _unit(*wide: Tensor) -> int:
    """Return how many elements move at once: all rows begin and end at multiples of these, from the start."""
    return gcd(_UNIT, *[step for t in wide for step in (t.shape[-1], *t.stride()[:-1])])


def _constants(*wide: Tensor) -> tuple[int, int, int]:
    """Return the last arguments of every kernel."""
    return (_unit(*wide), *_tile(max(t.shape[-1] for t in wide)))


def _programs(rows: int, dim: int) -> int:
    return -(-rows // _tile(dim)[0])


def _of_rows(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[int, ...]:
    """Return strides and sizes, as both kernels of sinks take them."""
    batch, heads, seqlen, dim = out.shape
    unit = _unit(out)
    strides = (step // unit for step in out.stride()[:3])
    return (*strides, *lse.stride()[:3], sink.stride(0), heads, seqlen, batch * seqlen, dim // unit)


def _shrink_kind(out: Tensor, lse: Tensor, sink: Tensor, *, trains: bool) -> Hashable:
    found = _kind((out,), (lse, sink), torch.float32)
    return None if found is None or sink.dtype not in _FLOATS else (trains, found)


def _shrink_numbers(out: Tensor, lse: Tensor, sink: Tensor, *, trains: bool) -> tuple[Any, ...]:
    *strides, heads, seqlen, rows, dim = _of_rows(out, lse, sink)
    return (*strides, heads, seqlen, rows * heads, dim, trains, *_constants(out))


def _compiled_shrink(*tensors: Tensor, trains: bool) -> Any:
    from attnroute.executors.prepare.kernels_triton import shrink_kernel

    return shrink_kernel.warmup(*tensors, *_shrink_numbers(*tensors, trains=trains), grid=(1,))


def _bound_shrink(compiled: Any, out: Tensor, lse: Tensor, sink: Tensor, *, trains: bool) -> Launch:
    rows = out.shape[0] * out.shape[1] * out.shape[2]
    grid = (_programs(rows, out.shape[3]), 1, 1)
    return bind(compiled, grid, _shrink_numbers(out, lse, sink, trains=trains), out.device)


def _gradient_kind(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor, into: Tensor) -> Hashable:
    found = _kind((out,), (lse, sink, grad, into), torch.float32)
    return None if found is None or not {sink.dtype, grad.dtype} <= _FLOATS else found


def _gradient_numbers(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor, into: Tensor) -> tuple[Any, ...]:
    tiles = _programs(out.shape[0] * out.shape[2], out.shape[3])
    return (*grad.stride(), *_of_rows(out, lse, sink), -(-tiles // pieces(out)), *_constants(out))


def _compiled_gradient(*tensors: Tensor) -> Any:
    from attnroute.executors.prepare.kernels_triton import sink_gradient_kernel

    return sink_gradient_kernel.warmup(*tensors, *_gradient_numbers(*tensors), grid=(1,))


def _bound_gradient(compiled: Any, *tensors: Tensor) -> Launch:
    out = tensors[1]
    # There may be more heads than a grid has places along any other axis.
    grid = (out.shape[1], pieces(out), 1)
    return bind(compiled, grid, _gradient_numbers(*tensors), out.device)


def _clear_kind(key: Tensor, value: Tensor, made_key: Tensor, made_value: Tensor, keep: Tensor) -> Hashable:
    return _kind((key, value, made_key, made_value), (keep,), torch.bool)


def _clear_numbers(
    key: Tensor, value: Tensor, made_key: Tensor, made_value: Tensor, keep: Tensor
) -> tuple[Any, ...]:
    batch, heads, seqlen, dim = key.shape
    unit = _unit(key, value, made_key, made_value)
    strides = [step // unit for t in (key, value, made_key, made_value) for step in t.stride()[:3]]
    of_keep = (keep.stride(0) if keep.shape[0] > 1 else 0, keep.stride(2))
    sizes = (heads, seqlen, batch * heads * seqlen, dim // unit, value.shape[3] // unit)
    return (*strides, *of_keep, *sizes, *_constants(key, value, made_key, made_value))


def _compiled_clear(*tensors: Tensor) -> Any:
    from attnroute.executors.prepare.kernels_triton import clear_kernel

    return clear_kernel.warmup(*tensors, *_clear_numbers(*tensors), grid=(1,))


def _bound_clear(compiled: Any, *tensors: Tensor) -> Launch:
    key, value = tensors[:2]
    rows = key.shape[0] * key.shape[1] * key.shape[2]
    grid = (_programs(rows, max(key.shape[3], value.shape[3])), 2, 1)
    return bind(compiled, grid, _clear_numbers(*tensors), key.device)


SHRINK: Final = {
    trains: Kernel(
        partial(_shrink_kind, trains=trains),
        partial(_compiled_shrink, trains=trains),
        partial(_bound_shrink, trains=trains),
    )
    for trains in (False, True)
}
"""Takes an output, a log-sum-exp and a sink, by whether calls train: then the log-sum-exp changes too."""
GRADIENT: Final = Kernel(_gradient_kind, _compiled_gradient, _bound_gradient)
"""Takes the gradient of an output, both with the sink in them, the log-sum-exp too, the sink, and what the
gradient of the sink is written into: (`pieces`, num_heads_q), to be summed if that is more than one."""
CLEAR: Final = Kernel(_clear_kind, _compiled_clear, _bound_clear)
"""Takes keys and values, what their copies are written into, and which keys stay: (batch or 1, 1, seqlen_kv,
1)."""
