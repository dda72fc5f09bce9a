"""Byte counts as people read them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ONE_DECIMAL_BELOW: Final = 10


def size(count: int) -> str:
    """Say a number of bytes in the largest binary unit that it fills: "45 GiB", "1.5 MiB", "512 bytes"."""
    for unit, factor in _UNITS:
        # A count just below a unit must not be said as 1024 of the smaller one.
        if round(count / factor, 1) >= 1:
            value = count / factor
            digits = f"{value:.1f}".removesuffix(".0") if value < _ONE_DECIMAL_BELOW else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{count} bytes"
