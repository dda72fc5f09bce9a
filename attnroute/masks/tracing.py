"""Inspects tensors and sizes that may belong to torch.compile, torch.export, torch.vmap or a CUDA graph.

A tracer runs Python on fake tensors without values and on symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import SymBool, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

innermost_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
"""Returns the innermost functorch transform around (torch.vmap, torch.func.grad, ...), or None."""


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a tracer: it has a shape, but no memory and no values.

    True for the tensors of torch.compile, torch.export, make_fx with fake tensors, and FakeTensorMode, and
    for those on the device "meta", which have nothing but shapes.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor.is_meta
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def is_tracing() -> bool:
    """Return whether tensors that are made now belong to a tracer: nothing may be kept for later calls."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_exporting() -> bool:
    """Return whether torch.export traces; torch before 2.7 cannot tell, and the result is False."""
    found = getattr(torch.compiler, "is_exporting", None)
    return found is not None and found()


def size_hint(size: int | SymInt) -> int:
    """Return the size that the traced call has, without a guard on it."""
    if not isinstance(size, SymInt):
        return size
    node: Any = size.node
    hint = getattr(node, "hint", None)
    return int(size) if hint is None else int(hint)


def is_open(sizes: Iterable[object]) -> bool:
    """Return whether a tracer leaves any of these sizes open."""
    return any(isinstance(size, SymInt) for size in sizes)


def guard_bool(condition: bool | SymBool) -> bool:
    """Return whether a condition on sizes, which may be symbolic, is true.

    Under torch.compile the result becomes a guard of the graph. torch.export makes one program for all sizes,
    so there the result is False unless the condition is true of all of them. Pass the condition that the code
    relies on, not its negation, which would be False as well.
    """
    if isinstance(condition, SymBool) and is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def address(tensor: Tensor) -> int:
    """Return the address of the first element in bytes; for a tracer's tensor, the offset into its storage.

    Callers check alignment to 16 bytes, and allocators return memory at multiples of more than that, so the
    offset is enough.
    """
    if is_traced(tensor):
        return size_hint(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is wrapped by a functorch transform: then it has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # type: ignore[attr-defined]


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured: its replays must compute everything from the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
