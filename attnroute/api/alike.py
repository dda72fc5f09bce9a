"""Under what the short way keeps a call: what tells kinds of calls apart, in few reads of the arguments."""

from __future__ import annotations

from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.api.lengths import kind_of_padding
from attnroute.api.records import Given
from attnroute.masks import Causal, Dense, Mask, Window
from attnroute.masks.kept import Keeper, known_keeper
from attnroute.masks.layout import tensor_key
from attnroute.masks.recognition.summary import INSPECT_THRESHOLD

OF_MASK: Final = 4
"""Where a place has the mask."""
_ALIGNMENT_BITS: Final = 15
_NUMBER_OF_BITS: Final = 4
NEW: Final = "a new mask"
"""In the place of a mask object of which nothing is kept; nothing may be kept under it."""
_BIAS: Final = "a bias"
_UNREAD: Final = "a mask"
"""In the place of a tensor whose values no route depends on: its form is compared as those of others are."""
_PLAIN: Final = (None, 0, 0, "bhsd", False, None)
"""Words that say nothing, and need not be the objects that the defaults are."""
_QKV: Final = 3
_NUMBERS: Final = frozenset({float, int, type(None)})
"""Types of numbers that mean the same where they are equal; True would be an error."""
_COUNTS: Final = frozenset({int, type(None)})
_records_gradients = torch.is_grad_enabled
# Found here, a method takes a fifth less of the time of its call.
_address, _number_of = Tensor.data_ptr, Tensor.numel


Alike = tuple[Any, tuple[Any, ...], Keeper | None]
"""Under what a call is kept (None: it goes the long way), its tensors but those of a mask that has a keeper,
and that keeper, or that of the sums of its sequences."""
_NOWHERE: Final[Alike] = (None, (), None)
_USUAL: Final = ("query", "key", "value", "mask", "bias", "sink", "is_causal", "window", "scale")
_DEFAULTS: Final = tuple(Given._field_defaults[name] for name in Given._fields if name not in _USUAL)


def apart(given: Given) -> tuple[Any, ...]:
    """Return the arguments of a call as `alike` takes them."""
    query, key, value, mask, bias, is_causal, alignment, window, scale, softcap, sink, *others = given
    rest = (alignment, softcap, *others)
    is_usual = all(map(is_, rest, _DEFAULTS))
    return query, key, value, mask, bias, sink, is_causal, window, scale, None if is_usual else rest


def together(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    sink: Any,
    is_causal: Any,
    window: Any,
    scale: Any,
    rest: tuple[Any, ...] | None,
) -> Given:
    """Return the call that was taken `apart`."""
    alignment, softcap, *others = rest or _DEFAULTS
    return Given(query, key, value, mask, bias, is_causal, alignment, window, scale, softcap, sink, *others)


def alike(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    sink: Any,
    is_causal: Any,
    window: Any,
    scale: Any,
    rest: tuple[Any, ...] | None,
) -> Alike:
    """Return what the arguments of `attention()` have in common with others that differ in values alone.

    Every call waits for this.

    Args:
        query: As for `attention`.
        key: As for `attention`.
        value: As for `attention`.
        mask: As for `attention`.
        bias: As for `attention`.
        sink: As for `attention`.
        is_causal: As for `attention`.
        window: As for `attention`.
        scale: As for `attention`.
        rest: Every other argument in the order of `Given`; None where each has its default.

    Raises:
        AttributeError, IndexError, RuntimeError, TypeError: An argument is malformed.
    """
    if (
        # The check in C++ takes each tensor once.
        query is key
        or key is value
        or value is query
        or (is_causal is not False and is_causal is not True)
        or (scale is not None and scale.__class__ not in _NUMBERS)
        or (window is not None and not _COUNTS.issuperset(map(type, window)))
    ):
        return _NOWHERE
    words = of_mask = keeper = slopes = None
    layout = "bhsd"
    if rest is not None:
        of_rest = _of_rest(rest, is_masked=not (mask is bias is None))
        if of_rest is None:
            return _NOWHERE
        words, layout, slopes, of_mask, keeper = of_rest
    qkv = (query, key, value)
    tensors: tuple[Any, ...] = qkv
    if mask is not None:
        of_mask, keeper = _of_mask(mask, query, key, layout)
        if of_mask is None:
            return _NOWHERE
        if of_mask is _UNREAD or of_mask is _BIAS:
            tensors = (*qkv, mask)
    others = 0
    if bias is not None:
        others, tensors = 1, (*tensors, bias)
    if sink is not None:
        others, tensors = others + 2, (*tensors, sink)
    if slopes is not None:
        others, tensors = others + 4, (*tensors, slopes)
    misaligned = (_address(query) | _address(key) | _address(value)) & _ALIGNMENT_BITS
    if tensors is not qkv:
        for tensor in tensors[_QKV:]:
            misaligned = (misaligned << _NUMBER_OF_BITS) | (_address(tensor) & _ALIGNMENT_BITS)
    # Sizes are compared by the check of the tensors; what is read here only tells most kinds of calls apart.
    place = (
        _number_of(query),
        _number_of(key),
        misaligned,
        _records_gradients(),
        of_mask,
        others,
        is_causal,
        window,
        scale,
        words,
    )
    return place, tensors, keeper


