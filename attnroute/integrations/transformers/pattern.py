"""`Pattern`: a mask of transformers as a few numbers and tensors, and the mask object that equals it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

from attnroute.masks import All, Causal, Documents, KeyPadding, Mask, Window
from attnroute.masks.kept import remember

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.masks.lowered.form import PaddingSide
    from attnroute.vocabulary import Alignment

Keys: TypeAlias = tuple[int, int] | None
"""The first key and the one after the last; None = all."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Query i may attend key j if ``i + offset - left <= j <= i + offset + right``, and all below allows it.

    Attributes:
        batch: Batch size.
        q_length: Queries.
        kv_length: Keys.
        offset: Position of the first query minus position of the first key.
        left: Keys before the query's own position that it may attend; None = all.
        right: Keys after it; None = all, 0 = causal.
        keep: Bool tensor (batch, kv_length), True where the key exists; None = all exist.
        padding_side: The only side at which keys of `keys` are missing, where somebody read them.
        ids: Integer tensor (batch, kv_length): equal ids are one packed document. Only with q_length ==
            kv_length.
        cu_seqlens: The same documents as int32 prefix sums on the CPU, where there is one batch row and
            somebody read the ids.
    """

    batch: int
    q_length: int
    kv_length: int
    offset: int = 0
    left: int | None = None
    right: int | None = None
    keep: Tensor | None = None
    padding_side: PaddingSide | None = None
    ids: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked."""
        open_left = self.left is None or self.left >= self.q_length - 1 + self.offset
        open_right = self.right is None or self.right >= self.kv_length - 1 - self.offset
        return open_left and open_right and self.keep is None and self.ids is None

    @cached_property
    def keys(self) -> tuple[int, int]:
        """First key that some query may attend, and the one after the last; the others need not be read."""
        everything = (0, self.kv_length)
        if self.ids is not None:
            return everything
        start, stop = self._reach
        return (start, stop) if start < stop else everything

    @property
    def _reach(self) -> tuple[int, int]:
        """First key in the band of some query, and the one after the last; there may be none."""
        start = 0 if self.left is None else max(0, self.offset - self.left)
        stop = self.kv_length
        if self.right is not None:
            stop = min(stop, self.q_length + self.offset + self.right)
        return start, stop

    @cached_property
    def said(self) -> tuple[Mask | None, Keys] | None:
        """What a call gets: the mask, None where nothing is masked, and the keys that it is for.

        None where no mask object equals the pattern.
        """
        if self.mask is None:
            return None
        whole = self.keys == (0, self.kv_length)
        return self.mask if self.mask.nodes else None, None if whole else self.keys

    @cached_property
    def mask(self) -> Mask | None:
        """The mask for all queries and the keys in `keys`; one object, so that layers share what it prepares.

        None where the queries lie so far before the keys that no mask object equals it.
        """
        start, stop = self.keys
        if self.q_length == 1 and self._reach[0] < self._reach[1]:
            # The band of one query is the keys in reach.
            band: tuple[Mask, ...] | None = ()
        else:
            band = _band(self.left, self.right, self.offset - start, (stop - start) - self.q_length)
        if band is None:
            return None
        if self.keep is not None:
            band = (*band, _key_padding(self.keep[:, start:stop], self.padding_side))
        if self.ids is not None:
            by_sums = self.cu_seqlens is not None
            band = (*band, Documents(cu_seqlens=self.cu_seqlens) if by_sums else Documents(ids=self.ids))
        return band[0] if len(band) == 1 else All(band)

    def with_window(self, window: int) -> Pattern:
        """Return this pattern if it has a window of its own, else one with ``sliding_window = window``.

        The window of a mask is exact, while modules state theirs as the flash kernels count it, which
        differs by one between models. So the module's number counts only beside a mask without any.
        """
        if self.left is not None or window >= self.q_length + self.offset:
            return self
        right = window - 1 if self.right is None else min(self.right, window - 1)
        return remember(self, ("window", window), lambda: replace(self, left=window - 1, right=right))

    def dense(self, device: torch.device | str | None) -> Tensor:
        """Return the whole mask as a new bool tensor (batch, 1, q_length, kv_length), True = attend."""
        shape = (self.batch, 1, self.q_length, self.kv_length)
        return allowed_pairs(shape, self.offset, self.left, self.right, self.keep, self.ids, device)

    def part(self, rows: slice, columns: slice) -> Pattern | None:
        """Return the pattern of a block, or None where it is empty, has gaps or cuts documents."""
        first_row, last_row, row_step = rows.indices(self.q_length)
        first, last, step = columns.indices(self.kv_length)
        whole = (first_row, last_row, first, last) == (0, self.q_length, 0, self.kv_length)
        if (row_step, step) != (1, 1) or first_row >= last_row or first >= last:
            return None
        if whole:
            return self
        if self.ids is not None:
            return None
        return replace(
            self,
            q_length=last_row - first_row,
            kv_length=last - first,
            offset=self.offset + first_row - first,
            keep=None if self.keep is None else self.keep[:, first:last],
        )


def allowed_pairs(
    shape: tuple[int, ...],
    offset: int | Tensor,
    left: int | Tensor | None,
    right: int | Tensor | None,
    keep: Tensor | None,
    ids: Tensor | None,
    device: torch.device | str | None,
) -> Tensor:
    """Return what the attributes of a `Pattern` allow as a new bool tensor of a shape, True = attend."""
    rows = torch.arange(shape[2], device=device)[:, None] + offset
    columns = torch.arange(shape[3], device=device)[None]
    allowed = torch.ones(shape, dtype=torch.bool, device=device)
    if left is not None:
        allowed &= columns >= rows - left
    if right is not None:
        allowed &= columns <= rows + right
    if keep is not None:
        allowed &= keep[:, None, None, :].to(device)
    if ids is not None:
        allowed &= (ids[:, None, :, None] == ids[:, None, None, :]).to(device)
    return allowed


def _key_padding(keep: Tensor, side: PaddingSide | None) -> KeyPadding:
    """Return padding at one side as counts, which kernels for ragged batches take; the device counts them.

    Padded tokens went through the layers as others did and are finite, so that nothing needs clearing.
    """
    if side is None:
        return KeyPadding(keep=keep, finite=True)
    if side == "right":
        return KeyPadding(lengths=keep.sum(1), finite=True)
    return KeyPadding(left=(~keep).sum(1), finite=True)


def _band(left: int | None, right: int | None, offset: int, corner: int) -> tuple[Mask, ...] | None:
    """Return a band with its diagonal at `offset`; None where counts from neither corner can express it."""
    if left is None and right is None:
        return ()
    alignments: tuple[tuple[Alignment, int], ...] = (("top_left", offset), ("bottom_right", offset - corner))
    for alignment, shift in sorted(alignments, key=lambda a: a[1] != 0):
        before = None if left is None else left - shift
        after = None if right is None else right + shift
        if (before is None or before >= 0) and (after is None or after >= 0):
            causal = before is None and after == 0
            return (Causal(alignment) if causal else Window(before, after, alignment),)
    return None
