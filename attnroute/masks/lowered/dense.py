"""A lowered mask as one dense tensor: bool, or additive with 0 where allowed and -inf elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnroute.masks.layout import aligned, aligned_empty
from attnroute.masks.lowered.region import allowed, whole
from attnroute.masks.tracing import is_exporting, is_wrapped

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import Extent, LoweredMask


def materialize(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as a bool tensor (batch or 1, heads or 1, seqlen_q, seqlen_kv), True = attend."""
    shape = (1, 1, extent.seqlen_q, extent.seqlen_kv)
    allowed = build(lowered, extent)
    return allowed.expand(torch.broadcast_shapes(tuple(allowed.shape), shape))


def build(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as the smallest bool tensor that broadcasts to it: key padding has one row."""
    found = allowed(lowered, whole(extent))
    if found is None:
        return torch.ones((1, 1, 1, extent.seqlen_kv), dtype=torch.bool, device=extent.device)
    return found


def additive(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return mask and bias as one additive tensor, 0 or the bias where allowed and -inf elsewhere.

    The storage is padded so that every row starts at a multiple of `ALIGN` elements. Differentiable in
    `bias`.
    """
    if mask is None:
        if bias is None:
            msg = "additive() requires a mask or a bias."
            raise ValueError(msg)
        return aligned(bias.to(dtype))
    if _is_followed(mask, bias):
        start = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias.to(dtype)
        return aligned(start.masked_fill(~mask, -math.inf))
    shape = tuple(mask.shape) if bias is None else torch.broadcast_shapes(mask.shape, bias.shape)
    target = aligned_empty(shape, dtype, mask.device)
    if bias is None:
        target.fill_(-math.inf)
        return target.masked_fill_(mask, 0.0)
    return target.copy_(bias.detach()).masked_fill_(~mask, -math.inf)


def empty_rows(dense: Tensor) -> Tensor:
    """Return (batch or 1, heads or 1, seqlen_q or 1), True where a query may attend no key."""
    allowed = dense if dense.dtype == torch.bool else dense != -math.inf
    return ~allowed.any(-1)


def _is_followed(allowed: Tensor, bias: Tensor | None) -> bool:
    """Return whether a gradient, forward-mode duals, a functorch transform or export must see each step.

    What is written to a part of a tensor asks export whether that is the whole, which lengths decide.
    """
    if is_exporting():
        return True
    if bias is not None and (
        (bias.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0
    ):
        return True
    return any(is_wrapped(t) for t in (allowed, bias) if t is not None)
