"""Questions about tensors and lengths that torch.compile, torch.export, torch.vmap or a CUDA graph may hold.

A tracer runs Python on fake tensors without values and on lengths that it leaves open.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import SymBool, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

innermost_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
"""Returns the innermost functorch transform around (torch.vmap, torch.func.grad, ...), or None."""


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tracer holds this tensor: it has a shape, but no memory and no values.

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
    """Return whether torch.export traces; torch before 2.7 has no such question, and the answer is False."""
    question = getattr(torch.compiler, "is_exporting", None)
    return question is not None and question()


def example(size: int | SymInt) -> int:
    """Return a size as it is in the call that is traced, without a guard on it."""
    if not isinstance(size, SymInt):
        return size
    node: Any = size.node
    hint = getattr(node, "hint", None)
    return int(size) if hint is None else int(hint)


def holds(condition: bool | SymBool) -> bool:
    """Return whether something is true of sizes that a tracer may have left open.

    torch.compile makes the answer a condition of its graph. torch.export makes one program for all sizes, so
    there it is false unless it is true of all of them: ask for what may be counted on, not for its opposite.
    """
    if isinstance(condition, SymBool) and is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def address(tensor: Tensor) -> int:
    """Return where the first element lies, in bytes.

    A tracer knows only how far into its memory that is, and allocators hand out memory at multiples of more
    than 16 bytes.
    """
    if is_traced(tensor):
        return example(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a functorch transform holds this tensor, which then has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # type: ignore[attr-defined]


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph records: what it replays must be computed anew from the tensor then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
