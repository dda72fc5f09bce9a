"""Mask objects: who may attend whom, as things that can be read and combined instead of as tensors.

A mask is a node or a conjunction of nodes made with `&`. Importing this module loads no torch. Each node can
say itself as plain data for a decision (`describe`), add itself to the form executors read (`lower`), and
become a bool tensor (`materialize`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnroute.call import CausalNode, DocumentsNode, KeyPaddingNode, MaskNode, WindowNode
from attnroute.errors import argument_error
from attnroute.masks import checks
from attnroute.masks.lowered import FULL, LoweredMask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnroute.vocabulary import Alignment

    Lengths = Sequence[int] | Tensor


class Extent(NamedTuple):
    """The sizes a mask is read at: batch size, query heads, lengths; and the device of its tensors."""

    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_kv: int
    device: Any = None


class Mask(ABC):
    """Base of every mask object."""

    @property
    def nodes(self) -> tuple[Mask, ...]:
        """The parts of the conjunction; a single node is its own only part."""
        return (self,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were given; what is prepared from the mask is stale once one of them changes."""
        return ()

    def __and__(self, other: Mask) -> Mask:
        """Both must allow."""
        if not isinstance(other, Mask):
            return NotImplemented
        return All((*self.nodes, *other.nodes))

    @abstractmethod
    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return this mask as plain data, reading no device memory."""

    @abstractmethod
    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Return `into` with this mask added to it."""

    def key(self) -> object:
        """Return a hashable value that is equal only for masks with equal descriptions at equal extents."""
        return self

    def check(self, extent: Extent) -> None:  # noqa: B027 - most nodes fit every extent
        """Raise an ArgumentError when the mask cannot be read at this extent."""

    def materialize(
        self, seqlen_q: int, seqlen_kv: int, *, batch: int = 1, num_heads_q: int = 1, device: object = None
    ) -> Tensor:
        """Return the mask as a bool tensor, True = attend.

        Args:
            seqlen_q: Query length.
            seqlen_kv: Key length.
            batch: Batch size.
            num_heads_q: Query heads.
            device: Where the tensor lies; the CPU by default.

        Returns:
            Shape (batch or 1, num_heads_q or 1, seqlen_q, seqlen_kv).
        """
        # Importing torch here keeps mask objects usable where torch is not installed.
        from attnroute.masks.tensors import materialize

        extent = Extent(batch, num_heads_q, seqlen_q, seqlen_kv, device)
        self.check(extent)
        return materialize(self.lower(FULL, extent), extent)


