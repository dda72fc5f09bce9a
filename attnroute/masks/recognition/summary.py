"""Read dense bool masks: which mask objects allow the same, and whether a query may attend no key.

A mask is read once per tensor and version, in bounded memory, and the device is waited for once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnroute.masks.kept import keeper_of, may_remember, remember
from attnroute.masks.layout import dense_node
from attnroute.masks.lowered.form import Extent, as_4d
from attnroute.masks.recognition.recognize import Rows, recognize
from attnroute.masks.tracing import is_capturing, is_wrapped
from attnroute.question.nodes import DenseNode, RecognizedNode

if TYPE_CHECKING:
    from attnroute.masks.objects.base import Mask
    from attnroute.vocabulary import EmptyRows

INSPECT_THRESHOLD = 256 * 256
"""Elements of seqlen_q * seqlen_kv below which reading a mask is not worth it, the mask's own size aside.

One thread of a CPU reads 256 x 256 in 0.36 ms, where a causal tensor costs each call of two sequences
and eight heads 0.27 ms more than the object does: two layers pay for it. At 128 x 128 it is 0.3 and 0.1 ms,
at 512 x 512 0.6 and 0.7 ms. On an H100 it takes 0.5 to 2 ms up to 4096 x 4096, most of it launches, where
a tensor costs each call 0.05 ms more at 256 to 2048 and 0.2 ms at 4096: the layers of a model share one
summary (benchmarks/recognition.py, benchmarks/results/h100-torch2.11-recognition.json).
"""
SUMMARIES_KEPT = 64
"""Views of one tensor whose summaries are kept; above this, all are forgotten."""
_CHUNK = 2**24
_WORD = 8
_WORDS = 128
_DIMS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class MaskSummary:
    """What the values of a dense bool mask amount to.

    Attributes:
        empty_rows: Whether some query may attend no key.
        recognized: The nodes that allow the same; () if everything is allowed, None if none are known.
        masks: The objects that allow the same, in the order of the nodes. Tensors that are equal for a
            decision may differ in these.
    """

    empty_rows: EmptyRows
    recognized: tuple[RecognizedNode, ...] | None
    masks: tuple[Mask, ...] | None = field(default=None, compare=False)


def inspected_node(tensor: Tensor, extent: Extent) -> DenseNode:
    """Return a bool mask as plain data for a decision, with its summary where it may be read."""
    summary = inspect_mask(tensor, extent)
    return (
        dense_node(tensor) if summary is None else dense_node(tensor, summary.empty_rows, summary.recognized)
    )


def inspect_mask(tensor: Tensor, extent: Extent) -> MaskSummary | None:
    """Summarise a dense bool mask once per tensor and version; None where it may not be read or is too small.

    The whole mask is read on its device and the answer waited for. Views of one tensor share their summaries:
    of models that cut each layer's mask out of one buffer, it is read once.

    Args:
        tensor: Bool, True = attend. Shapes other than (..., seqlen_q or 1, seqlen_kv) are not read.
        extent: Of the call; heads and device are not read.
    """
    if not _is_worth(tensor, extent) or not _may_be_read(tensor) or not may_remember(tensor):
        return None
    what = ("summary", extent.batch, extent.seqlen_q)
    return remember(tensor, what, lambda: _shared(tensor, extent))


def _is_worth(tensor: Tensor, extent: Extent) -> bool:
    if extent.seqlen_q * extent.seqlen_kv < INSPECT_THRESHOLD or tensor.dim() not in _DIMS:
        return False
    shape, dims = tensor.shape, tensor.dim()
    fits = shape[-1] == extent.seqlen_kv and (dims == 1 or shape[-2] in (1, extent.seqlen_q))
    return fits and (dims < 4 or shape[0] in (1, extent.batch)) and tensor.dtype == torch.bool


def _may_be_read(tensor: Tensor) -> bool:
    """Only a plain tensor has values here, and none can be waited for while a CUDA graph records."""
    if type(tensor) is not Tensor or tensor.is_meta or is_wrapped(tensor):
        return False
    return not is_capturing(tensor)


def _shared(tensor: Tensor, extent: Extent) -> MaskSummary:
    """Read the mask, or return the summary of another view of the same memory."""
    base = tensor._base  # noqa: SLF001 - torch has no public name for what a view is a view of
    if base is None or base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        # `tensor.data = other` leaves a view its base.
        return _inspect(tensor, extent)
    keeper = keeper_of(base, views=1)
    if keeper is None:
        return _inspect(tensor, extent)
    summaries: dict[Any, MaskSummary] = keeper.keep("summaries", dict)
    place = (tensor.storage_offset(), tensor.shape, tensor.stride(), extent.batch, extent.seqlen_q)
    if place not in summaries:
        if len(summaries) >= SUMMARIES_KEPT:
            summaries.clear()
        summaries[place] = _inspect(tensor, extent)
    return summaries[place]


def _inspect(tensor: Tensor, extent: Extent) -> MaskSummary:
    matrix = _distinct(as_4d(tensor))
    if matrix.numel() == 0:
        return MaskSummary("none", (), ())
    first, count, is_plain, has_empty = _read(matrix)
    empty_rows: EmptyRows = "some" if has_empty else "none"
    if not is_plain:
        return MaskSummary(empty_rows, None)
    filled = count > 0
    last = torch.where(filled, first + count - 1, -1)
    first = torch.where(filled, first, extent.seqlen_kv)
    masks = recognize(Rows(first, last, extent.batch, extent.seqlen_q, extent.seqlen_kv))
    if masks is None:
        return MaskSummary(empty_rows, None)
    return MaskSummary(empty_rows, tuple(n for mask in masks for n in mask.describe(extent)), masks)  # type: ignore[misc]


def _distinct(tensor: Tensor) -> Tensor:
    """Return the batch rows, heads and queries that have memory of their own: expanded ones are read once."""
    for dim in range(3):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _read(matrix: Tensor) -> tuple[Tensor, Tensor, bool, bool]:
    """Read a mask in pieces and wait once.

    Returns:
        The first key and the number of keys of each query in the first head, int32 (batch, seqlen_q) on the
        CPU; whether all heads are the same and each row is one run of keys; whether a row is empty.
    """
    batch, heads, seqlen_q, seqlen_kv = matrix.shape
    step = max(1, _CHUNK // (batch * heads * seqlen_kv))
    parts = [_read_rows(matrix[:, :, start : start + step]) for start in range(0, seqlen_q, step)]
    first, count, runs = parts[0] if len(parts) == 1 else (torch.cat(p, -1) for p in zip(*parts, strict=True))
    is_broken = (runs > 1).any() | (first != first[:, :1]).any() | (count != count[:, :1]).any()
    verdicts = torch.stack([is_broken, (count == 0).any()])
    sizes = (2, batch * seqlen_q, batch * seqlen_q)
    found = torch.cat([verdicts.int(), first[:, 0].flatten(), count[:, 0].flatten()]).cpu().split(sizes)
    broken, empty = found[0].tolist()
    return found[1].view(batch, seqlen_q), found[2].view(batch, seqlen_q), not broken, bool(empty)


def _read_rows(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first key, the number of keys and the number of runs of each row, int32.

    Eight elements are read as one word, which saves a CPU most of the time. So the rows are copied to where
    they begin and end at multiples of a word, with 0 and 1 as the only values.
    """
    seqlen_kv = part.shape[-1]
    unit = _WORD * _WORDS if seqlen_kv > _WORD * _WORDS else _WORD
    width = -(-seqlen_kv // unit) * unit
    keys = torch.empty((*part.shape[:-1], width), dtype=torch.bool, device=part.device)
    torch.ne(part.view(torch.uint8), 0, out=keys[..., :seqlen_kv])
    keys[..., seqlen_kv:] = False
    starts = torch.empty_like(keys)
    starts[..., 0] = keys[..., 0]
    torch.gt(keys[..., 1:], keys[..., :-1], out=starts[..., 1:])
    return _first(keys), _number(keys), _number(starts)


def _number(flags: Tensor) -> Tensor:
    """Count the ones of each row. Words are added: each byte of the sum counts for itself, up to 255."""
    words = flags.view(torch.int64)
    counts: Tensor = words.unflatten(-1, (-1, min(_WORDS, words.shape[-1]))).sum(-1)
    return counts.view(torch.uint8).sum(-1, dtype=torch.int32)


def _first(flags: Tensor) -> Tensor:
    """Return the place of the first one in each row, 0 where there is none."""
    words = flags.view(torch.int64)
    at = (words != 0).view(torch.uint8).argmax(-1, keepdim=True)
    within = words.gather(-1, at).view(torch.uint8).argmax(-1)
    return (at[..., 0] * _WORD + within).int()
