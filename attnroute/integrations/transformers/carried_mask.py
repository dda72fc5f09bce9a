"""`CarriedMask`: a tensor subclass that transformers passes around as a mask and that keeps its pattern.

transformers and its models expect a mask to be a 4-D tensor: they read its shape, move it to other
devices, cut rows or columns out, sometimes compute with it. A `CarriedMask` has the shape, dtype and device
of the dense mask and no memory of its own. Cutting contiguous blocks, moving and copying give another carried
mask; any other operation works on the dense mask, made when it is first needed.

Code below Python's functions (torch.compile, torch.export, torch.vmap) gets the dense mask, too. Such a
tracer takes the mask apart by `__tensor_flatten__` into plain tensors that hold the pattern, and what it
computes with the mask is computed, by `__torch_dispatch__`, from the dense mask that they make. All masks
have the same few tensors and no constants, so that what was compiled for one step holds for the next.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from attnroute.integrations.transformers.pattern import allowed_pairs
from attnroute.masks.marks import Mark, is_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnroute.integrations.transformers.pattern import Keys, Pattern
    from attnroute.masks import Mask

_DIMS = 4
# What shape, dtype and device alone answer; everything that is not listed works on the dense mask.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cuda")
_METHODS = ("dim", "size", "numel", "element_size", "is_floating_point", "is_complex", "__len__")
_METADATA = {getattr(Tensor, name) for name in _METHODS}
_METADATA |= {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_COPIES: set[object] = {Tensor.clone, Tensor.contiguous}
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
_UNCHANGED = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_NUMBERS = ("offset", "left", "right")
_OPEN = 1 << 60
"""More keys than there are, for a side that is open."""


class CarriedMask(Tensor):
    """A bool mask (batch, 1, q_length, kv_length) whose pattern is known.

    Attributes:
        known: The pattern as it was when the mask was made; `pattern` is what holds now. None in the hands of
            a tracer, which has `parts` alone.
        made: The dense mask, once something needed it.
        mark: Of the dense mask when it was made; None for a block, which has the memory of its source.
        source: The carried mask and the index that this one is a block of: a view, as of any tensor.
        parts: The pattern as plain tensors, once a tracer needs them: offset, left and right, keep, and
            ids where there are documents. "written" alone for a mask that somebody wrote into before.
        answer: The last question of a layer (lengths and window), and what the pattern says to it.
    """

    known: Pattern | None
    made: Tensor | None
    mark: Mark | None
    source: tuple[CarriedMask, Any] | None
    parts: dict[str, Tensor] | None
    answer: tuple[tuple[int, int, int | None], tuple[Mask | None, Keys]] | None

    @staticmethod
    def carry(
        pattern: Pattern, device: torch.device | str, source: tuple[CarriedMask, Any] | None = None
    ) -> CarriedMask:
        """Return a tensor with the form of the pattern's dense mask."""
        shape = (pattern.batch, 1, pattern.q_length, pattern.kv_length)
        place = torch.device(device)
        if place.index is None and place.type not in ("cpu", "meta"):
            place = torch.empty(0, device=place).device
        carried = _wrapper(shape, None, place)
        carried.known, carried.source = pattern, source
        return carried

    @property
    def pattern(self) -> Pattern | None:
        """The pattern, or None after somebody wrote into the mask or took its memory; then `dense` counts."""
        if self.source is not None:
            return None if self.source[0].pattern is None else self.known
        if self.made is None or self.mark is None:
            return self.known
        return self.known if self.mark.fits(self.made) and is_private(self.made) else None

    def dense(self) -> Tensor:
        """Return the mask as a plain bool tensor; always the same one, so that writes into it are kept."""
        if self.known is None:
            return _of_parts(self)
        if self.made is None:
            with _kept_for_good():
                if self.source is None:
                    self.made = self.known.dense(self.device)
                    self.mark = Mark(self.made)
                else:
                    whole, index = self.source
                    self.made = whole.dense()[index]
        return self.made

    def __getattr__(self, name: str) -> Tensor:
        """Return one of `parts`, by which a tracer asks for them."""
        parts: dict[str, Tensor] = self.__dict__.get("parts") or {}
        if name in parts:
            return parts[name]
        raise AttributeError(name)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the plain tensors that the mask is made of; there are no constants."""
        if self.known is not None and self.pattern is None:
            self.parts = {"written": self.dense()}
        elif self.parts is None and self.known is not None:
            with _kept_for_good():
                self.parts = _parts(self.known, self.device)
        return list(self.parts or ()), None

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], _: None, outer_size: Any, outer_stride: Any
    ) -> CarriedMask:
        """Return the mask that is made of a tracer's tensors."""
        mask = _wrapper(outer_size, outer_stride, next(iter(parts.values())).device)
        mask.parts = parts
        return mask

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Return the dense mask's text; a tracer's mask has none."""
        if self.known is not None:
            return str(self.dense().__repr__(**options))  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as below
            return f"CarriedMask(shape={tuple(self.shape)})"

    def _stable_hash_for_caching(self) -> str:
        """Return what distinguishes the graphs of this mask from others, for torch's cache on disk."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as below
            parts = {name: getattr(self, name) for name in self.__tensor_flatten__()[0]}
            form = [
                (name, str(p.dtype), str(p.device), str(p.shape), str(p.stride()))
                for name, p in parts.items()
            ]
            return f"CarriedMask{tuple(self.shape)}{form}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with `dense` what reaches the mask below Python's functions."""
        kwargs = kwargs or {}
        mask = args[0] if args else None
        if func._schema.is_mutable and isinstance(mask, cls) and mask.known is None:  # noqa: SLF001 - as below
            raise _written_in_a_graph()
        if func in _UNCHANGED and isinstance(mask, cls) and (mask.known is None or mask.pattern is not None):
            if mask.known is not None:
                return cls.carry(mask.known, mask.device)
            return cls.__tensor_unflatten__(mask.parts or {}, None, mask.shape, mask.stride())
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer from shape, dtype and device, keep the pattern where possible, else compute with `dense`."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        tracing = _is_tracing() or (isinstance(first, cls) and first.known is None)
        if tracing and func is Tensor.__setitem__ and isinstance(first, cls):
            raise _written_in_a_graph()
        if tracing or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
                return func(*args, **kwargs)
        pattern = first.pattern if isinstance(first, cls) else None
        if isinstance(first, cls) and pattern is not None:
            kept = _kept(func, first, pattern, args[1:], kwargs)
            if kept is not None:
                return kept
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _is_tracing() -> bool:
    """Whether a tracer asks.

    While torch.compile inspects a graph's inputs, `is_compiling` is false in torch 2.11 and true in 2.13. The
    tracing context is read last, because a graph break would come of it inside of a graph.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return True
    return TracingContext.try_get() is not None


def _written_in_a_graph() -> RuntimeError:
    return RuntimeError(
        "A compiled graph that writes requires a tensor of its own; got the mask of the model, which other "
        "layers read; write into mask.clone()."
    )


def _wrapper(size: Any, stride: Any, device: torch.device) -> CarriedMask:
    make = Tensor._make_wrapper_subclass  # noqa: SLF001 - torch documents it in its notes, under this name
    mask: CarriedMask = make(CarriedMask, size, strides=stride, dtype=torch.bool, device=device)
    mask.known = mask.made = mask.mark = mask.source = mask.parts = mask.answer = None
    return mask


@contextmanager
def _kept_for_good() -> Iterator[None]:
    """Make tensors that are kept with a mask.

    Only tensors made outside of inference mode count the writes into them. A mode around the call, a tracer's
    for one, has no part in what is kept.
    """
    with torch.inference_mode(False), _disable_current_modes():
        yield


def _parts(pattern: Pattern, device: torch.device) -> dict[str, Tensor]:
    """Return a pattern as plain tensors, the same ones for all patterns without documents."""
    parts = {
        name: torch.full((), _OPEN if number is None else number, dtype=torch.int64, device=device)
        for name in _NUMBERS
        for number in (getattr(pattern, name),)
    }
    # Copies: a graph asks of a view what it is a view of.
    keep = torch.ones(pattern.batch, pattern.kv_length, dtype=torch.bool, device=device)
    parts["keep"] = keep if pattern.keep is None else keep.copy_(pattern.keep)
    if pattern.ids is not None:
        parts["ids"] = pattern.ids.to(device, copy=True)
    return parts


def _of_parts(mask: CarriedMask) -> Tensor:
    """Return the dense mask that a tracer's tensors make."""
    parts = mask.parts or {}
    if "written" in parts:
        return parts["written"]
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
        shape, device = mask.shape, mask.device
    offset, left, right = (parts[name] for name in _NUMBERS)
    # What is made beside fake tensors must be fake, too, also where their mode is not in force.
    with offset.fake_mode if isinstance(offset, FakeTensor) else nullcontext():
        return allowed_pairs(shape, offset, left, right, parts["keep"], parts.get("ids"), device)


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
