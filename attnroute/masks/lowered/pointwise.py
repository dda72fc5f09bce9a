"""Evaluate a mask_mod or score_mod of FlexAttention at every position of a rectangle, with torch.vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from attnroute.masks.lowered.region import Region

_HALVES = (torch.float16, torch.bfloat16)
_BATCH_TO_KEY = ((0, None, None, None), (None, 0, None, None), (None, None, 0, None), (None, None, None, 0))


class Indexing(TorchFunctionMode):
    """Lets a function index tensors with the 0-D tensors it is given.

    Without it such an index is turned into a Python number, which vmap refuses.
    """

    def __init__(self, *, widens: bool) -> None:
        """Set whether elements in half precision are read as float32."""
        super().__init__()
        self._widens = widens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Index by gathering, also where every index is a single number."""
        if func is Tensor.__getitem__:
            tensor, place = args
            index = place if isinstance(place, tuple) else (place,)
            if index and all(isinstance(part, Tensor) or type(part) is int for part in index):
                found = torch.ops.aten.index(tensor, [_as_index(part, tensor) for part in index])
                return found.float() if self._widens and found.dtype in _HALVES else found
        return func(*args, **(kwargs or {}))


def evaluate(
    function: Callable[..., Tensor],
    region: Region,
    *,
    score: Tensor | None = None,
    per_batch: bool = True,
    per_head: bool = True,
) -> Tensor:
    """Return a function's values at every position of a region.

    Args:
        function: Takes 0-D tensors: the score if there is one, then batch row, query head, query and key.
        region: The positions.
        score: One score for each position, (batch rows, heads, queries, keys). The function then reads
            elements in half precision as float32, so that its arithmetic is as precise as the scores.
        per_batch: False calls the function with batch row 0 only.
        per_head: False calls the function with query head 0 only.

    Returns:
        (batch rows, heads, queries, keys), or 1 in place of the first two where they were left out.
        Differentiable in `score` and in the tensors that the function reads. A dimension on which the values
        do not depend has stride 0.
    """
    ranges = (
        (region.b0, region.b1) if per_batch else (0, 1),
        (region.h0, region.h1) if per_head else (0, 1),
        (region.i0, region.i1),
        (region.j0, region.j1),
    )
    sizes = tuple(stop - start for start, stop in ranges)
    if 0 in sizes:
        # A function that is called nowhere still has a type; vmap, though, calls it at least once.
        return torch.empty(sizes, dtype=torch.bool, device=region.device) if score is None else score
    positions = [torch.arange(start, stop, device=region.device) for start, stop in ranges]
    scores = () if score is None else (score,)
    for dims in reversed(_BATCH_TO_KEY):
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *dims))
    with Indexing(widens=score is not None):
        return function(*scores, *positions)


def _as_index(part: Tensor | int, tensor: Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else torch.full((), part, device=tensor.device)
