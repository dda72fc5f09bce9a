"""Write a lowered mask as an expression over single indices, from which FlexAttention's mask_mod is made.

The expression is Python text over the indices `b`, `h`, `i`, `j` and over names of tensors and functions.
Masks with the same text are compiled once: what differs between them stands in the tensors. Only bands are
numbers in the text, because a kernel with a constant window is 4 % faster where lengths are no multiples of
128 (benchmarks/flex_structure.py); after a few different ones they are tensors too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnroute.masks.lowered.region import block_matrices
from attnroute.masks.tracing import is_tracing
from attnroute.memory import PURE, cached, register

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import LoweredMask

SCALARS_KEPT: Final = 256
"""Numbers kept as tensors on a device: offsets and window sizes."""
_VARIES: Final = 2
"""The least size of a dimension whose index is not taken for the constant 0."""
CONSTANT_BANDS: Final = 8
"""Different limits of bands that are compiled as constants; a model has one or two."""
EVERYBODY: Final = "j >= 0"

_CONSTANTS: set[int] = set()
register(f"{__name__}._CONSTANTS", CONSTANT_BANDS, PURE, lambda: len(_CONSTANTS), _CONSTANTS.clear)


@dataclass(slots=True)
class Names:
    """The tensors and functions that an expression names, named in the order in which they came.

    Attributes:
        prefix: Starts every name.
        constants: Limits of bands may be numbers of the text: not where they follow the lengths.
        cute_heads: Query heads, where the text becomes code of CuTe DSL; 0 elsewhere.
        tensors: The tensors; a tensor that comes twice has one name.
        functions: The functions.
        squeezed: The tensors that stand in `tensors` without some dimensions of size 1, and these, by name.
    """

    prefix: str
    constants: bool = True
    cute_heads: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    functions: list[Callable[..., Any]] = field(default_factory=list)
    squeezed: dict[str, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)

    def tensor(self, tensor: Tensor) -> str:
        """Return the name of a tensor."""
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return f"{self.prefix}{place}"
        self.tensors.append(tensor)
        return f"{self.prefix}{len(self.tensors) - 1}"

    def squeeze(self, tensor: Tensor, dims: tuple[int, ...]) -> str:
        """Return the name of a tensor without some dimensions of size 1.

        An index into them would be a constant, which torch's code for CuTe DSL does not take.
        """
        for name, (known, without) in self.squeezed.items():
            if known is tensor and without == dims:
                return name
        name = self.tensor(tensor.squeeze(dims))
        self.squeezed[name] = tensor, dims
        return name

    def number(self, value: int, device: torch.device) -> str:
        """Return the expression of a number that stands in a tensor, so that it may change."""
        if self.cute_heads:
            return self.same_for_heads(scalar(value, device, (max(self.cute_heads, _VARIES),)))
        return self.tensor(scalar(value, device))

    def same_for_heads(self, tensor: Tensor) -> str:
        """Return the expression of a number that a tensor holds once for each head.

        torch's code for CuTe DSL takes no tensor without a dimension and no constant index, and an index like
        `j * 0` is made one before it gets there.
        """
        return f"{self.tensor(tensor)}[h]"

    def function(self, function: Callable[..., Any]) -> str:
        """Return the name of a function."""
        self.functions.append(function)
        return f"{self.prefix}f{len(self.functions) - 1}"


def expression(lowered: LoweredMask, names: Names, device: torch.device) -> str:
    """Return a lowered mask as an expression that is true where query `i` may attend key `j`.

    Args:
        lowered: The mask.
        names: Takes the tensors and functions of the expression.
        device: Where the tensors must lie.
    """
    parts = [*_band(lowered, names, device), *_tokens(lowered, names)]
    parts += [_any_of(alternatives, names, device) for alternatives in lowered.either]
    parts += [f"~({expression(part, names, device)})" for part in lowered.exclude]
    parts += [f"{names.function(f.mask_mod)}(b, h, i, j)" for f in lowered.functions]
    parts += [_in_blocks(block_mask, names) for block_mask in lowered.sparse]
    if not parts:
        return EVERYBODY
    return parts[0] if len(parts) == 1 else " & ".join(f"({part})" for part in parts)


def scalar(value: int, device: torch.device, shape: tuple[int, ...] = ()) -> Tensor:
    """Return a number as an int64 tensor that lives on, without a dimension unless a shape is given.

    A tracer's number becomes one of its tensors.
    """
    if is_tracing() or not isinstance(value, int):
        return torch.full(shape, value, dtype=torch.int64, device=device)
    return _kept_scalar(value, device, shape)


@cached(SCALARS_KEPT)
def _kept_scalar(value: int, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.full(shape, value, dtype=torch.int64, device=device)


def entry(tensor: Tensor, names: Names) -> str:
    """Return the expression of an entry of a four-dimensional tensor, dimensions of size 1 broadcasting."""
    has = [n > 1 for n in tensor.shape]
    if tensor.device.type == "cpu" and not names.cute_heads:
        return _flat_entry(tensor, has, names)
    if not any(has):
        if names.cute_heads:
            return names.same_for_heads(tensor.reshape(1).repeat(max(names.cute_heads, _VARIES)))
        return f"{names.tensor(tensor.view(-1))}[j * 0]"
    return _indexed(tensor, "bhij", names)


def _indexed(tensor: Tensor, indices: str, names: Names) -> str:
    """Return the expression of an entry of a tensor that broadcasts over its dimensions of size 1."""
    fixed = tuple(place for place, size in enumerate(tensor.shape) if size == 1)
    at = ", ".join(index for index, size in zip(indices, tensor.shape, strict=True) if size > 1)
    return f"{names.squeeze(tensor, fixed) if fixed else names.tensor(tensor)}[{at}]"


def _flat_entry(tensor: Tensor, has: list[bool], names: Names) -> str:
    """Read one flat run: with strides that vary, inductor's C++ template does not compile (torch 2.13)."""
    packed = tensor.contiguous()
    terms = [
        index if index == "j" else f"{index} * {names.tensor(scalar(step, tensor.device))}"
        for index, step, varies in zip("bhij", packed.stride(), has, strict=True)
        if varies
    ]
    return f"{names.tensor(packed.view(-1))}[{' + '.join(terms) or 'j * 0'}]"


