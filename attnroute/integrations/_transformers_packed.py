"""Packed documents that a caller states as cumulative lengths beside the mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnroute.errors import argument_error
from attnroute.integrations._transformers_pattern import Pattern
from attnroute.masks import All, Dense, Documents, Mask
from attnroute.masks.tensors import remember
from attnroute.masks.tracing import is_traced


def with_cu_seqlens(
    mask: Mask | Tensor | None,
    pattern: Pattern | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Mask | Tensor | None:
    """Return the mask with the documents that `cu_seq_lens_q` and `cu_seq_lens_k` state.

    Args:
        mask: What is masked already.
        pattern: Where the mask came from; the result is kept with it, so that all layers share one.
        cu_q: Integer tensor (documents + 1,), prefix sums of the lengths; one batch row holds all documents.
        cu_k: The same for the keys; must be equal.
        query: (1, num_heads_q, seqlen, head_dim).
        key: (1, num_heads_kv, seqlen, head_dim).

    Raises:
        ArgumentError: They are no partition of the tokens of one batch row, or contradict the mask.
    """
    if cu_q is None or cu_k is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise argument_error(
            "cu_seq_lens_q and cu_seq_lens_k",
            "both of them, a batch of 1 and as many queries as keys",
            f"batch {query.shape[0]}, {query.shape[2]} queries, {key.shape[2]} keys, "
            f"{'one' if (cu_q is None) != (cu_k is None) else 'both'} of them",
            "flatten the batch, or pass a mask",
        )
    if pattern is None:
        return _joined(mask, None, cu_q, cu_k)
    what = ("cu_seq_lens", id(cu_q), id(cu_k), id(mask))
    # What is kept holds the tensors, so that their ids stay theirs for as long.
    return remember(pattern, what, lambda: (_joined(mask, pattern.ids, cu_q, cu_k), cu_q, cu_k, mask))[0]


def _joined(
    mask: Mask | Tensor | None, ids: Tensor | None, cu_q: Tensor, cu_k: Tensor
) -> Mask | Tensor | None:
    # A tracer reads no values, so there they must be right, as for `attention()`.
    unread = is_compiling() or is_traced(cu_q) or is_traced(cu_k)
    if cu_q is not cu_k and not unread and not torch.equal(cu_q, cu_k):
        raise argument_error(
            "cu_seq_lens_k", "the same documents as cu_seq_lens_q", "others", "pass equal ones"
        )
    if ids is not None:
        _check_agreement(ids[0], cu_q)
        return mask
    documents = Documents(cu_seqlens=cu_q)
    if mask is None:
        return documents
    return All((*(Dense(mask) if isinstance(mask, Tensor) else mask).nodes, documents))


def _check_agreement(ids: Tensor, cu_seqlens: Tensor) -> None:
    starts = torch.zeros(len(ids) + 1, dtype=torch.int64, device=ids.device)
    starts[cu_seqlens[:-1].long()] = 1
    stated = starts[:-1].cumsum(0)
    if not torch.equal(stated - stated[0], (ids - ids[0]).long()):
        raise argument_error(
            "cu_seq_lens_q",
            "the documents that position_ids state, which start where positions do not go up by one",
            "other ones",
            "pass only one of both",
        )
