"""Read a mask function of transformers: a band, packed documents, or nothing that is known for certain.

transformers passes its mask builders' results on as plain Python functions. The functions of known builders
are recognised by their code object, and their parameters are in their closures. Everything else is not read,
and the caller makes a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from attnroute.memory import INSTALLED, cached

MaskFunction = Callable[..., Any]
Reader = Callable[[dict[str, Any]], "Reading | None"]
_SAMPLE = 8
_SAMPLE_WINDOW = 3


@dataclass(frozen=True, eq=False)
class Reading:
    """A band around the diagonal, in absolute positions, and packed documents.

    Attributes:
        left: Keys before the query's own position; None = all.
        right: Keys after it; None = all.
        ids: Integer tensor (batch, length) of documents.
        positions: Integer tensor (batch, length): the band is meant in these positions instead of in places.
    """

    left: int | None = None
    right: int | None = None
    ids: Tensor | None = None
    positions: Tensor | None = None


def read(function: object) -> Reading | None:
    """Return the band and documents of a mask function, or None where they are not known for certain."""
    if not isinstance(function, FunctionType):
        return None
    reader = _known().get(function.__code__)
    return None if reader is None else reader(_closure(function))


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


@cached(1, INSTALLED)
def _known() -> dict[CodeType, Reader]:
    """The builders of the installed transformers whose functions still mean what they are known to mean."""
    # A mode around the first call, a tracer's for one, would answer with tensors of its own.
    with _disable_current_modes(), torch.device("cpu"):
        return _verified()


def _verified() -> dict[CodeType, Reader]:
    known: dict[CodeType, Reader] = {}
    bands: tuple[tuple[str, tuple[int, ...], Reader, Reading], ...] = (
        ("causal_mask_function", (), lambda _: _CAUSAL, _CAUSAL),
        ("bidirectional_mask_function", (), lambda _: Reading(), Reading()),
        ("sliding_window_overlay", (_SAMPLE_WINDOW,), _read_window, Reading(left=_SAMPLE_WINDOW - 1)),
        (
            "sliding_window_bidirectional_overlay",
            (_SAMPLE_WINDOW,),
            _read_two_sided,
            Reading(left=_SAMPLE_WINDOW, right=_SAMPLE_WINDOW),
        ),
    )
    for name, parameters, reader, expected in bands:
        builder = getattr(masking_utils, name, None)
        function = builder(*parameters) if builder is not None and parameters else builder
        if function is not None and _means(function, expected):
            known[function.__code__] = reader
    for name, arguments, reader in _combinators():
        builder = getattr(masking_utils, name, None)
        if builder is not None:
            known[builder(*arguments).__code__] = reader
    return known


def _combinators() -> tuple[tuple[str, tuple[Any, ...], Reader], ...]:
    row = torch.zeros(1, 1, dtype=torch.int64)
    causal = masking_utils.causal_mask_function
    return (
        ("and_masks", (causal,), _read_and),
        ("packed_sequence_mask_function", (row,), lambda cells: _read_ids(cells.get("packed_sequence_mask"))),
        ("remap_positions_for_packed_sequence", (causal, row), _read_remapped),
    )


def _means(function: MaskFunction, expected: Reading) -> bool:
    """Whether a function still means what it did: a window counted otherwise shows on a small square."""
    index = torch.arange(_SAMPLE)
    zero = torch.zeros((), dtype=torch.int64)
    found = function(zero, zero, index[:, None], index[None, :])
    distance = index[None, :] - index[:, None]
    expected_pairs = torch.ones(_SAMPLE, _SAMPLE, dtype=torch.bool)
    if expected.left is not None:
        expected_pairs &= distance >= -expected.left
    if expected.right is not None:
        expected_pairs &= distance <= expected.right
    return torch.equal(found.expand_as(expected_pairs), expected_pairs)


_CAUSAL = Reading(right=0)


def _window(cells: dict[str, Any]) -> int | None:
    window = cells.get("sliding_window")
    return window if type(window) is int and window > 0 else None


def _read_window(cells: dict[str, Any]) -> Reading | None:
    window = _window(cells)
    return None if window is None else Reading(left=window - 1)


def _read_two_sided(cells: dict[str, Any]) -> Reading | None:
    window = _window(cells)
    return None if window is None else Reading(left=window, right=window)


def _read_ids(ids: object) -> Reading | None:
    return Reading(ids=ids) if isinstance(ids, Tensor) else None


def _read_remapped(cells: dict[str, Any]) -> Reading | None:
    inner, positions = read(cells.get("mask_function")), cells.get("position_ids")
    if inner is None or inner.ids is not None or inner.positions is not None:
        return None
    return Reading(inner.left, inner.right, positions=positions) if isinstance(positions, Tensor) else None


def _read_and(cells: dict[str, Any]) -> Reading | None:
    functions = cells.get("mask_functions")
    if not isinstance(functions, tuple):
        return None
    total = Reading()
    for function in functions:
        part = read(function)
        if part is None or (part.ids is not None and total.ids is not None):
            return None
        if part.positions is not None and total.positions is not None:
            return None
        total = Reading(
            _least(total.left, part.left),
            _least(total.right, part.right),
            part.ids if total.ids is None else total.ids,
            part.positions if total.positions is None else total.positions,
        )
    return total


def _least(first: int | None, second: int | None) -> int | None:
    stated = [n for n in (first, second) if n is not None]
    return min(stated, default=None)


WINDOWS_MEAN_THE_SAME: Final = all(
    read(builder(_SAMPLE_WINDOW)) is not None
    for name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
    if (builder := getattr(masking_utils, name, None)) is not None
)
"""Whether the installed transformers counts windows as it did: a graph reads no function, and has to know."""
