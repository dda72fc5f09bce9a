"""Masks that a graph of torch.compile makes by itself, from what is known about them without a value.

What only values show, such as whether positions go up by one inside of a document, the graph asserts when it
runs. A tensor of queries times keys exists in no graph whose attention alone reads the mask.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from attnroute.integrations.transformers.mask_functions import MaskFunction, Reading, read
from attnroute.masks import All, Causal, Documents, KeyPadding, Mask, Window
from attnroute.masks.flat import as_tensor
from attnroute.masks.objects.ragged import Ragged

_DOCUMENTS: Final = (
    "The mask of packed documents requires position_ids that go up by one in each document; got others; "
    "pass the documents as cu_seq_lens_q and cu_seq_lens_k, or an attention_mask."
)
_CACHED: Final = (
    "The mask of a static cache requires keys of all tokens up to the last query; got fewer; make the cache "
    "longer."
)
Parts = tuple[Mask, ...]


def graph_mask(
    sizes: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    padding: Tensor | None,
    device: torch.device | str,
) -> Tensor | None:
    """Return the tensor of a mask that calls of `attention()` in the same graph get as an object.

    Args:
        sizes: Batch size, queries and keys.
        q_offset: Position of the first query; of a static cache a tensor, whose value no graph reads.
        kv_offset: Position of the first key.
        mask_function: As `make_mask` gets it.
        padding: Bool tensor (batch, positions), False for padding.
        device: Where the mask lies.

    Returns:
        None where nothing is masked, or where it is not known for certain what is.
    """
    reading = read(mask_function)
    if reading is None:
        return None
    if reading.ids is not None or reading.positions is not None:
        parts = None if padding is not None else _documents(sizes, reading, q_offset, kv_offset)
    elif isinstance(q_offset, Tensor):
        parts = _cached(sizes, reading, q_offset - kv_offset)
    else:
        parts = _band(sizes, reading, q_offset - kv_offset)
    if parts is None:
        return None
    if padding is not None:
        keep = existing(padding, kv_offset, sizes[2])
        parts = (*parts, KeyPadding(keep=keep, finite=True))
    if not parts:
        return None
    return as_tensor(parts[0] if len(parts) == 1 else All(parts), sizes, device)


def existing(padding: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """Return which keys exist, a bool tensor (batch, kv_length).

    Keys beyond the padding mask do not exist yet, as in transformers.
    """
    keep = padding[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - keep.shape[1]
    return torch.nn.functional.pad(keep, (0, missing)) if missing else keep


def _band(sizes: tuple[int, int, int], reading: Reading, offset: int) -> Parts | None:
    _, queries, keys = sizes
    if _is_open(reading):
        return ()
    if queries == 1:
        # A window in one row stays dense, which costs next to nothing; without one the row may be full.
        return () if reading.left is None and offset == keys - 1 else None
    if offset == 0:
        return (_aligned(reading, "top_left"),)
    return (_aligned(reading, "bottom_right"),) if offset == keys - queries else None


def _documents(
    sizes: tuple[int, int, int], reading: Reading, q_offset: int | Tensor, kv_offset: int
) -> Parts | None:
    """Add packed documents. Where the band counts in positions, it is the one in places of each document."""
    batch, queries, keys = sizes
    ids, positions = reading.ids, reading.positions
    if isinstance(q_offset, Tensor) or q_offset or kv_offset or queries != keys:
        return None
    if ids is None or ids.shape != (batch, queries):
        return None
    if positions is not None:
        if positions.shape != ids.shape:
            return None
        before, after = ids[:, :-1], ids[:, 1:]
        steps = positions[:, 1:] - positions[:, :-1] == 1
        torch._assert_async(((after > before) | ((after == before) & steps)).all(), _DOCUMENTS)  # noqa: SLF001 - torch has no public name for it
    documents = Documents(ids=ids)
    return (documents,) if _is_open(reading) else (_aligned(reading, "top_left"), documents)


def _cached(sizes: tuple[int, int, int], reading: Reading, offset: Tensor) -> Parts | None:
    """Return a band whose diagonal ends with the last key that a static cache holds.

    Each row is two sequences: the queries with the keys that there are, and the other keys without a query.
    """
    _, queries, keys = sizes
    if queries == 1:
        # A compiled step of decoding takes a row of one form, which costs next to nothing.
        return None
    if _is_open(reading):
        return ()
    used = offset.reshape(1) + queries
    torch._assert_async((used <= keys).all(), _CACHED)  # noqa: SLF001 - as above
    zero = torch.zeros_like(used)
    sums_q = torch.cat([zero, zero + queries, zero + queries])
    sums_kv = torch.cat([zero, used, zero + keys])
    return (Ragged(sums_q, sums_kv, None, None, reading.left, reading.right, "bottom_right"),)


def _is_open(reading: Reading) -> bool:
    return reading.left is None and reading.right is None


def _aligned(reading: Reading, alignment: Any) -> Mask:
    if reading.left is None and reading.right == 0:
        return Causal(alignment)
    return Window(reading.left, reading.right, alignment)