def _of_rest(
    rest: tuple[Any, ...], *, is_masked: bool
) -> tuple[object, Any, Any, object, Keeper | None] | None:
    """Return what few calls have: what stands for it in a place, layout, slopes, and as `_of_sums` returns.

    None where the call goes the long way.
    """
    (
        alignment,
        softcap,
        slopes,
        dropout_p,
        layout,
        sums,
        sums_kv,
        longest,
        longest_kv,
        deterministic,
        return_lse,
        backend,
        prefer,
    ) = rest
    if (
        deterministic is not None
        or prefer is not None
        or softcap.__class__ not in _NUMBERS
        or dropout_p.__class__ not in _NUMBERS
        or return_lse.__class__ is not bool
    ):
        return None
    words: object = (alignment, softcap, dropout_p, layout, return_lse, backend)
    if words == _PLAIN:
        words = None
    if layout != "thd":
        has_sums = not (sums is sums_kv is longest is longest_kv is None)
        return None if has_sums else (words, layout, slopes, None, None)
    # The sums of sequences take the place of a mask.
    of_sums, keeper = _of_sums(sums, sums_kv, longest, longest_kv)
    return None if is_masked or keeper is None else (words, layout, slopes, of_sums, keeper)


def _of_mask(mask: Any, query: Tensor, key: Tensor, layout: str) -> tuple[object, Keeper | None]:
    """Return what stands for a mask in a place, and its keeper; None where nothing does."""
    if type(mask) is Tensor:
        if mask.dtype is not torch.bool:
            return _BIAS, None
        # One that is not broadcast says itself how many pairs there are, or it is no mask of the call.
        rows, keys = mask.shape[-2:] if mask.dim() > 1 else (1, 1)
        pairs = rows * keys if rows > 1 and keys > 1 else _pairs(query, key, layout)
        # Larger ones are read, and their route depends on what they are recognised as.
        if pairs < INSPECT_THRESHOLD:
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


def of_form(place: Any, given: Given) -> object:
    """Return the place of all calls that differ in their mask object too, but not in what its route reads.

    Args:
        place: That of the call.
        given: Its arguments.

    Returns:
        None where the route depends on values of the mask.
    """
    mask: Any = given.mask
    query, key, layout = given.query, given.key, given.layout
    form = []
    for node in mask.nodes:
        if type(node) is Dense and _pairs(query, key, layout) >= INSPECT_THRESHOLD:
            return None
        form.append(("dense", *tensor_key(node.tensor)) if type(node) is Dense else node.key())
    return (*place[:OF_MASK], tuple(form), *place[OF_MASK + 1 :])


def of_any_keys(place: Any, mask: Any) -> object:
    """Return a place without the elements of keys, with the kind of a mask in place of the mask itself."""
    of_mask = None if mask is None else kind_of_padding(mask)
    return (place[0], *place[2:OF_MASK], of_mask, *place[OF_MASK + 1 :])


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
