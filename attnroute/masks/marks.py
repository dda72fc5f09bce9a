"""`Mark`: recognise a tensor that something was made from, as long as nothing wrote into it.

A weak reference to a tensor would show that it lives, but `torch.utils.swap_tensors` refuses tensors that
have one. So the reference goes to the storage behind the tensor, as long as that is its own: nothing but the
tensor, and what it is a view of, has this memory at that time. A tensor that comes later with the same
storage, place and version is then this one, or a view of the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

_users = getattr(torch._C, "_storage_Use_Count", None)
"""Return how many tensors and Python objects have a storage; None where torch has no such question."""


class Mark:
    """A tensor at one moment.

    Attributes:
        place: Under what something about such a tensor is kept; another tensor may have the same.
    """

    __slots__ = ("_alive", "_state", "place")

    def __init__(
        self, tensor: Tensor, *, views: int = 0, ended: Callable[[Hashable], object] | None = None
    ) -> None:
        """Mark a tensor.

        Args:
            tensor: It may be kept alive by nothing here.
            views: How many views of it the caller holds.
            ended: Called with the place once the memory of the tensor is freed.
        """
        base = tensor._base
        storage = _own_storage(tensor, base, views)
        self._state = _state(tensor, base)
        # A tensor and its views have one storage; what is kept of it and what is kept of them lies apart.
        self.place: Hashable = id(tensor) if storage is None else (storage._cdata, base is None)
        # When the interpreter ends, no name of this module may be needed.
        callback = None if ended is None else lambda _, ended=ended, place=self.place: ended(place)
        self._alive: weakref.ref[Any] = weakref.ref(tensor if storage is None else storage, callback)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether this is that tensor, or a view of the same, and nothing wrote into it since."""
        alive = self._alive()
        if alive is None:
            return False
        if not isinstance(alive, Tensor):
            return alive is tensor.untyped_storage() and self._state == _state(tensor, tensor._base)
        return alive is tensor and self._state == _state(tensor, tensor._base)

    def fits_privately(self, tensor: Tensor) -> bool:
        """Return `fits` and `is_private`, which every call with a mask waits for, from few reads."""
        storage = self._alive()
        kind = type(tensor)
        if storage.__class__ is not UntypedStorage or not (kind is Tensor or kind is Parameter):
            return self.fits(tensor) and is_private(tensor)
        # The storage of a mark is that of a strided tensor with memory.
        return (
            storage is tensor.untyped_storage()
            and storage.resizable()
            and not (tensor.is_cpu and storage.is_shared())
            and self._state == _state_in_memory(tensor, tensor._base)
        )


def places_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return the places that marks of a tensor may have."""
    if not _is_plain(tensor):
        return (id(tensor),)
    return (tensor.untyped_storage()._cdata, tensor._base is None), id(tensor)


def is_private(tensor: Tensor) -> bool:
    """Return whether nobody outside of torch has the memory of a tensor, as far as torch knows.

    Who writes into it from numpy, from another process or through a buffer raises no version. Memory that
    torch did not allocate, or gave to numpy, cannot be resized: `torch.from_numpy`, `torch.from_dlpack`,
    `torch.frombuffer`, files, `tensor.numpy()`. Memory of other processes is shared.
    """
    if not _is_plain(tensor):
        return True
    storage = tensor.untyped_storage()
    return storage.resizable() and not (tensor.is_cpu and storage.is_shared())


def _state(tensor: Tensor, base: Tensor | None) -> tuple[object, ...]:
    """Return what changes when a tensor is written to or gets other memory, as by `tensor.data = other`."""
    if not _is_plain(tensor):
        return id(tensor if base is None else base), tensor._version
    return _state_in_memory(tensor, base)


def _state_in_memory(tensor: Tensor, base: Tensor | None) -> tuple[object, ...]:
    whole = tensor if base is None else base
    return id(whole), tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _own_storage(tensor: Tensor, base: Tensor | None, views: int) -> UntypedStorage | None:
    """Return the storage of a tensor that shares it with nobody but its base.

    What else has it might write without this tensor's version telling: what `tensor.data` gives has a version
    of its own.
    """
    if _users is None or not _is_plain(tensor):
        return None
    storage = tensor.untyped_storage()
    # One more is the Python object that stands for the storage.
    known = views + (2 if base is None else 3)
    return storage if _users(storage._cdata) <= known else None


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage; subclasses may hold anything."""
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_meta
