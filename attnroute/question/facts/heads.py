"""Head dims as kernels round them: what a row cannot compute itself."""

from __future__ import annotations

from math import gcd
from typing import Final

TILE: Final = 16
"""Elements: tensor cores take head dims in pieces of this size."""
COLUMNS: Final = 32
"""The most columns that FlashAttention-4's backward on Blackwell stores at a time."""
WIDE: Final = 128
"""Above it flash-attn has no kernels for single steps of 32 from 2.8 on."""
HOPPER: Final = (64, 96, 128, 192, 256)
"""The head dims for which FlashAttention-3 has kernels."""
QUERIES: Final = 128
KEYS: Final = 64
"""The tile of FlashAttention-4's kernels for cards of sm_8x, and for wide heads on sm_12x."""


def tile_mod_32(head_dim: int) -> int:
    """Return a head dim, rounded up to whole tiles, modulo 32: 16 where half a step of 32 is left."""
    return up(head_dim, TILE) % 32


def up_wide(head_dim: int) -> int:
    """Return a head dim as flash-attn rounds it for the accumulator of dQ from 2.8 on."""
    return up(head_dim, 64 if head_dim > WIDE else 32)


def up_to_hopper(head_dim: int) -> int:
    """Return the head dim of the kernel that FlashAttention-3 takes; what is wider has none."""
    return next((width for width in HOPPER if head_dim <= width), up(head_dim, 64))


def ratio(head_dim_qk: int, head_dim_v: int) -> float:
    """Return how many times wider values are than keys, in whole tiles; 0 where keys have no width."""
    return up(head_dim_v, TILE) / up(head_dim_qk, TILE) if head_dim_qk else 0.0


def tile_bytes(head_dim_qk: int, head_dim_v: int) -> int:
    """Return what a tile of query, key and value takes of shared memory, in bytes, for 16-bit elements."""
    return 2 * ((QUERIES + KEYS) * up(head_dim_qk, TILE) + KEYS * up(head_dim_v, TILE))


def accumulator_width(head_dim: int) -> int:
    """Return a head dim as FlashAttention-2 rounds it for the accumulator of dQ."""
    return up(head_dim, 32) if head_dim <= 192 else max(256, up(head_dim, 32))


def store_fits(head_dim_qk: int, head_dim_v: int, multiple: int) -> bool:
    """Return whether dV is stored in whole pieces when the pieces are chosen for dK.

    FlashAttention-4's backward on Blackwell stores half of a row at a time, in pieces of as many columns as
    divide both 32 and half a row of dK. Rows are padded to a multiple that differs by release.

    Args:
        head_dim_qk: Elements of a row of dK.
        head_dim_v: Elements of a row of dV.
        multiple: What both are rounded up to.
    """
    columns = gcd(COLUMNS, up(head_dim_qk, multiple) // 2)
    return up(head_dim_v, multiple) // 2 % columns == 0


def up(value: int, multiple: int) -> int:
    """Round a number up to a multiple of another."""
    return -(-value // multiple) * multiple
