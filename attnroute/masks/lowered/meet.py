"""Both of two lowered masks as one: what a lowered mask can hold once stands beside it when there are two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnroute.masks.lowered.form import FULL, LoweredMask

if TYPE_CHECKING:
    from torch import Tensor

Changes = dict[str, Any]
NOBODY = LoweredMask(exclude=(FULL,))
"""The mask that allows nothing: everything is excluded."""


def meet(into: LoweredMask, part: LoweredMask) -> LoweredMask:
    """Return a lowered mask that allows what both allow.

    A lowered mask has one band, one diagonal and one set of documents. The second band of another diagonal
    and the second set of documents become disjunctions of one alternative, which says the same.
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


def narrowed(into: LoweredMask, low: int | None, high: int | None) -> LoweredMask:
    """Return a lowered mask whose band is also limited by ``low <= j - i <= high``; None limits nothing."""
    return meet(into, LoweredMask(band_lo=low, band_hi=high))


def _band(into: LoweredMask, part: LoweredMask) -> Changes:
    if part.band_lo is None and part.band_hi is None:
        return {}
    if into.band_lo is None and into.band_hi is None:
        return {"band_lo": part.band_lo, "band_hi": part.band_hi, "diagonal": part.diagonal}
    if into.diagonal is not part.diagonal:
        band = LoweredMask(band_lo=part.band_lo, band_hi=part.band_hi, diagonal=part.diagonal)
        return {"either": ((band,),)}
    lows = [n for n in (into.band_lo, part.band_lo) if n is not None]
    highs = [n for n in (into.band_hi, part.band_hi) if n is not None]
    return {"band_lo": max(lows, default=None), "band_hi": min(highs, default=None)}


def _documents(into: LoweredMask, part: LoweredMask) -> Changes:
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


def _keys(into: LoweredMask, part: LoweredMask) -> Changes:
    """Padding at one side stays countable beside padding at the same side: the fewer keys exist."""
    if part.key_keep is None:
        return {}
    counts, side = part.key_counts, part.padding_side
    if into.key_keep is not None:
        alike = side is not None and side == into.padding_side
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
