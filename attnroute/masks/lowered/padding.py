"""Key padding as tensors: which keys of each batch row exist, and how many where they lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnroute.masks.lowered.form import Extent, LoweredMask


def first_keys(counts: Sequence[int] | Tensor, extent: Extent) -> Tensor:
    """Return a bool tensor (batch, seqlen_kv), True at the first keys of each row."""
    given = torch.as_tensor(counts, device=extent.device)[:, None]
    return torch.arange(extent.seqlen_kv, device=extent.device)[None] < given


def right(lengths: Sequence[int] | Tensor, extent: Extent) -> LoweredMask:
    """Return a mask that allows the first keys of each row: padding on the right.

    Args:
        lengths: Keys that exist, per batch row.
        extent: The sizes and the device.
    """
    keep = first_keys(lengths, extent)
    return LoweredMask(key_keep=keep, key_counts=_clamped(lengths, extent), padding_side="right")


def left(missing: Sequence[int] | Tensor, extent: Extent) -> LoweredMask:
    """Return a mask that forbids the first keys of each row: padding on the left.

    Args:
        missing: Padding keys, per batch row.
        extent: The sizes and the device.
    """
    counts = extent.seqlen_kv - _clamped(missing, extent)
    return LoweredMask(key_keep=~first_keys(missing, extent), key_counts=counts, padding_side="left")


def flags(keep: Tensor, extent: Extent) -> LoweredMask:
    """Return a mask that allows the keys that are flagged, (batch, seqlen_kv)."""
    return LoweredMask(key_keep=keep.to(device=extent.device, dtype=torch.bool))


def _clamped(counts: Sequence[int] | Tensor, extent: Extent) -> Tensor:
    # Eight bits cannot hold the bounds.
    given = torch.as_tensor(counts, device=extent.device).to(torch.int64)
    return given.clamp(0, extent.seqlen_kv).to(torch.int32)
