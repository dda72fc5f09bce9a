"""A tensor that transformers can hand around as a mask while it stays an object.

transformers and its models expect a mask to be a 4-D tensor: they look at its shape, move it to other
devices, cut rows or columns out, sometimes compute with it. A `CarriedMask` has the shape, dtype and device
of the dense mask and one byte of memory. Cutting contiguous blocks, moving and copying give another carried
mask; any other operation works on the dense mask, made when it is first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnroute.integrations._transformers_pattern import Pattern

_DIMS = 4
# What the form alone says; everything that is not listed works on the dense mask.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cuda")
_METHODS = ("dim", "size", "numel", "element_size", "is_floating_point", "is_complex", "__len__")
_METADATA = {getattr(Tensor, name) for name in _METHODS}
_METADATA |= {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_COPIES: set[object] = {Tensor.clone, Tensor.contiguous}
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}


class CarriedMask(Tensor):
    """A bool mask (batch, 1, q_length, kv_length) whose pattern is known.

    Attributes:
        known: The pattern as it was when the mask was made; `pattern` is what holds now.
        made: The dense mask and its version when it was made, once something needed it.
        source: The carried mask and the index that this one is a block of: a view, as of any tensor.
    """

    known: Pattern
    made: tuple[Tensor, int] | None
    source: tuple[CarriedMask, Any] | None

    @staticmethod
    def carry(
        pattern: Pattern, device: torch.device | str, source: tuple[CarriedMask, Any] | None = None
    ) -> CarriedMask:
        """Return a tensor with the form of the pattern's dense mask."""
        shape = (pattern.batch, 1, pattern.q_length, pattern.kv_length)
        carried = torch.ones((), dtype=torch.bool, device=device).expand(shape).as_subclass(CarriedMask)
        carried.known, carried.made, carried.source = pattern, None, source
        return carried

    @property
    def pattern(self) -> Pattern | None:
        """The pattern, or None after somebody wrote into the mask: then only `dense` says who may attend."""
        if self.source is not None and self.source[0].pattern is None:
            return None
        if self.made is not None and self.made[0]._version != self.made[1]:
            return None
        return self.known

    def dense(self) -> Tensor:
        """Return the mask as a plain bool tensor; always the same one, so that writes into it are kept."""
        if self.made is None:
            # Only tensors made outside of inference mode count the writes into them.
            with torch.inference_mode(False):
                self.made = self._make()
        return self.made[0]

    def _make(self) -> tuple[Tensor, int]:
        if self.source is None:
            made = self.known.dense(self.device)
            return made, made._version
        whole, index = self.source
        made = whole.dense()[index]
        assert whole.made is not None
        return made, whole.made[1]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what the form alone says, keep the pattern where possible, else compute with `dense`."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
                return func(*args, **kwargs)
        first = args[0] if args else None
        pattern = first.pattern if isinstance(first, cls) else None
        if isinstance(first, cls) and pattern is not None:
            kept = _kept(func, first, pattern, args[1:], kwargs)
            if kept is not None:
                return kept
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(value: object) -> object:
    return value.dense() if isinstance(value, CarriedMask) else value


def _kept(
    func: Callable[..., Any],
    mask: CarriedMask,
    pattern: Pattern,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CarriedMask | None:
    """Return the result of an operation that keeps the pattern, or None for one that does not."""
    if func is Tensor.detach or (func is Tensor.contiguous and mask.source is None):
        return mask
    if func in _COPIES:
        return CarriedMask.carry(pattern, mask.device)
    if func in _MOVES:
        probe = func(torch.ones((1,) * _DIMS, dtype=torch.bool, device=mask.device), *args, **kwargs)
        if probe.dtype != torch.bool:
            return None
        return mask if probe.device == mask.device else CarriedMask.carry(pattern, probe.device)
    if func is Tensor.__getitem__:
        return _block(mask, pattern, args[0])
    return None


def _block(mask: CarriedMask, pattern: Pattern, index: object) -> CarriedMask | None:
    """Return a block of rows and columns for an index of slices alone."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) > _DIMS or not all(isinstance(part, slice) for part in parts):
        return None
    batch, heads, rows, columns = parts + [slice(None)] * (_DIMS - len(parts))
    if batch.indices(pattern.batch) != (0, pattern.batch, 1) or heads.indices(1) != (0, 1, 1):
        return None
    part = pattern.part(rows, columns)
    if part is None:
        return None
    return mask if part is pattern else CarriedMask.carry(part, mask.device, (mask, index))
