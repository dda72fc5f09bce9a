"""Which functorch transform or forward-mode level surrounds a call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_peek = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
_modes = torch._C._len_torch_dispatch_stack
_TransformType = torch._C._functorch.TransformType  # type: ignore[attr-defined]


def has_dispatch_mode() -> bool:
    """Return whether a TorchDispatchMode is active: under one torch.compile compiles nothing."""
    return bool(_modes() > 0)


def may_be_transformed() -> bool:
    """Return whether a transform or a forward-mode level is active; a plain call asks no more than this."""
    return _peek() is not None or forward_ad._current_level >= 0


def active_transform(*given: object) -> str | None:
    """Return "vmap", "forward_ad", "double_backward" or None for the tensors of a call."""
    interpreter = _peek()
    if interpreter is not None:
        return _functorch(interpreter)
    if forward_ad._current_level >= 0 and any(isinstance(t, Tensor) and _is_dual(t) for t in given):
        return "forward_ad"
    return None


def _functorch(interpreter: object) -> str:
    kinds = {
        _TransformType.Vmap: "vmap",
        _TransformType.Jvp: "forward_ad",
    }
    # functorch's grad may be nested, and its inner level cannot be told from the outside: only the composite
    # is
    # differentiable at every level.
    return kinds.get(interpreter.key(), "double_backward")  # type: ignore[attr-defined]


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None
