"""What kernels are given of masks: one dense tensor, and which rows have no key. Made once for each mask."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from attnroute.executors.protocol import Inputs
from attnroute.masks.kept import Keeper
from attnroute.masks.lowered.dense import additive, build, empty_rows
from attnroute.masks.lowered.form import Extent, LoweredMask
from attnroute.masks.tracing import is_tracing
from attnroute.memory import cached
from attnroute.vocabulary import Repair

PREPARED_LIMIT_BYTES: Final = 2**30
"""A prepared mask larger than this is made anew each call instead of being kept with its owner."""
BANDS_KEPT: Final = 4
"""Causal and window masks that are kept: a model has one or two kinds of layers."""
BAND_LIMIT_BYTES: Final = 64 * 2**20
"""A causal or window mask larger than this is made anew each call."""
DENSE: Final[frozenset[Repair]] = frozenset({"materialize_mask", "cast_mask", "cast_bias", "align_bias"})
"""Repairs that make one tensor of mask and bias."""
ADDITIVE: Final[frozenset[Repair]] = frozenset({"cast_mask", "cast_bias", "align_bias"})
"""Those after which it is added."""


def as_given(inputs: Inputs) -> Tensor | None:
    """The dense mask or bias as the caller gave it, for operators that take it so."""
    return inputs.mask.dense if inputs.bias is None else inputs.bias


def dense_of(inputs: Inputs, repairs: frozenset[str], *, kept: bool | None = None) -> Tensor:
    """Return mask and bias as one tensor, bool or added as the repairs say.

    Args:
        inputs: The call.
        repairs: Those of its plan.
        kept: What `is_kept` says, where the caller asked already.
    """
    query, extent = inputs.query, extent_of(inputs)
    as_bias = bool(repairs & ADDITIVE) or inputs.bias is not None

    def make() -> Tensor:
        allowed = None if inputs.mask.is_full else build(inputs.mask, extent)
        if not as_bias and allowed is not None:
            return allowed
        return additive(allowed, inputs.bias, query.dtype)

    if is_tracing() or not (is_kept(inputs) if kept is None else kept):
        return make()
    if _is_small_band(inputs):
        return _band(inputs.mask, extent, query.dtype if as_bias else torch.bool)
    return cast("Keeper", inputs.keeper).keep(("dense", *place_of(inputs, repairs)), make)


def is_kept(inputs: Inputs) -> bool:
    """Return whether what is prepared from the mask is kept: not with a bias, and not where it is large."""
    if inputs.bias is not None:
        return False
    return _is_small_band(inputs) or (inputs.keeper is not None and is_small(inputs))


def is_small(inputs: Inputs) -> bool:
    """Return whether what is prepared from the mask may stay in memory."""
    rows = inputs.mask.dense.shape[0] if inputs.mask.dense is not None else 1
    return _bytes(inputs) * rows <= PREPARED_LIMIT_BYTES


def extent_of(inputs: Inputs) -> Extent:
    """Return the sizes of a call."""
    query = inputs.query
    return Extent(query.shape[0], query.shape[1], query.shape[2], inputs.key.shape[2], query.device)


def _is_small_band(inputs: Inputs) -> bool:
    return inputs.mask.is_band_only and _bytes(inputs) <= BAND_LIMIT_BYTES


def _bytes(inputs: Inputs) -> int:
    """Return what a mask of one batch row and head takes."""
    return inputs.query.shape[2] * inputs.key.shape[2] * inputs.query.element_size()


@cached(BANDS_KEPT)
def _band(mask: LoweredMask, extent: Extent, dtype: torch.dtype) -> Tensor:
    """Causal and window masks are the same for all layers, and no object lives as long as they are needed."""
    with torch.inference_mode(mode=False), torch.no_grad():
        allowed = build(mask, extent)
        return allowed if dtype == torch.bool else additive(allowed, None, dtype)


def empty_rows_of(inputs: Inputs, repairs: frozenset[str]) -> Tensor:
    """Return which rows have no key, (batch or 1, heads or 1, seqlen_q or 1, 1), made once for each mask."""
    attn = cast("Tensor", inputs.attn)
    if inputs.bias is not None or inputs.keeper is None:
        return empty_rows(attn).unsqueeze(-1)
    what = ("empty rows", *place_of(inputs, repairs))
    return inputs.keeper.keep(what, lambda: empty_rows(attn).unsqueeze(-1))


def place_of(inputs: Inputs, repairs: frozenset[str]) -> tuple[object, ...]:
    """Return what a mask that is prepared for a kernel depends on, the mask itself aside."""
    query, mask = inputs.query, inputs.mask
    sizes = (*query.shape[:3], inputs.key.shape[2], query.device)
    return (bool(repairs & ADDITIVE), query.dtype, sizes, mask.band_lo, mask.band_hi)
