"""Masks around the diagonal: `Causal`, `Window` (sliding window), `PrefixLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attnroute.errors import argument_error
from attnroute.masks import checks, picture
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, intersect
from attnroute.masks.objects.base import Lengths, Mask, prepared
from attnroute.question.nodes import CausalNode, MaskNode, PrefixNode, WindowNode
from attnroute.question.normalize import prefix_as

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.vocabulary import Alignment


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Query i may attend key j only if j <= i + offset.

    Args:
        alignment: "top_left" (offset 0, as scaled_dot_product_attention) or "bottom_right" (offset seqlen_kv
            - seqlen_q, as flash-attn; what cached decoding means).

    Raises:
        ArgumentError: The alignment is another word.
    """

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check the alignment."""
        checks.alignment(self.alignment)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the causal node."""
        return (CausalNode.unchecked(alignment=self.alignment),)

    def key(self) -> object:
        """Return what the description depends on."""
        return ("causal", self.alignment)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Close the band above the diagonal."""
        return _within_band("Causal", into, None, _offset(self.alignment, extent))


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A sliding window: query i may attend key j only if i + offset - left <= j <= i + offset + right.

    Both counts leave out the key on the diagonal. A configuration with ``sliding_window = W`` counts it,
    so it means ``left = W - 1``: `Window(4095)` for ``sliding_window = 4096``.

    Args:
        left: How many keys before the diagonal may be attended; None = all.
        right: How many keys after the diagonal; None = all. 0 makes the window causal.
        alignment: Where the diagonal starts, as in `Causal`, which also defines offset.

    Raises:
        ArgumentError: A count is no integer of at least 0, or the alignment is another word.
    """

    _shown: ClassVar[tuple[str, ...]] = ("left", "right")

    left: int | None
    right: int | None = 0
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check the counts and the alignment."""
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and not checks.is_count(value):
                required, to_do = (
                    "a count of at least 0, or None for no limit",
                    "pass None to leave that side open",
                )
                raise argument_error(f"Window {name}", required, repr(value), to_do)
        checks.alignment(self.alignment)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the window node."""
        return (WindowNode.unchecked(left=self.left, right=self.right, alignment=self.alignment),)

    def _wish(self) -> picture.Wish:
        return picture.square(3 * ((self.left or 0) + (self.right or 0) + 1))

    def key(self) -> object:
        """Return what the description depends on."""
        return ("window", self.left, self.right, self.alignment)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Narrow the band from both sides."""
        offset = _offset(self.alignment, extent)
        low = None if self.left is None else offset - self.left
        high = None if self.right is None else offset + self.right
        return _within_band("Window", into, low, high)


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Mask):
    """Causal, except that every query may attend the first keys of its batch row.

    Args:
        lengths: Keys of the prefix per batch row: ints or an integer tensor (batch,).
        alignment: Where the diagonal of the causal rest starts, as in `Causal`.

    Raises:
        ArgumentError: The lengths are no counts, or the alignment is another word.
    """

    _shown: ClassVar[tuple[str, ...]] = ("lengths",)

    lengths: Lengths
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check the counts and the alignment, and freeze a Python sequence."""
        checks.alignment(self.alignment)
        if checks.is_tensor(self.lengths):
            checks.integers("PrefixLM lengths", self.lengths, (1,))
        else:
            object.__setattr__(self, "lengths", checks.counts("PrefixLM lengths", self.lengths))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The counts, where they are a tensor."""
        return (self.lengths,) if checks.is_tensor(self.lengths) else ()

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the prefix node; counts only where that needs no wait for a device."""
        return (self._node(),)

    def _node(self) -> PrefixNode:
        known = self.lengths if isinstance(self.lengths, tuple) else None
        return PrefixNode(lengths=known, alignment=self.alignment)

    def _wish(self) -> picture.Wish:
        lengths = picture.numbers(self.lengths)
        return picture.square(2 * max(lengths), batch=len(lengths))

    def key(self) -> object:
        """Return what the description depends on."""
        known = ("shape", *self.lengths.shape) if checks.is_tensor(self.lengths) else self.lengths
        return ("prefix", known, self.alignment)

    def check(self, extent: Extent) -> None:
        """There must be one entry per batch row."""
        checks.key_padding({"lengths": self.lengths}, None, extent, node="PrefixLM")

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add a disjunction of causal and the prefix keys; causal alone where the prefix adds nothing."""
        _check_one_diagonal("PrefixLM", into)
        return intersect(into, prepared(self, extent, lambda: self._lowered(extent)))

    def _lowered(self, extent: Extent) -> LoweredMask:
        from attnroute.masks.lowered.padding import first_keys

        simple = prefix_as(self._node(), extent.sizes)
        causal = LoweredMask(band_hi=_offset(self.alignment, extent))
        if not simple or isinstance(simple[0], CausalNode):
            return causal if simple else FULL
        return LoweredMask(either=((causal, LoweredMask(key_keep=first_keys(self.lengths, extent))),))


def _offset(alignment: str, extent: Extent) -> int:
    return extent.seqlen_kv - extent.seqlen_q if alignment == "bottom_right" else 0


def _within_band(name: str, into: LoweredMask, low: int | None, high: int | None) -> LoweredMask:
    """Return a lowered mask whose band is also limited by ``low <= j - i <= high``; None limits nothing."""
    _check_one_diagonal(name, into)
    return intersect(into, LoweredMask(band_lo=low, band_hi=high))


def _check_one_diagonal(name: str, into: LoweredMask) -> None:
    """A band has one diagonal: it cannot stand beside documents that have one each."""
    if into.diagonal is not None or into.cu_seqlens_kv is not None:
        required = "documents whose queries and keys have the same lengths beside it"
        to_do = "pass is_causal or window, which mean the diagonal of each document"
        raise argument_error(f"mask {name}", required, "a ragged batch of other lengths", to_do)
