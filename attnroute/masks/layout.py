"""How a tensor lies in memory: what a decision reads of it, and aligned copies for kernels that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import SymInt, Tensor

from attnroute.masks.tracing import address, guard_bool, is_exporting, is_traced, is_wrapped, size_hint
from attnroute.question.nodes import DenseNode, RecognizedNode

if TYPE_CHECKING:
    from attnroute.vocabulary import EmptyRows

ALIGN: Final = 8
"""Elements. EFFICIENT needs row strides of 16 bytes at 16 bit; stock SDPA pads to the same multiple."""


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what a decision and the checks may depend on, without looking at values."""
    memory = None if is_wrapped(tensor) else (tensor.stride(), address(tensor) % 16 == 0)
    return (tensor.dtype, tuple(tensor.shape), memory, tensor.requires_grad, tensor.device)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows, heads and batches start at multiples of `ALIGN` elements, and all at 16 bytes."""
    if is_wrapped(tensor):
        return True
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        all(guard_bool(n <= 1) or guard_bool(s % ALIGN == 0) for n, s in strides)
        and address(tensor) % 16 == 0
    )


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself when its rows are aligned, else a differentiable copy that is.

    The rows of an exported program's open lengths are contiguous only; the engine's repairs know that.
    """
    if tensor.dim() == 0 or is_wrapped(tensor) or (is_aligned(tensor) and guard_bool(tensor.stride(-1) == 1)):
        return tensor
    if isinstance(tensor.shape[-1], SymInt) and is_exporting():
        # Padded strides would follow from the open length, and who reads strides would fix it.
        return tensor.contiguous()
    pad = -tensor.shape[-1] % ALIGN
    copy = torch.nn.functional.pad(tensor, (0, pad)) if pad else tensor.contiguous()
    if copy is tensor or (not is_traced(tensor) and copy.data_ptr() == tensor.data_ptr()):
        copy = tensor.clone(memory_format=torch.contiguous_format)
    return copy[..., : tensor.shape[-1]]


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised storage whose rows start at multiples of `ALIGN` elements."""
    width = -(-shape[-1] // ALIGN) * ALIGN
    return torch.empty((*shape[:-1], width), dtype=dtype, device=device)[..., : shape[-1]]


def dense_node(
    tensor: Tensor,
    empty_rows: EmptyRows = "unknown",
    recognized: tuple[RecognizedNode, ...] | None = None,
) -> DenseNode:
    """Return a bool mask as plain data for a decision, without reading its values.

    Args:
        tensor: The mask.
        empty_rows: Whether some query may attend no key, where somebody read the values.
        recognized: The nodes that allow the same, where somebody recognised them.
    """
    return DenseNode(
        shape=tuple(size_hint(n) for n in tensor.shape),
        requires_grad=tensor.requires_grad,
        last_dim_contiguous=tensor.dim() == 0 or guard_bool(tensor.stride(-1) == 1),
        aligned=is_aligned(tensor),
        empty_rows=empty_rows,
        recognized=recognized,
    )
