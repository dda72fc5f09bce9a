"""Facts about windows, diagonals and packed documents in the lower operators, which torch exposes in part."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from facts_common import (
    DEVICE,
    Fact,
    band,
    compare,
    flash,
    inputs,
    largest_in_empty_rows,
    lower_efficient,
    lower_flash,
    packed_flash,
)


class Diagonal(NamedTuple):
    """A call of the flash kernel: its lengths, and the band that it is asked for (-1 or None is open)."""

    seqlen_q: int
    seqlen_kv: int
    head_dim: int = 64
    is_causal: bool = False
    left: int | None = None
    right: int | None = None

    def low(self) -> int | None:
        """Return the least key minus query if the kernel aligns at the bottom right."""
        return None if self.left in (None, -1) else self.seqlen_kv - self.seqlen_q - self.left

    def high(self) -> int | None:
        """Return the largest key minus query if the kernel aligns at the bottom right."""
        offset = self.seqlen_kv - self.seqlen_q
        if self.is_causal:
            return offset
        return None if self.right in (None, -1) else offset + self.right


FLASH_DIAGONALS = {
    "sq_win32": Diagonal(256, 256, left=31, right=0),
    "sq_win_sym": Diagonal(256, 256, left=20, right=20),
    "sq_win_odd": Diagonal(197, 197, 128, left=50, right=0),
    "br_win": Diagonal(100, 300, left=63, right=0),
    "br_win_gt": Diagonal(300, 100, left=63, right=0),
    "br_causal": Diagonal(100, 300, is_causal=True),
    "br_causal_gt": Diagonal(300, 100, is_causal=True),
    "win_right_open": Diagonal(128, 128, left=10, right=-1),
    "win_left_open": Diagonal(128, 128, left=-1, right=10),
    "causal+wl": Diagonal(256, 256, is_causal=True, left=31),
    "d256_win": Diagonal(256, 256, 256, left=63, right=0),
}

EFFICIENT_DIAGONALS = {
    "br": (100, 300, 2, None),
    "br_gt": (300, 100, 2, None),
    "tl": (100, 300, 1, None),
    "win": (256, 256, 2, 32),
    "win_ns": (100, 300, 2, 32),
}
"""seqlen_q, seqlen_kv, the mask type (1 top left, 2 bottom right) and the window."""


def flash_diagonal(call: Diagonal) -> dict[str, Any]:
    """Hold a causal mask or a window of the flash kernel against one aligned at the bottom right."""
    tensors = inputs(heads_kv=2, seqlen_q=call.seqlen_q, seqlen_kv=call.seqlen_kv, head_dim=call.head_dim)
    window = {"window_size_left": call.left, "window_size_right": call.right}
    out, lse = lower_flash(*tensors, is_causal=call.is_causal, **window)
    allowed = band(call.seqlen_q, call.seqlen_kv, call.low(), call.high())
    found = compare(out, tensors, lse=lse, allowed=allowed)
    found["empty_rows"] = int((~allowed.any(-1)).sum())
    found["empty_out_max"] = largest_in_empty_rows(out, allowed)
    return found


def flash_operator_bottom_right() -> dict[str, Any]:
    """Hold `is_causal` of the upper flash operator, with fewer queries than keys, against bottom right."""
    tensors = inputs(heads_kv=2, seqlen_q=100, seqlen_kv=300)
    out, lse = flash(*tensors, is_causal=True)
    return compare(out, tensors, lse=lse, allowed=band(100, 300, None, 200))


def flash_documents(lengths: list[int], left: int | None) -> dict[str, Any]:
    """Hold packed documents, each causal or with a window of `left` keys, against the mask."""
    total = sum(lengths)
    tensors = inputs(batch=1, heads_kv=2, seqlen_q=total, seqlen_kv=total)
    sizes = torch.tensor(lengths, device=DEVICE)
    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    window = {} if left is None else {"window_size_left": left, "window_size_right": 0}
    out, lse = packed_flash(tensors, bounds, max(lengths), is_causal=left is None, **window)
    document = torch.arange(len(lengths), device=DEVICE).repeat_interleave(sizes)
    same = document[:, None] == document[None]
    allowed = same & band(total, total, None if left is None else -left, 0)
    return compare(out, tensors, lse=lse, allowed=allowed)


def flash_alibi() -> dict[str, Any]:
    """Hold ALiBi slopes against the bias that they mean."""
    tensors = inputs()
    slopes = torch.rand(4, device=DEVICE)
    out, lse = lower_flash(*tensors, is_causal=True, alibi_slopes=slopes)
    places = torch.arange(128, device=DEVICE)
    bias = -(places[:, None] - places[None]).abs() * slopes[:, None, None]
    return compare(out, tensors, lse=lse, allowed=band(128, 128, None, 0), bias=bias)


def efficient_diagonal(seqlen_q: int, seqlen_kv: int, diagonal: int, window: int | None) -> dict[str, Any]:
    """Hold a causal mask or a window of the memory-efficient kernel against the mask that it should be."""
    tensors = inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    out, lse = lower_efficient(tensors, diagonal=diagonal, window=window)
    offset = seqlen_kv - seqlen_q
    low = None if window is None else offset - window + 1
    allowed = band(seqlen_q, seqlen_kv, low, offset if diagonal == 2 else 0)
    found = compare(out, tensors, lse=lse[..., :seqlen_q], allowed=allowed)
    found["empty_out_max"] = largest_in_empty_rows(out, allowed)
    return found


FACTS: dict[str, Fact] = {
    **{f"flash {name}": partial(flash_diagonal, call) for name, call in FLASH_DIAGONALS.items()},
    "flash sdpa-op br causal": flash_operator_bottom_right,
    "flash varlen docs": partial(flash_documents, [100, 0, 33, 123], None),
    "flash varlen window": partial(flash_documents, [100, 33, 123], 15),
    "flash alibi": flash_alibi,
    **{f"efficient {name}": partial(efficient_diagonal, *call) for name, call in EFFICIENT_DIAGONALS.items()},
}