def _band(lowered: LoweredMask, names: Names, device: torch.device) -> list[str]:
    diagonal = "i" if lowered.diagonal is None else f"{names.tensor(lowered.diagonal)}[i]"
    found = []
    for limit, sign in ((lowered.band_hi, "<="), (lowered.band_lo, ">=")):
        if limit == 0 and names.constants:
            found.append(f"j {sign} {diagonal}")
        elif limit is not None:
            found.append(f"j - {diagonal} {sign} {_limit(limit, names, device)}")
    return found


def _limit(value: int, names: Names, device: torch.device) -> str:
    if names.constants and (value in _CONSTANTS or len(_CONSTANTS) < CONSTANT_BANDS):
        _CONSTANTS.add(value)
        return str(value)
    return names.number(value, device)


def _tokens(lowered: LoweredMask, names: Names) -> list[str]:
    found = []
    ids_q, ids_kv, keep = lowered.document_ids_q, lowered.document_ids_kv, lowered.key_keep
    if ids_q is not None and ids_kv is not None:
        found.append(f"{_in_row(ids_q, 'i', names)} == {_in_row(ids_kv, 'j', names)}")
    if keep is not None:
        found.append(_in_row(keep, "j", names))
    if lowered.dense is not None:
        found.append(entry(lowered.dense, names))
    return found


def _in_row(tensor: Tensor, index: str, names: Names) -> str:
    """Return the expression of an entry of a (batch or 1, seqlen) tensor, whatever the length is."""
    if tensor.shape[0] > 1:
        return f"{names.tensor(tensor)}[b, {index}]"
    return f"{names.squeeze(tensor, (0,))}[{index}]"


def _any_of(alternatives: tuple[LoweredMask, ...], names: Names, device: torch.device) -> str:
    return " | ".join(f"({expression(part, names, device)})" for part in alternatives)


def _in_blocks(block_mask: Any, names: Names) -> str:
    """Look up each pair in the blocks of a BlockMask that stands among other parts."""
    size_q, size_kv = block_mask.BLOCK_SIZE
    partial, full = block_matrices(block_mask)
    fixed = tuple(place for place in (0, 1) if full.shape[place] == 1)
    indices = [index for place, index in enumerate("bh") if place not in fixed]
    at = f"[{', '.join([*indices, f'i // {size_q}', f'j // {size_kv}'])}]"
    in_full, in_partial = (names.squeeze(t, fixed) if fixed else names.tensor(t) for t in (full, partial))
    inside = f"{names.function(block_mask.mask_mod)}(b, h, i, j)"
    return f"{in_full}{at} | ({in_partial}{at} & {inside})"
