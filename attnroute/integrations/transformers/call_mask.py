"""The mask of one attention call of a transformers model: what it passes, states beside it, or leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnroute.errors import argument_error
from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.integrations.transformers.pattern import Pattern
from attnroute.masks import All, Causal, Dense, Documents, Mask, Window
from attnroute.masks.kept import remember
from attnroute.masks.tracing import is_traced


def call_mask(
    query: Tensor, key: Tensor, given: Tensor | None, is_causal: bool, kwargs: Mapping[str, Any]
) -> tuple[Mask | Tensor | None, tuple[int, int]]:
    """Return the mask of one attention call, and the first key that it is for and the one after the last.

    Args:
        query: (batch, num_heads_q, q_length, head_dim).
        key: (batch, num_heads_kv, kv_length, head_dim).
        given: What the model passes as attention_mask.
        is_causal: What the module means where it passes none.
        kwargs: Further arguments of the module: sliding_window, cu_seq_lens_q, cu_seq_lens_k.

    Raises:
        ArgumentError: They contradict each other, or leave open what is masked.
    """
    window: int | None = kwargs.get("sliding_window")
    keys = (0, key.shape[2])
    mask: Mask | Tensor | None = given
    pattern = None
    if isinstance(given, CarriedMask) and is_compiling():
        # A graph does not know the pattern of the object, but its tensors, of which the dense mask is made.
        mask = given & True
    elif isinstance(given, CarriedMask):
        pattern = given.pattern
        mask, keys = _carried(given, query, key, window)
    elif given is None:
        mask = _unstated(query.shape[2], key.shape[2], is_causal, window)
    sums = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
    if sums != (None, None):
        mask = _with_cu_seqlens(mask, pattern, *sums, query, key)
    return mask, keys


def _carried(
    given: CarriedMask, query: Tensor, key: Tensor, window: int | None
) -> tuple[Mask | Tensor, tuple[int, int]]:
    pattern, whole = given.pattern, (0, key.shape[2])
    if pattern is None:
        return given.dense(), whole
    lengths = (query.shape[2], key.shape[2])
    if lengths != (pattern.q_length, pattern.kv_length):
        raise argument_error(
            "attention_mask",
            f"{lengths[0]} queries and {lengths[1]} keys, as query and key have",
            f"one for {pattern.q_length} and {pattern.kv_length}",
            "make the mask for the lengths of this layer",
        )
    if window is not None:
        pattern = pattern.with_window(window)
    if pattern.mask is None:
        return given.dense(), whole
    return pattern.mask, pattern.keys


def _unstated(seqlen_q: int, seqlen_kv: int, is_causal: bool, window: int | None) -> Mask | None:
    """Return what the module means where it passes no mask; never a guess about an alignment."""
    if seqlen_q == 1 or not is_causal:
        if window is not None and seqlen_kv > window:
            raise argument_error(
                "attention_mask",
                f"a mask with the sliding window of {window}, beyond which {seqlen_kv} keys reach",
                None,
                "make it with transformers' masking_utils",
            )
        return None
    if seqlen_q != seqlen_kv:
        raise argument_error(
            "attention_mask",
            "a mask for causal attention with as many queries as keys excepted",
            f"None with {seqlen_q} queries and {seqlen_kv} keys",
            "make it with transformers' masking_utils, or pass is_causal=False",
        )
    return Causal() if window is None else Window(window - 1, 0)


def _with_cu_seqlens(
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
