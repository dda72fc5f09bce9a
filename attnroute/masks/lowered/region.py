"""Evaluate a lowered mask on a rectangle of queries and keys, so that memory is bounded by the rectangle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnroute.errors import argument_error
from attnroute.masks.lowered.pointwise import evaluate

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import Extent, LoweredMask, MaskFunction


class Region(NamedTuple):
    """Batch rows [b0, b1), query heads [h0, h1), queries [i0, i1), keys [j0, j1), on a device."""

    b0: int
    b1: int
    h0: int
    h1: int
    i0: int
    i1: int
    j0: int
    j1: int
    device: Any


def whole(extent: Extent) -> Region:
    """Return the region that is everything."""
    batch, heads, seqlen_q, seqlen_kv, device = extent
    return Region(0, batch, 0, heads, 0, seqlen_q, 0, seqlen_kv, device)


def allowed(lowered: LoweredMask, region: Region) -> Tensor | None:
    """Return who may attend in a region as the smallest bool tensor that broadcasts to it; None = everybody.

    Returns:
        (batch rows or 1, heads or 1, queries or 1, keys), True = attend.
    """
    parts = [*_plain(lowered, region), *programmed(lowered, region)]
    if not parts:
        return None
    result = parts[0]
    for part in parts[1:]:
        result = result & part
    return result


def programmed(lowered: LoweredMask, region: Region) -> list[Tensor]:
    """Return the disjunctions, negations and functions of a mask as tensors, all of which must allow."""
    parts = [_either(alternatives, region) for alternatives in lowered.either]
    parts += [~_or_ones(allowed(part, region), region) for part in lowered.exclude]
    parts += [_function(function, region) for function in lowered.functions]
    return parts + [_sparse(block_mask, region) for block_mask in lowered.sparse]


def band(lowered: LoweredMask, region: Region) -> Tensor | None:
    """Return the band of a mask as (1, 1, queries, keys), None where it has none."""
    if lowered.band_lo is None and lowered.band_hi is None:
        return None
    columns = torch.arange(region.j0, region.j1, device=region.device)[None]
    if lowered.diagonal is None:
        rows = torch.arange(region.i0, region.i1, device=region.device)[:, None]
    else:
        rows = lowered.diagonal[region.i0 : region.i1, None]
    if lowered.band_hi is None:
        return (columns >= rows + (lowered.band_lo or 0))[None, None]
    below = columns <= rows + lowered.band_hi
    return (below if lowered.band_lo is None else below & (columns >= rows + lowered.band_lo))[None, None]


def _plain(lowered: LoweredMask, region: Region) -> list[Tensor]:
    parts = [band(lowered, region), _same_document(lowered, region)]
    if lowered.dense is not None:
        parts.append(_cut(lowered.dense, region))
    if lowered.key_keep is not None:
        parts.append(_rows(lowered.key_keep, region)[:, None, None, region.j0 : region.j1])
    return [part for part in parts if part is not None]


def _same_document(lowered: LoweredMask, region: Region) -> Tensor | None:
    if lowered.document_ids_q is None or lowered.document_ids_kv is None:
        return None
    ids_q = _rows(lowered.document_ids_q, region)[:, None, region.i0 : region.i1, None]
    ids_kv = _rows(lowered.document_ids_kv, region)[:, None, None, region.j0 : region.j1]
    return ids_q == ids_kv


def _rows(tensor: Tensor, region: Region) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[region.b0 : region.b1]


def _cut(tensor: Tensor, region: Region) -> Tensor:
    """Slice a four-dimensional tensor; dimensions of size 1 are kept whole."""
    for dim in range(4):
        start, stop = region[2 * dim], region[2 * dim + 1]
        if tensor.shape[dim] != 1:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _either(alternatives: tuple[LoweredMask, ...], region: Region) -> Tensor:
    result = _or_ones(allowed(alternatives[0], region), region)
    for alternative in alternatives[1:]:
        result = result | _or_ones(allowed(alternative, region), region)
    return result


def _or_ones(part: Tensor | None, region: Region) -> Tensor:
    if part is not None:
        return part
    return torch.ones((1, 1, 1, region.j1 - region.j0), dtype=torch.bool, device=region.device)


def _function(function: MaskFunction, region: Region) -> Tensor:
    return _values(function.mask_mod, region, per_batch=function.per_batch, per_head=function.per_head)


def _values(mask_mod: Any, region: Region, *, per_batch: bool, per_head: bool) -> Tensor:
    """Return a predicate's values, with size 1 in the dimensions on which they do not depend."""
    values = evaluate(mask_mod, region, per_batch=per_batch, per_head=per_head)
    if values.dtype != torch.bool:
        to_do = "compare what it returns, as in `value != 0`"
        raise argument_error("mask Function", "a mask_mod that returns bool tensors", values.dtype, to_do)
    # vmap expands the result along what the function does not read; one entry of that is enough.
    for dim in range(3):
        if values.stride(dim) == 0 and values.shape[dim] > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _sparse(block_mask: Any, region: Region) -> Tensor:
    """Full blocks allow, partial blocks ask the mask_mod, others forbid."""
    partial, full = (_in_blocks(block_mask, *lists, region) for lists in _block_lists(block_mask))
    per_batch, per_head = block_mask.shape[0] > 1, block_mask.shape[1] > 1
    return full | (partial & _values(block_mask.mask_mod, region, per_batch=per_batch, per_head=per_head))


def block_matrices(block_mask: Any) -> tuple[Tensor, Tensor]:
    """Return which blocks of a BlockMask of torch are partial and which are full.

    Returns:
        Two bool tensors (batch or 1, heads or 1, query blocks, key blocks).
    """
    partial, full = (_listed(*lists) for lists in _block_lists(block_mask))
    return partial, full


def _block_lists(block_mask: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return numbers and indices of the key blocks of each query block: the partial ones, the full ones."""
    partial = block_mask.kv_num_blocks, block_mask.kv_indices
    if block_mask.full_kv_num_blocks is None:
        return partial, (torch.zeros_like(partial[0]), partial[1])
    return partial, (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _listed(number: Tensor, indices: Tensor) -> Tensor:
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < number[..., None]
    blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    blocks.scatter_(-1, torch.where(listed, indices.long(), columns), True)
    return blocks[..., :columns]


def _in_blocks(block_mask: Any, number: Tensor, indices: Tensor, region: Region) -> Tensor:
    """Return a bool tensor over the region, True inside the listed blocks."""
    size_q, size_kv = block_mask.BLOCK_SIZE
    batch = slice(None) if indices.shape[0] == 1 else slice(region.b0, region.b1)
    heads = slice(None) if indices.shape[1] == 1 else slice(region.h0, region.h1)
    first = region.i0 // size_q
    block_rows = slice(first, -(-region.i1 // size_q))
    blocks = _listed(number[batch, heads, block_rows], indices[batch, heads, block_rows])
    rows = torch.arange(region.i0, region.i1, device=indices.device) // size_q - first
    keys = torch.arange(region.j0, region.j1, device=indices.device) // size_kv
    return blocks[:, :, rows][..., keys]
