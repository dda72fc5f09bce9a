"""The form in which executors receive a mask: a band, key rows, documents and dense tensors.

A conjunction of mask nodes lowers to one `LoweredMask`. Executors read only this form, so that each
node is understood in one place (`attnroute.masks.lower`) and not once per backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PaddingSide: TypeAlias = Literal["left", "right"]


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
        band_lo: Smallest allowed ``j - i``; None leaves that side open. A sliding window that looks
            ``left`` keys back has ``band_lo = offset - left``.
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
        """True when the band alone says everything (causal, window, or nothing at all)."""
        tensors = (self.key_keep, self.document_ids_q, self.dense, self.diagonal)
        return all(t is None for t in tensors) and not self.is_programmed

    @property
    def is_programmed(self) -> bool:
        """True when a disjunction, a negation, a function or blocks take part."""
        return bool(self.either or self.exclude or self.functions or self.sparse)


FULL = LoweredMask()