@dataclass(frozen=True)
class All(Mask):
    """A conjunction."""

    parts: tuple[Mask, ...]

    @property
    def nodes(self) -> tuple[Mask, ...]:
        """The parts, those of conjunctions among them laid open."""
        return tuple(node for part in self.parts for node in part.nodes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every part's tensors."""
        return tuple(t for part in self.parts for t in part.tensors)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return every part's data in order."""
        return tuple(n for part in self.parts for n in part.describe(extent))

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add every part."""
        for part in self.parts:
            into = part.lower(into, extent)
        return into

    def key(self) -> object:
        """Return the parts' keys."""
        return tuple(part.key() for part in self.parts)

    def check(self, extent: Extent) -> None:
        """Check every part."""
        for part in self.parts:
            part.check(extent)
        documents = sum(isinstance(part, Documents) for part in self.nodes)
        if documents > 1:
            to_do = "combine the ids into one node"
            raise argument_error("mask", "at most one Documents node", documents, to_do)

    def __repr__(self) -> str:
        """Say it as it is written."""
        return " & ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Causal(Mask):
    """Query i may attend key j only if j <= i + offset.

    Args:
        alignment: "top_left" (offset 0, as scaled_dot_product_attention) or "bottom_right" (offset seqlen_kv
            - seqlen_q, as flash-attn; what cached decoding means).
    """

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check the alignment."""
        checks.alignment(self.alignment)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the causal node."""
        return (CausalNode(alignment=self.alignment),)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Close the band above the diagonal."""
        return _narrow(into, None, _offset(self.alignment, extent))


@dataclass(frozen=True)
class Window(Mask):
    """A sliding window around the diagonal.

    Args:
        left: How many keys before the diagonal may be attended, the diagonal not counted; None = all. A
            configuration that says ``sliding_window = W`` means ``left = W - 1``.
        right: How many keys after the diagonal; None = all. 0 makes the window causal.
        alignment: Where the diagonal starts, as in `Causal`.
    """

    left: int | None
    right: int | None = 0
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check the counts and the alignment."""
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and not (isinstance(value, int) and value >= 0):
                required, to_do = (
                    "a count of at least 0, or None for no limit",
                    "pass None to leave that side open",
                )
                raise argument_error(f"Window {name}", required, repr(value), to_do)
        checks.alignment(self.alignment)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the window node."""
        return (WindowNode(left=self.left, right=self.right, alignment=self.alignment),)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Narrow the band from both sides."""
        offset = _offset(self.alignment, extent)
        low = None if self.left is None else offset - self.left
        high = None if self.right is None else offset + self.right
        return _narrow(into, low, high)


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed documents: a query attends only keys of its own document.

    Args:
        lengths: Document lengths as Python ints, the same in every batch row; they sum to the sequence
            length.
        ids: Integer tensor (seqlen,) or (batch, seqlen): equal ids are one document.
        cu_seqlens: Integer tensor (documents + 1,), prefix sums starting with 0 and ending with the
            sequence length.
    """

    lengths: tuple[int, ...] | None = None
    ids: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that exactly one form is given."""
        given = [n for n in ("lengths", "ids", "cu_seqlens") if getattr(self, n) is not None]
        if len(given) != 1:
            raise argument_error(
                "Documents", "exactly one of lengths, ids and cu_seqlens", given or "none", "pass one of them"
            )
        if self.lengths is not None:
            object.__setattr__(self, "lengths", checks.counts("Documents lengths", self.lengths))
        for name, dims in (("ids", (1, 2)), ("cu_seqlens", (1,))):
            value = getattr(self, name)
            if value is not None:
                checks.integers(f"Documents {name}", value, dims)
        if self.cu_seqlens is not None:
            checks.at_least_two("Documents cu_seqlens", self.cu_seqlens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The ids or the prefix sums."""
        return tuple(t for t in (self.ids, self.cu_seqlens) if t is not None)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the documents node; lengths only where no device needs to be asked."""
        return (DocumentsNode(lengths=self.lengths, contiguous=self.ids is None),)

    def key(self) -> object:
        """Return what the description depends on."""
        ids = None if self.ids is None else tuple(self.ids.shape)
        cu_seqlens = None if self.cu_seqlens is None else tuple(self.cu_seqlens.shape)
        return ("documents", self.lengths, ids, cu_seqlens)

    def check(self, extent: Extent) -> None:
        """Documents need as many queries as keys, and lengths that fill them."""
        checks.documents(self.lengths, self.ids, extent)
        if self.cu_seqlens is not None and self.cu_seqlens.device.type == "cpu":
            checks.prefix_sums(self.cu_seqlens, extent.seqlen_kv)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add one id per token, and the bounds where they are known."""
        from attnroute.masks.tensors import cu_seqlens, document_ids

        ids = document_ids(self, extent)
        bounds = None
        if self.lengths is not None:
            bounds = (0, *(sum(self.lengths[: i + 1]) for i in range(len(self.lengths))))
        return replace(
            into,
            document_ids_q=ids,
            document_ids_kv=ids,
            document_bounds=bounds,
            cu_seqlens=cu_seqlens(self, extent),
            max_seqlen=extent.seqlen_kv if self.lengths is None else max(self.lengths, default=0),
        )


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Per batch row, only some keys exist.

    Args:
        lengths: Keys that exist, counted from the start (padding on the right): ints or an integer tensor
            (batch,).
        left: Padding keys at the start (padding on the left): ints or an integer tensor (batch,).
        keep: Bool tensor (batch, seqlen_kv), True where the key exists.
    """

    lengths: Lengths | None = None
    left: Lengths | None = None
    keep: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that exactly one form is given, and freeze Python sequences."""
        given = [n for n in ("lengths", "left", "keep") if getattr(self, n) is not None]
        if len(given) != 1:
            raise argument_error(
                "KeyPadding", "exactly one of lengths, left and keep", given or "none", "pass one of them"
            )
        for name in ("lengths", "left"):
            value = getattr(self, name)
            if checks.is_tensor(value):
                checks.integers(f"KeyPadding {name}", value, (1,))
            elif value is not None:
                object.__setattr__(self, name, checks.counts(f"KeyPadding {name}", value))
        if self.keep is not None:
            checks.bools("KeyPadding keep", self.keep, "convert it with .bool()")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The counts or flags, where they are tensors."""
        return tuple(t for t in (self.lengths, self.left, self.keep) if checks.is_tensor(t))

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the key padding node; counts only where no device needs to be asked."""
        if isinstance(self.lengths, tuple):
            return (KeyPaddingNode(lengths=self.lengths, side="right"),)
        if isinstance(self.left, tuple):
            kept = tuple(max(extent.seqlen_kv - n, 0) for n in self.left)
            return (KeyPaddingNode(lengths=kept, side="left"),)
        side = "right" if self.lengths is not None else "left" if self.left is not None else "any"
        return (KeyPaddingNode(side=side),)  # type: ignore[arg-type]

    def key(self) -> object:
        """Return what the description depends on."""
        parts = (self.lengths, self.left, self.keep)
        return ("key_padding", *(("shape", *p.shape) if checks.is_tensor(p) else p for p in parts))

    def check(self, extent: Extent) -> None:
        """There must be one entry per batch row, and a key count no larger than seqlen_kv."""
        checks.key_padding({"lengths": self.lengths, "left": self.left}, self.keep, extent)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add which keys exist."""
        from attnroute.masks.tensors import key_keep

        keep = key_keep(self, extent)
        return replace(into, key_keep=keep if into.key_keep is None else into.key_keep & keep)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A bool tensor, True = attend, that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv)."""

    tensor: Tensor

    def __post_init__(self) -> None:
        """Check the type; the shape is checked against a call."""
        checks.bools("mask Dense", self.tensor, "pass a float tensor as bias")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor."""
        return (self.tensor,)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the dense node without looking into the tensor."""
        from attnroute.masks.tensors import dense_node

        return (dense_node(self.tensor, extent, look=False),)

    def key(self) -> object:
        """Return what the description depends on."""
        from attnroute.masks.tensors import tensor_key

        return ("dense", *tensor_key(self.tensor))

    def check(self, extent: Extent) -> None:
        """The tensor must be bool and broadcast."""
        from attnroute.masks.tensors import check_dense

        check_dense("mask", self.tensor, extent)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add the tensor."""
        from attnroute.masks.tensors import as_4d

        dense = as_4d(self.tensor)
        return replace(into, dense=dense if into.dense is None else into.dense & dense)

    def __repr__(self) -> str:
        """Name the shape, not the values."""
        return f"Dense({tuple(self.tensor.shape)})"


def _offset(alignment: str, extent: Extent) -> int:
    return extent.seqlen_kv - extent.seqlen_q if alignment == "bottom_right" else 0


def _narrow(into: LoweredMask, low: int | None, high: int | None) -> LoweredMask:
    lows = [n for n in (into.band_lo, low) if n is not None]
    highs = [n for n in (into.band_hi, high) if n is not None]
    return replace(into, band_lo=max(lows, default=None), band_hi=min(highs, default=None))
