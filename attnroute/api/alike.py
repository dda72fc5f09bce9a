"""Under what the short way keeps a call: what tells kinds of calls apart, in few reads of the arguments."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from attnroute.api.records import Given
from attnroute.masks import Causal, Dense, Mask, Window
from attnroute.masks.kept import Keeper, known_keeper
from attnroute.masks.layout import tensor_key
from attnroute.masks.recognition.summary import INSPECT_THRESHOLD

OF_MASK: Final = 4
"""Where a place has the mask."""
_LAYOUT: Final = Given._fields.index("layout")
_ALIGNMENT_BITS: Final = 15
NEW: Final = "a new mask"
"""In the place of a mask object of which nothing is kept; nothing may be kept under it."""
_TENSORS: Final = frozenset({"a bias", "a mask"})
_BIAS, _UNREAD = sorted(_TENSORS)
"""In the place of a tensor whose values no route depends on: its form is compared as those of others are."""
_QKV: Final = 3
_NUMBERS: Final = frozenset({float, int, type(None)})
"""Types of numbers that mean the same where they are equal; True would be an error."""
_COUNTS: Final = frozenset({int, type(None)})
_records_gradients = torch.is_grad_enabled


Alike = tuple[Any, tuple[Any, ...], tuple[Any, ...], Keeper | None]
"""Under what a call is kept (None: it goes the long way), its tensors but those of its mask, what a `Bound`
takes, and the keeper of its mask or of the sums of its sequences."""
_NOWHERE: Final[Alike] = (None, (), (), None)


def alike(arguments: tuple[Any, ...]) -> Alike:
    """Return what the arguments of `attention()` have in common with others that differ in values alone.

    Every one is named, so that a new one cannot be left out.

    Raises:
        AttributeError, IndexError, RuntimeError, TypeError: An argument is malformed.
    """
    (
        query,
        key,
        value,
        mask,
        bias,
        is_causal,
        causal_alignment,
        window,
        scale,
        softcap,
        sink,
        alibi_slopes,
        dropout_p,
        layout,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        deterministic,
        return_lse,
        backend,
        prefer,
    ) = arguments
    if (
        # The check in C++ takes each tensor once.
        query is key
        or key is value
        or value is query
        or is_causal.__class__ is not bool
        or (scale is not None and scale.__class__ not in _NUMBERS)
        or softcap.__class__ not in _NUMBERS
        or dropout_p.__class__ not in _NUMBERS
        or (window is not None and not _NUMBERS.issuperset(map(type, window)))
        or return_lse.__class__ is not bool
        or not (deterministic is prefer is None)
    ):
        return _NOWHERE
    qkv = (query, key, value)
    tensors: tuple[Any, ...] = qkv
    passed: tuple[Any, ...] = (query, key, value, mask)
    of_mask: Any = None
    keeper: Keeper | None = None
    others: object = None
    misaligned: object = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & _ALIGNMENT_BITS
    if layout == "thd" or not (cu_seqlens_q is cu_seqlens_kv is max_seqlen_q is max_seqlen_kv is None):
        # The sums of sequences take the place of a mask.
        if layout != "thd" or mask is not None or bias is not None:
            return _NOWHERE
        of_mask, keeper = _of_sums(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        if keeper is None:
            return _NOWHERE
    elif mask is not None:
        of_mask, keeper = _of_mask(mask, query, key, layout)
        if of_mask is None:
            return _NOWHERE
        if of_mask in _TENSORS:
            tensors = (*tensors, mask)
    if sink is not None and bias is alibi_slopes is None:
        others, tensors, passed = "sink", (*tensors, sink), (*passed, sink)
    elif not (bias is sink is alibi_slopes is None):
        others = (bias is None, sink is None, alibi_slopes is None)
        tensors = (*tensors, *[t for t in (bias, sink, alibi_slopes) if t is not None])
        passed = (query, key, value, mask if bias is None else bias, *(() if sink is None else (sink,)))
    if tensors is not qkv:
        misaligned = (misaligned, *[t.data_ptr() & _ALIGNMENT_BITS for t in tensors[_QKV:]])
    words = (is_causal, causal_alignment, window, scale, softcap, dropout_p, layout, return_lse, backend)
    # Sizes are compared by the check of the tensors; what is read here only tells most kinds of calls apart.
    place = (query.numel(), key.numel(), misaligned, _records_gradients(), of_mask, others, words)
    return place, tensors, passed, keeper


def _of_mask(mask: Any, query: Tensor, key: Tensor, layout: str) -> tuple[object, Keeper | None]:
    """Return what stands for a mask in a place, and its keeper; None where nothing does."""
    if type(mask) is Tensor:
        if mask.dtype is not torch.bool:
            return _BIAS, None
        # Larger ones are read, and their route depends on what they are recognised as.
        if _pairs(query, key, layout) < INSPECT_THRESHOLD:
            return _UNREAD, None
    # Bands need no keeper, and are often made anew for each call.
    if type(mask) is Causal:
        return ("causal", mask.alignment), None
    if type(mask) is Window:
        return ("window", mask.left, mask.right, mask.alignment), None
    keeper = known_keeper(mask)
    if keeper is not None:
        return keeper.token, keeper
    return (NEW if isinstance(mask, Mask) else None), None


def of_form(place: Any, arguments: tuple[Any, ...]) -> object:
    """Return the place of all calls that differ in their mask object too, but not in what its route reads.

    Args:
        place: That of the call.
        arguments: Those of `attention()`.

    Returns:
        None where the route depends on values of the mask.
    """
    query, key, _, mask, *_, layout = arguments[: _LAYOUT + 1]
    form = []
    for node in mask.nodes:
        if type(node) is Dense and _pairs(query, key, layout) >= INSPECT_THRESHOLD:
            return None
        form.append(("dense", *tensor_key(node.tensor)) if type(node) is Dense else node.key())
    return (*place[:OF_MASK], tuple(form), *place[OF_MASK + 1 :])


def _pairs(query: Tensor, key: Tensor, layout: str) -> int:
    """Return how many pairs of a query and a key there are."""
    rows = -3 if layout == "bshd" else -2
    return query.shape[rows] * key.shape[rows]


def _of_sums(sums: Any, sums_kv: Any, longest: Any, longest_kv: Any) -> tuple[object, Keeper | None]:
    """Return what stands for sequences in a place, and the keeper of their sums; None where nothing does.

    Neither of two sums says enough, as in `routes`.
    """
    is_one = sums_kv is None or sums_kv is sums
    if not is_one or longest.__class__ not in _COUNTS or longest_kv.__class__ not in _COUNTS:
        return None, None
    keeper = known_keeper(sums)
    return (None if keeper is None else (keeper.token, longest, longest_kv)), keeper
