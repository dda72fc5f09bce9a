"""Documents told by positions that restart: their ids without waiting, their bounds with one wait."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.masks.lowered.form import LoweredMask
from attnroute.masks.tensors import is_wrapped, may_remember, remember

if TYPE_CHECKING:
    from attnroute.masks.objects.nodes import Extent


def lowered(position_ids: Tensor, extent: Extent) -> LoweredMask:
    """Return documents with one id per token, and their bounds where those may be read.

    Made once per tensor and version; anew while torch compiles or a CUDA graph is captured, so that what is
    replayed is made from the tensor then.

    Args:
        position_ids: Integer tensor (seqlen,) or (batch, seqlen).
        extent: The sizes, none of them 0, and the device.
    """
    if _is_captured(position_ids):
        return _lowered(position_ids, extent)
    return remember(position_ids, ("documents", extent.device), lambda: _lowered(position_ids, extent))


def is_readable(position_ids: Tensor) -> bool:
    """Return whether bounds can be had: one row for the whole batch, whose values may be read and kept.

    Not while torch compiles or a CUDA graph is captured, nor of a tensor whose changes cannot be seen, which
    would be waited for in every layer.
    """
    if not may_remember(position_ids) or _is_captured(position_ids):
        return False
    if type(position_ids) is not Tensor or position_ids.is_meta or is_wrapped(position_ids):
        return False
    return position_ids.dim() == 1 or position_ids.shape[0] == 1 or position_ids.stride(0) == 0


def _lowered(position_ids: Tensor, extent: Extent) -> LoweredMask:
    starts = _starts(position_ids)
    ids = pad(starts.cumsum(1, dtype=torch.int32), (1, 0)).to(extent.device)
    if not is_readable(position_ids):
        return LoweredMask(document_ids_q=ids, document_ids_kv=ids, max_seqlen=extent.seqlen_kv)
    # The one wait for the device.
    bounds = (0, *_places(starts), extent.seqlen_kv)
    return LoweredMask(
        document_ids_q=ids,
        document_ids_kv=ids,
        document_bounds=bounds,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device="cpu").to(extent.device, non_blocking=True),
        max_seqlen=max(stop - start for start, stop in pairwise(bounds)),
    )


def _starts(position_ids: Tensor) -> Tensor:
    """Return a bool tensor (rows, seqlen - 1), True where a document starts behind the first token."""
    rows = position_ids if position_ids.dim() > 1 else position_ids[None]
    # A row that was expanded over the batch is one row. The differences of 8-bit positions would wrap around.
    rows = (rows[:1] if rows.stride(0) == 0 else rows).to(torch.int64)
    return rows[:, 1:] != rows[:, :-1] + 1


def _places(starts: Tensor) -> list[int]:
    found: list[int] = (starts[0].cpu().nonzero().flatten() + 1).tolist()
    return found


def _is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph records: what it replays must be computed anew from the tensor then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
