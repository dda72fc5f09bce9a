"""Masks of packed documents and of padded batches: `Documents`, `KeyPadding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnroute.errors import argument_error
from attnroute.masks import checks, picture
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, intersect
from attnroute.masks.objects.base import Lengths, Mask, allows_all, prepared
from attnroute.question.nodes import DocumentsNode, KeyPaddingNode, MaskNode

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents: a query attends only keys of its own document.

    Args:
        lengths: Document lengths as Python ints, the same in every batch row; they sum to the sequence
            length.
        ids: Integer tensor (seqlen,) or (batch, seqlen): equal ids are one document.
        cu_seqlens: Integer tensor (documents + 1,), prefix sums starting with 0 and ending with the
            sequence length, the same in every batch row.
        position_ids: Integer tensor (seqlen,) or (batch, seqlen): a document starts where a position is not
            the one before it plus one. Where there is one row for all, its bounds are read, which waits for
            the device once per tensor and version; never while torch compiles or a CUDA graph is captured.

    Raises:
        ArgumentError: None or several of the four are given, or one is no integer tensor of such a shape.
    """

    lengths: tuple[int, ...] | None = None
    ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that exactly one form is given."""
        forms = ("lengths", "ids", "cu_seqlens", "position_ids")
        given = [n for n in forms if getattr(self, n) is not None]
        if len(given) != 1:
            required = "exactly one of lengths, ids, cu_seqlens and position_ids"
            raise argument_error("Documents", required, given or "none", "pass one of them")
        if self.lengths is not None:
            object.__setattr__(self, "lengths", checks.counts("Documents lengths", self.lengths))
        for name, dims in (("ids", (1, 2)), ("cu_seqlens", (1,)), ("position_ids", (1, 2))):
            value = getattr(self, name)
            if value is not None:
                checks.integers(f"Documents {name}", value, dims)
        if self.cu_seqlens is not None:
            checks.at_least_two("Documents cu_seqlens", self.cu_seqlens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor that defines the documents, if one does."""
        return tuple(t for t in (self.ids, self.cu_seqlens, self.position_ids) if t is not None)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the documents node; lengths only where that needs no wait for a device."""
        count = None
        if self.cu_seqlens is not None:
            from attnroute.masks.tracing import size_hint

            count = size_hint(self.cu_seqlens.shape[0]) - 1
        return (DocumentsNode(lengths=self.lengths, count=count, contiguous=self._has_bounds()),)

    def _has_bounds(self) -> bool:
        """Whether `lower` will know where documents end, as kernels for ragged batches must."""
        if self.position_ids is None:
            return self.ids is None
        from attnroute.masks.lowered.documents import positions_are_readable

        return positions_are_readable(self.position_ids)

    def _wish(self) -> picture.Wish:
        if self.lengths is not None:
            return picture.square(sum(self.lengths), is_fixed=True)
        if self.cu_seqlens is not None:
            return picture.square(int(self.cu_seqlens[-1]), is_fixed=True)
        (per_token,) = self.tensors
        batch = per_token.shape[0] if per_token.dim() > 1 else 0
        return picture.square(per_token.shape[-1], batch=batch, is_fixed=True)

    def key(self) -> object:
        """Return what the description depends on."""
        # Shapes and no values: one route serves all tensors of a shape, whose values are read when it runs.
        forms = (self.ids, self.cu_seqlens, self.position_ids)
        shapes = [None if form is None else tuple(form.shape) for form in forms]
        return ("documents", self.lengths, *shapes, self._has_bounds())

    def check(self, extent: Extent) -> None:
        """Documents need as many queries as keys, and lengths that fill them."""
        per_token = {"ids": self.ids, "position_ids": self.position_ids}
        checks.documents(self.lengths, per_token, extent)
        if self.cu_seqlens is not None:
            checks.document_sums(self.cu_seqlens, extent.seqlen_kv)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add one id per token, and the bounds where they are known."""
        return intersect(into, prepared(self, extent, lambda: self._lowered(extent)))

    def _lowered(self, extent: Extent) -> LoweredMask:
        from attnroute.masks.lowered import documents

        if allows_all(self, extent):
            return FULL
        if self.lengths is not None:
            return documents.of_lengths(self.lengths, extent)
        if self.ids is not None:
            return documents.of_ids(self.ids, extent)
        if self.cu_seqlens is not None:
            return documents.of_sums(self.cu_seqlens, extent)
        assert self.position_ids is not None
        return documents.of_positions(self.position_ids, extent)


@dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(Mask):
    """Per batch row, only some keys exist.

    Args:
        lengths: Keys that exist, counted from the start (padding on the right): ints or an integer tensor
            (batch,).
        left: Padding keys at the start (padding on the left): ints or an integer tensor (batch,).
        keep: Bool tensor (batch, seqlen_kv), True where the key exists.
        finite: What is left out holds no NaN and no infinity, as padded embeddings do. Kernels multiply left
            out values with a weight of zero, and zero times NaN is NaN; so unless this is stated, key and
            value are copied with zeros there for kernels that read them.

    Raises:
        ArgumentError: None or several of the three are given, or one is no such counts or tensor.
    """

    lengths: Lengths | None = None
    left: Lengths | None = None
    keep: Tensor | None = None
    finite: bool = False

    def __post_init__(self) -> None:
        """Check that exactly one form is given, and freeze Python sequences."""
        if not isinstance(self.finite, bool):
            raise argument_error("KeyPadding finite", "True or False", repr(self.finite), "pass one of them")
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
        given = self.lengths if self.left is None else self.left
        given = self.keep if given is None else given
        return (given,) if checks.is_tensor(given) else ()

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the key padding node; counts only where that needs no wait for a device."""
        if isinstance(self.lengths, tuple):
            return (KeyPaddingNode(lengths=self.lengths, side="right", finite=self.finite),)
        if isinstance(self.left, tuple):
            kept = tuple(max(extent.seqlen_kv - n, 0) for n in self.left)
            return (KeyPaddingNode(lengths=kept, side="left", finite=self.finite),)
        side = "right" if self.lengths is not None else "left" if self.left is not None else "any"
        return (KeyPaddingNode.unchecked(side=side, finite=self.finite),)

    def _wish(self) -> picture.Wish:
        if self.keep is not None:
            batch, keys = self.keep.shape
            return picture.Wish(batch, 0, 0, keys, is_fixed=True)
        if self.left is not None:
            padding = picture.numbers(self.left)
            return picture.square(2 * max(padding), batch=len(padding))
        kept = picture.numbers(self.lengths or ())
        return picture.square(max(kept), batch=len(kept))

    def key(self) -> object:
        """Return what the description depends on."""
        name = "keep" if self.keep is not None else "lengths" if self.left is None else "left"
        form = getattr(self, name)
        return ("key_padding", self.finite, name, form if isinstance(form, tuple) else ("shape", *form.shape))

    def check(self, extent: Extent) -> None:
        """There must be one entry per batch row, and a key count no larger than seqlen_kv."""
        checks.key_padding({"lengths": self.lengths, "left": self.left}, self.keep, extent)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add which keys exist, and how many where they lie side by side."""
        from attnroute.masks.lowered import padding

        if self.keep is not None and self.keep.device == extent.device:
            # Flags are what is read of a mask, so nothing is made that could be kept.
            return intersect(into, padding.flags(self.keep, extent))
        return intersect(into, prepared(self, extent, lambda: self._lowered(extent)))

    def _lowered(self, extent: Extent) -> LoweredMask:
        from attnroute.masks.lowered import padding

        # What tensors say is not known here.
        if not self.tensors and allows_all(self, extent):
            return FULL
        if self.lengths is not None:
            return padding.right(self.lengths, extent)
        if self.left is not None:
            return padding.left(self.left, extent)
        assert self.keep is not None
        return padding.flags(self.keep, extent)
