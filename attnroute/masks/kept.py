"""Keep what was made from a tensor or a mask object, for as long as that lives and nobody writes into it.

All layers of a model get the same mask, so what a kernel needs of it (ids, flags, block lists) is made once.
What is made from a mask object is kept in the object. What is made from a tensor is kept in `_OF_TENSORS`,
because torch copies and saves a tensor with its attributes; a tensor's entry goes with its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from attnroute.masks.marks import Mark, is_private, places_of
from attnroute.masks.tracing import innermost_transform, is_capturing, is_traced, is_tracing
from attnroute.memory import KEEPER, Memory

_T = TypeVar("_T")
KEPT: Final = 64
"""Values that are kept with one tensor or mask object, whatever lengths it is read at."""
TENSORS_KEPT: Final = 4096
"""Tensors with which something is kept; each counts until its memory is freed."""


class Keeper:
    """Keeps what was made from one tensor or mask object, with marks of the tensors that it was made from.

    Attributes:
        token: Stands for the tensor or object as it is, in keys that may not keep alive what is kept.
    """

    __slots__ = ("_made", "_marks", "token")

    def __init__(self, marks: tuple[Mark, ...]) -> None:
        """Keep nothing yet.

        Args:
            marks: Of the tensors.
        """
        self.token = object()
        self._marks = marks
        self._made: Memory[Hashable, Any] = Memory(KEPT)

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether these are the tensors that it keeps something of, unchanged."""
        if len(tensors) != len(self._marks):
            return False
        # Every call with a mask waits for this, so it is no generator.
        for mark, tensor in zip(self._marks, tensors, strict=True):  # noqa: SIM110
            if not mark.fits(tensor):
                return False
        return True

    def is_usable(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether these are its tensors, unchanged, private and in no CUDA graph that is captured."""
        if len(tensors) != len(self._marks):
            return False
        # Every call with a mask waits for this, and `strict` would take time once more for the lengths.
        for mark, tensor in zip(self._marks, tensors):  # noqa: B905
            if not mark.fits_privately(tensor) or is_capturing(tensor):
                return False
        return True

    def keep(self, what: Hashable, make: Callable[[], _T]) -> _T:
        """Return what was made before, or make it."""
        made: _T = self._made.keep(what, lambda: _outside_inference_mode(make))
        return made

    def values(self) -> list[Any]:
        """Return everything that is kept."""
        return self._made.values()

    def beside(self, other: Tensor) -> Keeper:
        """Return what keeps things that are made of another tensor too, as long as both live."""
        place = ("beside", id(other))
        pair: Keeper | None = self._made.get(place)
        if pair is None or not pair.fits((other,)):
            made = self._made

            def ended(_: Hashable) -> None:
                made.drop(lambda value: value is pair)

            pair = Keeper((Mark(other, ended=ended),))
            made.put(place, pair)
        return pair

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of an object, and a process that it is sent to, make everything anew."""
        return _nothing, ()


_OF_TENSORS: Memory[Hashable, Keeper] = Memory(TENSORS_KEPT, f"{__name__}._OF_TENSORS", "with its tensor")
"""Keepers by the place of their mark. One is stale once its tensor changes, and goes with the tensor."""


def may_remember(owner: object) -> bool:
    """Return whether what is made may be kept: not under tracing, nor where changes go unnoticed."""
    if is_tracing() or innermost_transform() is not None:
        return False
    # What is kept would be baked into a CUDA graph that is captured, and stale when that is replayed.
    return all(
        not is_traced(t)
        and not is_capturing(t)
        and not t.requires_grad
        and not t.is_inference()
        and is_private(t)
        for t in _tensors(owner)
    )


def remember(owner: object, what: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for an owner before, or make it; it goes with the owner or when that changes.

    The owner is a tensor or a mask object; an object changes when a tensor in it does. What is kept with a
    tensor may not hold it, nor a view of it: it would keep it alive for ever.
    """
    keeper = keeper_of(owner)
    return make() if keeper is None else keeper.keep(what, make)


def remember_pair(owner: Tensor, other: Tensor, what: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for two tensors before, or make it; it goes with either."""
    keeper = keeper_of(owner) if may_remember(other) else None
    return make() if keeper is None else keeper.beside(other).keep(what, make)


def keeper_of(owner: object, *, views: int = 0) -> Keeper | None:
    """Return what keeps values for an owner as it is now, None where nothing may be kept.

    Args:
        owner: A tensor or a mask object; None = nobody.
        views: How many views of the tensor its caller holds.
    """
    if owner is None or not may_remember(owner):
        return None
    return _of_tensor(owner, views) if isinstance(owner, Tensor) else _of_object(owner)


def known_keeper(owner: Any) -> Keeper | None:
    """Return the keeper that an unchanged tensor or mask object has already, None where it may not be used.

    The short way of warm calls waits for it. Who asks makes sure that nothing traces or transforms.
    """
    # Whether an object is a tensor takes long to ask, and what holds a keeper is none.
    found: Keeper | None = None if type(owner) is Tensor else vars(owner).get(KEEPER)
    if found is not None:
        return found if found.is_usable(getattr(owner, "tensors", ())) else None
    if isinstance(owner, Tensor):
        for place in places_of(owner):
            keeper = _OF_TENSORS.get(place)
            if keeper is not None and keeper.is_usable((owner,)):
                return keeper
    return None


def _of_tensor(tensor: Tensor, views: int) -> Keeper:
    for place in places_of(tensor):
        keeper = _OF_TENSORS.get(place)
        if keeper is not None and keeper.fits((tensor,)):
            return keeper
    mark = Mark(tensor, views=views, ended=_OF_TENSORS.pop)
    keeper = Keeper((mark,))
    _OF_TENSORS.put(mark.place, keeper)
    return keeper


def _of_object(owner: object) -> Keeper:
    """Objects hold it themselves: what a mask is lowered to may hold functions of a model that owns it."""
    tensors, attributes = _tensors(owner), vars(owner)
    keeper: Keeper | None = attributes.get(KEEPER)
    if keeper is None or not keeper.fits(tensors):
        # A frozen dataclass takes no attribute, but its dict does.
        keeper = attributes[KEEPER] = Keeper(tuple(map(Mark, tensors)))
    return keeper


def _tensors(owner: object) -> tuple[Tensor, ...]:
    return (owner,) if isinstance(owner, Tensor) else getattr(owner, "tensors", ())


def _outside_inference_mode(make: Callable[[], _T]) -> _T:
    """Make a tensor that training may use later, although inference mode asks for it first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(mode=False), torch.no_grad():
        return make()


def _nothing() -> None:
    return None
