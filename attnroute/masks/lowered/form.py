"""`LoweredMask`, the form in which executors receive a mask: a band, key flags, documents, a dense tensor.

Every mask object lowers to it, so that each object is understood once and not once per backend. Two lowered
masks intersect to one. Importing this module loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from attnroute.question.normalize import Sizes, open_sides

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PaddingSide: TypeAlias = Literal["left", "right"]
_Changes: TypeAlias = dict[str, Any]
_DIMS: Final = 4


class Extent(NamedTuple):
    """The sizes a mask is read at: batch size, query heads, lengths; and the device of its tensors."""

    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_kv: int
    device: Any = None

    @property
    def is_empty(self) -> bool:
        """There is no pair of a query and a key, and so nothing to mask."""
        return 0 in (self.seqlen_q, self.seqlen_kv)

    @property
    def sizes(self) -> Sizes:
        """What simplifying a mask depends on."""
        return Sizes(self.batch, self.seqlen_q, self.seqlen_kv)


@dataclass(frozen=True, slots=True)
class MaskFunction:
    """A predicate ``(batch, head, query index, key index) -> bool tensor`` over 0-D integer tensors.

    Attributes:
        mask_mod: The predicate, as FlexAttention's.
        per_batch: It reads the batch index.
        per_head: It reads the head index.
    """

    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_batch: bool = True
    per_head: bool = True


@dataclass(frozen=True, slots=True)
class LoweredMask:
    """Who may attend: query i may attend key j if and only if every stated part allows it.

    Attributes:
        band_lo: Smallest allowed ``j - i``; None leaves that side open. A sliding window of
            ``left`` keys before the diagonal has ``band_lo = offset - left``.
        band_hi: Largest allowed ``j - i``; None leaves that side open. Causal attention aligned at
            the top left has ``band_hi = 0``, at the bottom right ``seqlen_kv - seqlen_q``.
        key_keep: Bool tensor (batch or 1, seqlen_kv), True where the key may be attended.
        key_counts: Int32 tensor (batch,) on the device: how many keys exist, when `key_keep` forbids padding
            at one side and nothing else; kernels that take ragged batches need no flags then.
        padding_side: Where the keys that do not exist are, with `key_counts`.
        document_ids_q: Integer tensor (batch or 1, seqlen_q).
        document_ids_kv: Integer tensor (batch or 1, seqlen_kv); query and key must have equal ids.
        document_bounds: Python ints ``(start_0, start_1, ..., seqlen)`` shared by queries and keys, when
            the documents are contiguous, the same in every batch row and known without a device
            sync; lets an executor skip blocks. None when unknown.
        cu_seqlens: Int32 prefix sums (documents + 1,) on the device for one batch row, when the documents are
            contiguous and the same in every batch row.
        max_seqlen: Upper bound of a document's length, with `cu_seqlens`.
        cu_seqlens_kv: As `cu_seqlens`, for keys that have lengths of their own; None = those of the queries.
        max_seqlen_kv: Upper bound of a document's number of keys, with `cu_seqlens_kv`.
        diagonal: Integer tensor (seqlen_q,): the key on each query's diagonal. The band then limits
            ``j - diagonal[i]`` instead of ``j - i``.
        dense: Bool tensor that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv), True = attend.
        either: Disjunctions: of each, some alternative must allow.
        exclude: Negations: none of these may allow.
        functions: Predicates, each of which must allow.
        sparse: BlockMasks of torch, each of which must allow.
    """

    band_lo: int | None = None
    band_hi: int | None = None
    key_keep: Tensor | None = None
    key_counts: Tensor | None = None
    padding_side: PaddingSide | None = None
    document_ids_q: Tensor | None = None
    document_ids_kv: Tensor | None = None
    document_bounds: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_kv: int = 0
    diagonal: Tensor | None = None
    dense: Tensor | None = None
    either: tuple[tuple[LoweredMask, ...], ...] = ()
    exclude: tuple[LoweredMask, ...] = ()
    functions: tuple[MaskFunction, ...] = ()
    sparse: tuple[Any, ...] = ()

    @property
    def is_full(self) -> bool:
        """True when nothing is masked: every query may attend every key."""
        return self.band_lo is None and self.band_hi is None and self.is_band_only

    @property
    def is_band_only(self) -> bool:
        """True when there is nothing but a band (causal, window, or nothing at all)."""
        return (
            self.key_keep is self.document_ids_q is self.dense is self.diagonal is None
            and not self.is_programmed
        )

    @property
    def is_programmed(self) -> bool:
        """True when a disjunction, a negation, a function or blocks take part."""
        return bool(self.either or self.exclude or self.functions or self.sparse)


FULL = LoweredMask()
NOBODY = LoweredMask(exclude=(FULL,))
"""The mask that allows nothing: everything is excluded."""


def intersect(into: LoweredMask, part: LoweredMask) -> LoweredMask:
    """Return a lowered mask that allows what both allow.

    A lowered mask has one band, one diagonal and one set of documents. The second band of another diagonal
    and the second set of documents become disjunctions of one alternative, which mean the same.
    """
    if into is FULL or part is FULL:
        return part if into is FULL else into
    band, documents = _band(into, part), _documents(into, part)
    alone = (*band.pop("either", ()), *documents.pop("either", ()))
    return replace(
        into,
        **band,
        **documents,
        **_keys(into, part),
        dense=_both(into.dense, part.dense),
        either=into.either + alone + part.either,
        exclude=into.exclude + part.exclude,
        functions=into.functions + part.functions,
        sparse=into.sparse + part.sparse,
    )


def open_band(lowered: LoweredMask, extent: Extent) -> LoweredMask:
    """Open the sides of the band that rule nothing out at these lengths, as the decision does.

    The band around a diagonal of its own stays: how far that reaches is in the values of a tensor.
    """
    low = lowered.band_lo
    if lowered.diagonal is not None or (low is None and lowered.band_hi is None):
        return lowered
    left, right = open_sides(None if low is None else -low, lowered.band_hi, "top_left", extent.sizes)
    return replace(lowered, band_lo=None if left is None else -left, band_hi=right)


def as_4d(tensor: Tensor) -> Tensor:
    """Return a 0-, 1-, 2- or 4-D tensor with leading dimensions of size 1 added up to four."""
    return tensor if tensor.dim() == _DIMS else tensor[(None,) * (_DIMS - tensor.dim())]


def _band(into: LoweredMask, part: LoweredMask) -> _Changes:
    if part.band_lo is None and part.band_hi is None:
        return {}
    if into.band_lo is None and into.band_hi is None:
        return {"band_lo": part.band_lo, "band_hi": part.band_hi, "diagonal": part.diagonal}
    # Tensors are compared by identity, because comparing values would wait for the device.
    if into.diagonal is not part.diagonal:
        band = LoweredMask(band_lo=part.band_lo, band_hi=part.band_hi, diagonal=part.diagonal)
        return {"either": ((band,),)}
    lows = [n for n in (into.band_lo, part.band_lo) if n is not None]
    highs = [n for n in (into.band_hi, part.band_hi) if n is not None]
    return {"band_lo": max(lows, default=None), "band_hi": min(highs, default=None)}


def _documents(into: LoweredMask, part: LoweredMask) -> _Changes:
    if part.document_ids_q is None or _same_documents(into, part):
        return {}
    documents = {
        "document_ids_q": part.document_ids_q,
        "document_ids_kv": part.document_ids_kv,
        "document_bounds": part.document_bounds,
        "cu_seqlens": part.cu_seqlens,
        "max_seqlen": part.max_seqlen,
        "cu_seqlens_kv": part.cu_seqlens_kv,
        "max_seqlen_kv": part.max_seqlen_kv,
    }
    if into.document_ids_q is None:
        return documents
    return {"either": ((LoweredMask(**documents),),)}  # type: ignore[arg-type]


def _keys(into: LoweredMask, part: LoweredMask) -> _Changes:
    """Padding at one side stays countable beside padding at the same side: the fewer keys exist."""
    if part.key_keep is None:
        return {}
    counts, side = part.key_counts, part.padding_side
    if into.key_keep is not None:
        alike = side is not None and side == into.padding_side
        # Padding at both sides, or anywhere, is no count any more: only the flags tell which keys exist.
        counts = _fewer(into.key_counts, counts) if alike else None
    keep = _both(into.key_keep, part.key_keep)
    return {"key_keep": keep, "key_counts": counts, "padding_side": None if counts is None else side}


def _fewer(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None or one is other:
        return None if other is None else one
    return one.minimum(other)


def _same_documents(one: LoweredMask, other: LoweredMask) -> bool:
    if one.document_bounds is not None and other.document_bounds is not None:
        # A document without tokens is no other document.
        return set(one.document_bounds) == set(other.document_bounds)
    return one.document_ids_q is other.document_ids_q and one.document_ids_kv is other.document_ids_kv


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None or one is other:
        return other if one is None else one
    return one & other
