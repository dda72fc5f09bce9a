"""Masks that a graph of torch.compile makes by itself, from what is known about them without a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attnroute.integrations.transformers.mask_functions import WINDOWS_MEAN_THE_SAME, MaskFunction
from attnroute.masks import All, Causal, KeyPadding, Mask, Window
from attnroute.masks.flat import as_tensor


def graph_mask(
    sizes: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    padding: Tensor | None,
    device: torch.device | str,
    stated: dict[str, Any],
) -> Tensor | None:
    """Return the tensor of a mask that calls of `attention()` in the same graph get as an object.

    Args:
        sizes: Batch size, queries and keys.
        q_offset: Position of the first query; of a static cache a tensor, whose value no graph reads.
        kv_offset: Position of the first key.
        mask_function: As `make_mask` gets it.
        padding: Bool tensor (batch, positions), False for padding.
        device: Where the mask lies.
        stated: What `make_mask` gets besides: allow_is_causal_skip, allow_is_bidirectional_skip, local_size,
            config.

    Returns:
        None where nothing is masked, or where it is not known for certain what is.
    """
    if isinstance(q_offset, Tensor):
        return None
    band = _band(mask_function, stated)
    if band is None:
        return None
    _, queries, keys = sizes
    offset = q_offset - kv_offset
    banded = band != (None, None)
    if banded and queries == 1:
        # A window in one row stays dense, which costs next to nothing; without one the row may be full.
        if band[0] is not None or offset != keys - 1:
            return None
        banded = False
    parts: tuple[Mask, ...] = ()
    if banded:
        if queries == keys and offset == 0:
            parts = (_aligned(*band, "top_left"),)
        elif offset == keys - queries:
            parts = (_aligned(*band, "bottom_right"),)
        else:
            return None
    if padding is not None:
        keep = existing(padding, kv_offset, keys)
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


def _band(function: MaskFunction, stated: dict[str, Any]) -> tuple[int | None, int | None] | None:
    """Return how many keys before and after its own a query may attend; None where that is not known.

    A tracer does not show what is in the closure of a function. But where transformers allows its
    `sdpa_mask` to return no mask, the `local_size` of a config with that window alone says how the function
    differs from having none. Somebody else may call with a function of his own, or that of chunks.
    """
    if function is causal_mask_function:
        return None, 0
    if function is bidirectional_mask_function:
        return None, None
    size: int | None = stated.get("local_size")
    config = stated.get("config")
    if size is None or size != getattr(config, "sliding_window", None) or not WINDOWS_MEAN_THE_SAME:
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None
    if stated["allow_is_causal_skip"]:
        return size - 1, 0
    return (size, size) if stated["allow_is_bidirectional_skip"] else None


def _aligned(left: int | None, right: int | None, alignment: Any) -> Mask:
    return Causal(alignment) if left is None else Window(left, right, alignment)
