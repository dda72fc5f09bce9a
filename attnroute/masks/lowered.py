"""The form in which executors receive a mask: a band, key rows, documents and dense tensors.

A conjunction of mask nodes lowers to one `LoweredMask`. Executors read only this form, so that each
node is understood in one place (`attnroute.masks.lower`) and not once per backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoweredMask:
    """Who may attend: query i may attend key j if and only if every stated part allows it.

    Attributes:
        band_lo: Smallest allowed ``j - i``; None leaves that side open. A sliding window that looks
            ``left`` keys back has ``band_lo = offset - left``.
        band_hi: Largest allowed ``j - i``; None leaves that side open. Causal attention aligned at
            the top left has ``band_hi = 0``, at the bottom right ``seqlen_kv - seqlen_q``.
        key_keep: Bool tensor (batch or 1, seqlen_kv), True where the key may be attended.
        document_ids_q: Integer tensor (batch or 1, seqlen_q).
        document_ids_kv: Integer tensor (batch or 1, seqlen_kv); query and key must have equal ids.
        document_bounds: Python ints ``(start_0, start_1, ..., seqlen)`` shared by queries and keys, when
            the documents are contiguous, the same in every batch row and known without a device
            sync; lets an executor skip blocks. None when unknown.
        cu_seqlens: Int32 prefix sums (documents + 1,) on the device for one batch row, when the documents are
            contiguous and the same in every batch row.
        max_seqlen: Upper bound of a document's length, with `cu_seqlens`.
        dense: Bool tensor that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv), True = attend.
    """

    band_lo: int | None = None
    band_hi: int | None = None
    key_keep: Tensor | None = None
    document_ids_q: Tensor | None = None
    document_ids_kv: Tensor | None = None
    document_bounds: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    dense: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """True when nothing is masked: every query may attend every key."""
        return (
            self.band_lo is None
            and self.band_hi is None
            and self.key_keep is None
            and self.document_ids_q is None
            and self.dense is None
        )

    @property
    def is_band_only(self) -> bool:
        """True when the band alone says everything (causal, window, or nothing at all)."""
        return self.key_keep is None and self.document_ids_q is None and self.dense is None


FULL = LoweredMask()
