"""What the packages of the flash-attention repository share: how they count windows and read tensors.

Their backward kernels take -inf and +inf alike for the log-sum-exp of a row with no key: it weighs nothing
then. Read in csrc/flash_attn/src/softmax.h from 2.5.0 to 2.8.3 and hopper/flash_bwd_preprocess_kernel.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.packages.request import Request

OPEN = -1
"""A side of a window without an end, as these packages write it."""
_ALIGNED = 8
"""Elements of 16 bits that one load takes."""
_ALIGNED_BYTES = 16


class Sides(NamedTuple):
    """How many keys a query sees beside the diagonal that ends with the last query and key.

    Attributes:
        left: Before it; `OPEN` = all.
        right: After it; `OPEN` = all.
    """

    left: int
    right: int

    @property
    def is_causal(self) -> bool:
        """Nothing is left out but what comes after the diagonal."""
        return self.left == OPEN and self.right == 0

    @property
    def are_open(self) -> bool:
        """Nothing is left out."""
        return self.left == OPEN and self.right == OPEN


def sides_of(request: Request) -> Sides:
    """Return the sides of a request's window, open where they reach every key from every query.

    Raises:
        ValueError: As `check_sides`.
    """
    check_sides(request)
    # The first key is seqlen_kv - 1 keys before the last query's diagonal, the last one seqlen_q - 1 keys
    # after that of the first query.
    return Sides(
        _opened(request.left, request.max_seqlen_kv - 1), _opened(request.right, request.max_seqlen_q - 1)
    )


def check_sides(request: Request) -> None:
    """Check that no side of a request's window is negative.

    Raises:
        ValueError: One is, which these packages would take for an open one.
    """
    for name, side in (("left", request.left), ("right", request.right)):
        if side is not None and side < 0:
            msg = (
                f"window requires sides that are not negative from the bottom right; got {side} keys to the"
                f" {name} of the diagonal; the decision promised such sides."
            )
            raise ValueError(msg)


def _opened(side: int | None, reach: int) -> int:
    return OPEN if side is None or side >= reach else side


def readable(tensor: Tensor) -> Tensor:
    """Return a gradient or an output, whose strides may be any, as 16-byte loads can read it.

    Head dimensions are multiples of 8 here.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED_BYTES == 0:
        return tensor
    *rows, last = tensor.stride()
    fits = last == 1 and tensor.data_ptr() % _ALIGNED_BYTES == 0
    for stride in rows:
        fits = fits and stride % _ALIGNED == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
