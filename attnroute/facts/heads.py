"""Head dims as kernels round them: what a row cannot compute itself."""

from __future__ import annotations

from math import gcd
from typing import Final

TILE: Final = 16
"""Elements: tensor cores take head dims in pieces of this size."""
COLUMNS: Final = 32
"""The most columns that FlashAttention-4's backward on Blackwell stores at a time."""


def tile_mod_32(head_dim: int) -> int:
    """Return a head dim, rounded up to whole tiles, modulo 32: 16 where half a step of 32 is left."""
    return _up(head_dim, TILE) % 32


def accumulator_width(head_dim: int) -> int:
    """Return a head dim as FlashAttention-2 rounds it for the accumulator of dQ."""
    return _up(head_dim, 32) if head_dim <= 192 else max(256, _up(head_dim, 32))


def store_fits(head_dim_qk: int, head_dim_v: int, multiple: int) -> bool:
    """Return whether dV is stored in whole pieces when the pieces are chosen for dK.

    FlashAttention-4's backward on Blackwell stores half of a row at a time, in pieces of as many columns as
    divide both 32 and half a row of dK. Rows are padded to a multiple that differs by release.

    Args:
        head_dim_qk: Elements of a row of dK.
        head_dim_v: Elements of a row of dV.
        multiple: What both are rounded up to.
    """
    columns = gcd(COLUMNS, _up(head_dim_qk, multiple) // 2)
    return _up(head_dim_v, multiple) // 2 % columns == 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
