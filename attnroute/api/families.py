"""Calls that differ in values and in their number of keys alone, as the first layers of decoding steps do.

What tells them from others is compared in one call of C++, as in all calls that repeat one. The class of a
number of keys is told by a few conditions on it, as long as it stays between two that order changes at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnroute.api import routes
from attnroute.settings import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from attnroute.api.routes import Route
    from attnroute.engine.classes import Span

_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
HAS_GUARDS: Final = _Guards is not None


def guards_of(tensors: tuple[Any, ...], *, any_keys: bool = False) -> Callable[..., bool]:
    """Return what tells whether tensors are of the same kind as these.

    Args:
        tensors: Query, key, value and others.
        any_keys: The number of keys, and with it how far rows are apart, is not compared.
    """
    sizes = strides = None
    if any_keys:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        for at in (1, 2):
            sizes[at][2], strides[at][:2] = None, (None, None)
    guards = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check  # type: ignore[no-any-return]


class Family:
    """Such calls: whether another one belongs to them, and the route that it takes."""

    __slots__ = ("_arch", "_check", "_known", "_place", "_settings")

    def __init__(self, tensors: tuple[Any, ...], place: object, arch: str) -> None:
        """Take a call.

        Args:
            tensors: Query, key, value and others, in layout bhsd.
            place: Its `lengths.place_of`.
            arch: The architecture of its device.
        """
        self._check = guards_of(tensors, any_keys=True)
        self._settings = environment()
        self._place, self._arch = place, arch
        self._known: tuple[Span, dict[Hashable, Route]] | None = None

    def has(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether a call of these tensors belongs to the family."""
        if not self._check(*tensors) or self._settings is not environment():
            return False
        key: Tensor
        value: Tensor
        _, key, value, *_ = tensors
        # How far rows are apart is not compared: these say that nothing lies between them.
        return key.shape[2] == value.shape[2] and key.is_contiguous() and value.is_contiguous()

    def route_of(self, number: int) -> Route | None:
        """Return the route of a call with so many keys, None where its class is new."""
        asked, known = (self._place, number, self._arch, self._settings), self._known
        if known is None or number not in known[0].numbers:
            span = routes.numbers_from(*asked)
            if span is None:
                return routes.with_keys(*asked)
            known = self._known = (span, {})
        answers = known[0].answers(number)
        route = known[1].get(answers)
        if route is None and (route := routes.with_keys(*asked)) is not None:
            known[1][answers] = route
        return route
