"""`Ragged`, the mask of layout thd: sequences of any lengths behind each other, in one batch row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnroute.errors import argument_error
from attnroute.masks import checks, picture
from attnroute.masks.lowered.form import Extent, LoweredMask
from attnroute.masks.objects.base import Mask
from attnroute.question.nodes import CausalNode, DocumentsNode, MaskNode, WindowNode
from attnroute.question.normalize import open_sides

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.vocabulary import Alignment


@dataclass(frozen=True, eq=False, repr=False)
class Ragged(Mask):
    """Queries attend keys of their own sequence, within a band around that sequence's diagonal.

    The sequences are the same in every batch row; in layout thd there is one row.

    Args:
        cu_seqlens: Integer tensor (sequences + 1,): prefix sums of the query lengths, from 0 to total_q.
        cu_seqlens_kv: The same for keys, to total_kv, with as many sequences. None, or `cu_seqlens` itself:
            keys have the lengths of the queries (self attention).
        max_seqlen: Upper bound of a query length in tokens; None = total_q. One that is too small leaves
            queries of longer sequences out.
        max_seqlen_kv: Upper bound of a key length in tokens; None = total_kv, or `max_seqlen` in self
            attention.
        left: How many keys before the diagonal may be attended, the diagonal not counted; None = all.
        right: How many keys after the diagonal; None = all. ``left=None, right=0`` is causal.
        alignment: Where the diagonal of a sequence lies: "top_left" starts with its first query and key,
            "bottom_right" ends with its last ones. The same in self attention.

    Raises:
        ArgumentError: An argument has the wrong type.
    """

    cu_seqlens: Tensor
    cu_seqlens_kv: Tensor | None = None
    max_seqlen: int | None = None
    max_seqlen_kv: int | None = None
    left: int | None = None
    right: int | None = None
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        """Check what needs no lengths."""
        for name, sums in (("cu_seqlens_q", self.cu_seqlens), ("cu_seqlens_kv", self.cu_seqlens_kv)):
            if sums is not None:
                checks.integers(name, sums, (1,))
                checks.at_least_two(name, sums)
        if self.cu_seqlens_kv is not None and self.cu_seqlens_kv.shape != self.cu_seqlens.shape:
            required = f"as many sequences as cu_seqlens_q has ({self.cu_seqlens.shape[0] - 1})"
            to_do = "give a sequence without keys the same sum twice"
            raise argument_error("cu_seqlens_kv", required, self.cu_seqlens_kv.shape[0] - 1, to_do)
        for name, value in (("max_seqlen_q", self.max_seqlen), ("max_seqlen_kv", self.max_seqlen_kv)):
            _check_count(name, value, "pass None to use the total")
        for name, value in (("window left", self.left), ("window right", self.right)):
            _check_count(name, value, "pass None to leave that side open")
        checks.alignment(self.alignment)

    @property
    def cross(self) -> bool:
        """Keys have lengths of their own."""
        return self.cu_seqlens_kv is not None and self.cu_seqlens_kv is not self.cu_seqlens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The prefix sums."""
        sums = self.cu_seqlens_kv
        return (self.cu_seqlens,) if sums is None or sums is self.cu_seqlens else (self.cu_seqlens, sums)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the documents node, and beside it the causal or window node of every document."""
        from attnroute.masks.tracing import size_hint

        documents = DocumentsNode(count=size_hint(self.cu_seqlens.shape[0]) - 1, cross=self.cross)
        if self.left is None and self.right is None:
            return (documents,)
        if self.left is None and self.right == 0:
            return (documents, CausalNode(alignment=self.alignment))
        return (documents, WindowNode(left=self.left, right=self.right, alignment=self.alignment))

    def _wish(self) -> picture.Wish:
        queries = int(self.cu_seqlens[-1])
        keys = queries if self.cu_seqlens_kv is None else int(self.cu_seqlens_kv[-1])
        return picture.Wish(0, 0, queries, keys, is_fixed=True)

    def key(self) -> object:
        """Return what the description and the checks depend on."""
        sequences = self.cu_seqlens.shape[0] - 1
        return ("ragged", sequences, self.cross, self.left, self.right, self.alignment)

    def check(self, extent: Extent) -> None:
        """Sums on the CPU must rise to the lengths there are, and no sequence be longer than its bound."""
        if not self.cross and extent.seqlen_q != extent.seqlen_kv:
            got = f"total_q = {extent.seqlen_q}, total_kv = {extent.seqlen_kv}"
            to_do = "pass cu_seqlens_kv where keys have lengths of their own"
            raise argument_error("cu_seqlens_q", "as many queries as keys without cu_seqlens_kv", got, to_do)
        queries = self.cu_seqlens
        keys = queries if self.cu_seqlens_kv is None else self.cu_seqlens_kv
        checks.sequence_sums("cu_seqlens_q", queries, extent.seqlen_q)
        checks.sequence_sums("cu_seqlens_kv", keys, extent.seqlen_kv)
        checks.longest("max_seqlen_q", self.max_seqlen, queries)
        checks.longest("max_seqlen_kv", self.max_seqlen_kv, keys)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add the sequences, and the band of each.

        Raises:
            ArgumentError: A causal or window mask was added before, which does not know of sequences.
        """
        from attnroute.masks.lowered import sequences

        if into.band_lo is not None or into.band_hi is not None:
            to_do = 'pass is_causal and window to attention(layout="thd") instead'
            raise argument_error("mask Ragged", "no causal or window mask beside it", "one", to_do)
        queries = keys = sequences.tokens("cu_seqlens_q", self.cu_seqlens, extent.seqlen_q, extent.device)
        longest = longest_kv = self.max_seqlen or extent.seqlen_q
        if self.cross and self.cu_seqlens_kv is not None:
            keys = sequences.tokens("cu_seqlens_kv", self.cu_seqlens_kv, extent.seqlen_kv, extent.device)
            longest_kv = self.max_seqlen_kv or extent.seqlen_kv
        # As the decision does: a kernel without bands must not meet one that rules nothing out.
        left, right = open_sides(self.left, self.right, self.alignment, extent.sizes)
        band = left is not None or right is not None
        return replace(
            into,
            band_lo=None if left is None else -left,
            band_hi=right,
            document_ids_q=queries.ids,
            document_ids_kv=keys.ids,
            cu_seqlens=queries.sums,
            max_seqlen=longest,
            cu_seqlens_kv=keys.sums if self.cross else None,
            max_seqlen_kv=longest_kv,
            diagonal=sequences.diagonal(queries, keys, self.alignment) if band and self.cross else None,
        )


def _check_count(name: str, value: object, to_do: str) -> None:
    if value is not None and not (checks.is_number(value) and value >= 0):
        raise argument_error(name, "a count of at least 0, or None", repr(value), to_do)
