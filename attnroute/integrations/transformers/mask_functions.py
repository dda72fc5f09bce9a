"""Read a mask function of transformers: a band, packed documents, or nothing that is known for certain.

transformers passes its mask builders' results on as plain Python functions. The functions of known builders
are recognised by their code object, and their parameters are in their closures. A tracer shows no closure;
for graphs, builders that `mark_builders` replaced note in an attribute what they were called with. Everything
else is not read, and the caller makes a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from attnroute.memory import INSTALLED, cached

MaskFunction = Callable[..., Any]
Parts = tuple[str, tuple[Any, ...]]
"""The name of a builder, and what it was called with."""
_MARK: Final = "attnroute_parts"
_KEEPS_MARKS: Final = torch.__version__ >= "2.8"
"""Whether dynamo can set an attribute of a function that is made in a graph, and read it."""
_SAMPLE: Final = 8
_SAMPLE_WINDOW: Final = 3
_CELLS: Final = {
    "causal_mask_function": (),
    "bidirectional_mask_function": (),
    "sliding_window_overlay": ("sliding_window",),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "and_masks": ("mask_functions",),
    "packed_sequence_mask_function": ("packed_sequence_mask",),
    "remap_positions_for_packed_sequence": ("mask_function", "position_ids"),
}
"""The builders, and where the closures of their functions hold the arguments. The first two build nothing:
they are mask functions themselves."""


class Reading(NamedTuple):
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


def read(function: MaskFunction) -> Reading | None:
    """Return the band and documents of a mask function, or None where they are not known for certain.

    A tracer follows this.
    """
    parts = _from_mark(function) if is_compiling() else _from_closure(function)
    if parts is None:
        return None
    builder, given = parts
    if builder in ("causal_mask_function", "bidirectional_mask_function"):
        return Reading(right=0 if builder == "causal_mask_function" else None)
    if builder == "and_masks":
        return _read_and(given[0])
    if builder == "packed_sequence_mask_function":
        return Reading(ids=given[0]) if isinstance(given[0], Tensor) else None
    if builder == "remap_positions_for_packed_sequence":
        return _read_remapped(*given)
    window = given[0]
    if type(window) is not int or window < 1:
        return None
    # transformers counts the token itself in a window to one side, and not in one to both sides.
    one_sided = builder == "sliding_window_overlay"
    return Reading(left=window - 1) if one_sided else Reading(left=window, right=window)


def mark_builders() -> None:
    """Replace transformers' builders by ones whose functions say in an attribute what they are made of.

    Nothing else about the functions changes.
    """
    if not _KEEPS_MARKS:
        return
    for name in set(_known().values()):
        builder = getattr(masking_utils, name)
        if not _CELLS[name]:
            setattr(builder, _MARK, (name, ()))
        elif not hasattr(builder, "__wrapped__"):
            setattr(masking_utils, name, _marking(name, builder))


def _marking(name: str, builder: Callable[..., MaskFunction]) -> Callable[..., MaskFunction]:
    @wraps(builder)
    def marking(*args: Any, **kwargs: Any) -> MaskFunction:
        function = builder(*args, **kwargs)
        if not kwargs:
            setattr(function, _MARK, (name, (args,) if name == "and_masks" else args))
        return function

    return marking


def _from_mark(function: MaskFunction) -> Parts | None:
    if _KEEPS_MARKS:
        return getattr(function, _MARK, None)
    return ("causal_mask_function", ()) if function is masking_utils.causal_mask_function else None


def _from_closure(function: MaskFunction) -> Parts | None:
    if not isinstance(function, FunctionType):
        return None
    builder = _known().get(function.__code__)
    if builder is None:
        return None
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    return builder, tuple(held.get(name) for name in _CELLS[builder])


@cached(1, INSTALLED)
def _known() -> dict[CodeType, str]:
    """The builders of the installed transformers whose functions still mean what they are known to mean."""
    # A mode around the first call, a tracer's for one, would answer with tensors of its own.
    with _disable_current_modes(), torch.device("cpu"):
        return _verified()


def _verified() -> dict[CodeType, str]:
    row = torch.zeros(1, 1, dtype=torch.int64)
    causal, window = masking_utils.causal_mask_function, (_SAMPLE_WINDOW,)
    samples: tuple[tuple[str, tuple[Any, ...], Reading | None], ...] = (
        ("causal_mask_function", (), Reading(right=0)),
        ("bidirectional_mask_function", (), Reading()),
        ("sliding_window_overlay", window, Reading(left=_SAMPLE_WINDOW - 1)),
        (
            "sliding_window_bidirectional_overlay",
            window,
            Reading(left=_SAMPLE_WINDOW, right=_SAMPLE_WINDOW),
        ),
        ("and_masks", (causal,), None),
        ("packed_sequence_mask_function", (row,), None),
        ("remap_positions_for_packed_sequence", (causal, row), None),
    )
    known: dict[CodeType, str] = {}
    for name, arguments, expected in samples:
        builder = getattr(masking_utils, name, None)
        if builder is not None:
            function = builder(*arguments) if arguments else builder
            if expected is None or _means(function, expected):
                known[function.__code__] = name
    return known


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


def _read_remapped(function: MaskFunction, positions: object) -> Reading | None:
    inner = read(function)
    if inner is None or inner.ids is not None or inner.positions is not None:
        return None
    return Reading(inner.left, inner.right, None, positions) if isinstance(positions, Tensor) else None


def _read_and(functions: object) -> Reading | None:
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
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
