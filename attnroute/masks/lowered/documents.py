"""Packed documents as tensors: an id per token, and where documents end if no device must be waited for."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.masks import checks
from attnroute.masks.kept import may_remember, remember
from attnroute.masks.lowered.form import Extent, LoweredMask
from attnroute.masks.lowered.sequences import tokens
from attnroute.masks.tracing import is_capturing, is_wrapped


def of_lengths(lengths: tuple[int, ...], extent: Extent) -> LoweredMask:
    """Return documents of these lengths, which sum to the sequence length."""
    bounds = tuple(accumulate(lengths, initial=0))
    order = torch.arange(len(lengths), dtype=torch.int32, device=extent.device)
    repeats = torch.tensor(lengths, dtype=torch.int64, device=extent.device)
    ids = torch.repeat_interleave(order, repeats, output_size=extent.seqlen_kv)[None]
    return _bounded(ids, torch.tensor(bounds, dtype=torch.int32, device=extent.device), bounds)


def of_ids(ids: Tensor, extent: Extent) -> LoweredMask:
    """Return documents of the tokens with equal ids, integers (seqlen,) or (batch, seqlen), at any places."""
    rows = (ids if ids.dim() > 1 else ids[None]).to(extent.device)
    return LoweredMask(document_ids_q=rows, document_ids_kv=rows, max_seqlen=extent.seqlen_kv)


def of_sums(sums: Tensor, extent: Extent) -> LoweredMask:
    """Return documents given by integer prefix sums (documents + 1,); with bounds where those lie on the CPU.

    Raises:
        ArgumentError: Sums on the CPU do not rise from 0 to the sequence length.
    """
    checks.document_sums(sums, extent.seqlen_kv)
    found = tokens("cu_seqlens", sums, extent.seqlen_kv, extent.device)
    if checks.is_readable(sums):
        return _bounded(found.ids, found.sums, tuple(sums.tolist()))
    return LoweredMask(
        document_ids_q=found.ids,
        document_ids_kv=found.ids,
        cu_seqlens=found.sums,
        max_seqlen=extent.seqlen_kv,
    )


def of_positions(position_ids: Tensor, extent: Extent) -> LoweredMask:
    """Return documents that start where a position is not the one before it plus one.

    Made once per tensor and version; anew while torch compiles or a CUDA graph is captured, so that what is
    replayed is made from the tensor then.

    Args:
        position_ids: Integer tensor (seqlen,) or (batch, seqlen).
        extent: The sizes, none of them 0, and the device.
    """
    if is_capturing(position_ids):
        return _of_positions(position_ids, extent)
    return remember(position_ids, ("documents", extent.device), lambda: _of_positions(position_ids, extent))


def positions_are_readable(position_ids: Tensor) -> bool:
    """Return whether bounds can be had: one row for the whole batch, whose values may be read and kept.

    Not while torch compiles or a CUDA graph is captured, nor of a tensor whose changes cannot be seen, which
    would be waited for in every layer.
    """
    if not may_remember(position_ids) or is_capturing(position_ids):
        return False
    if type(position_ids) is not Tensor or position_ids.is_meta or is_wrapped(position_ids):
        return False
    return position_ids.dim() == 1 or position_ids.shape[0] == 1 or position_ids.stride(0) == 0


def _bounded(ids: Tensor, sums: Tensor, bounds: tuple[int, ...]) -> LoweredMask:
    return LoweredMask(
        document_ids_q=ids,
        document_ids_kv=ids,
        document_bounds=bounds,
        cu_seqlens=sums,
        max_seqlen=max((stop - start for start, stop in pairwise(bounds)), default=0),
    )


def _of_positions(position_ids: Tensor, extent: Extent) -> LoweredMask:
    starts = _starts(position_ids)
    ids = pad(starts.cumsum(1, dtype=torch.int32), (1, 0))
    if not positions_are_readable(position_ids):
        return of_ids(ids, extent)
    # The one wait for the device.
    bounds = (0, *_places(starts), extent.seqlen_kv)
    sums = torch.tensor(bounds, dtype=torch.int32, device="cpu").to(extent.device, non_blocking=True)
    return _bounded(ids.to(extent.device), sums, bounds)


def _starts(position_ids: Tensor) -> Tensor:
    """Return a bool tensor (rows, seqlen - 1), True where a document starts behind the first token."""
    rows = position_ids if position_ids.dim() > 1 else position_ids[None]
    # A row that was expanded over the batch is one row. The differences of 8-bit positions would wrap around.
    rows = (rows[:1] if rows.stride(0) == 0 else rows).to(torch.int64)
    return rows[:, 1:] != rows[:, :-1] + 1


def _places(starts: Tensor) -> list[int]:
    found: list[int] = (starts[0].cpu().nonzero().flatten() + 1).tolist()
    return found
