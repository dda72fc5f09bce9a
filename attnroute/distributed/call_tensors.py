"""Goes through the tensors of a call, wherever they stand in it, and knows what their dimensions count."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from attnroute.biases import Bias
from attnroute.biases import Function as BiasFunction
from attnroute.distributed.sharding import BATCH, HEAD_DIM, HEADS, KV_HEADS, REST, TOKENS
from attnroute.errors import argument_error
from attnroute.masks.objects.arbitrary import Function as MaskFunction
from attnroute.masks.objects.base import Mask

if TYPE_CHECKING:
    from attnroute.api.records import Given

INPUTS: Final = ("query", "key", "value")
_FUNCTIONS: Final = ("Function", "Blocks", "BlockMask")
"""Masks and biases that are functions of indices."""
LAYOUTS: Final = {
    "bhsd": (BATCH, HEADS, TOKENS, HEAD_DIM),
    "bshd": (BATCH, TOKENS, HEADS, HEAD_DIM),
    "thd": (TOKENS, HEADS, HEAD_DIM),
}
_SCORES: Final = (BATCH, HEADS, REST, REST)
_OTHERS: Final = {
    "sink": (HEADS,),
    "alibi_slopes": (BATCH, HEADS),
    "cu_seqlens_q": (REST,),
    "cu_seqlens_kv": (REST,),
}
"""What the dimensions of other arguments count; of fewer ones the last, as they broadcast."""
_IN_OBJECTS: Final = {
    ("Dense", "tensor"): _SCORES,
    ("ALiBi", "slopes"): (BATCH, HEADS),
    ("Documents", "cu_seqlens"): (REST,),
    ("Documents", "ids"): (BATCH, REST),
    ("Documents", "position_ids"): (BATCH, REST),
    ("KeyPadding", "keep"): (BATCH, REST),
    ("KeyPadding", "left"): (BATCH,),
    ("KeyPadding", "lengths"): (BATCH,),
    ("PrefixLM", "lengths"): (BATCH,),
    ("Ragged", "cu_seqlens"): (REST,),
    ("Ragged", "cu_seqlens_kv"): (REST,),
}
"""The same of what mask and bias objects hold, tensors and counts of batch rows."""
Change = Callable[[str, Any, tuple[str, ...]], Any]
"""Gets the name of a tensor, the tensor, and what its dimensions count; returns what takes its place."""


def axes_of_input(name: str, layout: str) -> tuple[str, ...]:
    """Return what the dimensions of query, key or value count."""
    axes = LAYOUTS[layout]
    return axes if name == "query" else tuple(KV_HEADS if axis == HEADS else axis for axis in axes)


def changed(given: Given, change: Change) -> Given:
    """Return a call with each of its tensors changed, always in the same order."""
    changes: dict[str, Any] = {}
    for name, tensor in zip(INPUTS, given[:3], strict=True):
        changes[name] = change(name, tensor, axes_of_input(name, given.layout))
    for name, axes in _OTHERS.items():
        value = getattr(given, name)
        if value is not None:
            changes[name] = change(name, value, axes)
    changes["mask"] = changed_object("mask", given.mask, change)
    changes["bias"] = changed_object("bias", given.bias, change)
    return given._replace(**changes)


def changed_object(name: str, value: Any, change: Change) -> Any:
    """Return a mask or bias with its tensors and its counts of batch rows changed; itself where none is."""
    kind = type(value).__name__
    if value is None or kind == "CausalBias":
        return value
    if isinstance(value, Tensor):
        return change(name, value, _SCORES)
    if kind in _FUNCTIONS or not is_dataclass(value):
        return change(f"{name} {kind}", value, ())
    old = [getattr(value, field.name) for field in fields(value)]
    new = []
    for field, part in zip(fields(value), old, strict=True):
        axes = _IN_OBJECTS.get((kind, field.name))
        if part is not None and axes is not None:
            new.append(change(f"{name} {kind} {field.name}", part, axes))
        elif isinstance(part, Mask | Bias):
            new.append(changed_object(name, part, change))
        elif isinstance(part, tuple) and part and isinstance(part[0], Mask | Bias):
            inner = tuple(changed_object(name, one, change) for one in part)
            new.append(part if all(map(operator.is_, inner, part)) else inner)
        else:
            new.append(part)
    kind_of: Any = type(value)
    return value if all(map(operator.is_, new, old)) else kind_of(*new)


def check_function(name: str, function: Any, splits: tuple[str | None, ...]) -> None:
    """Refuse a BlockMask with blocks for each row or head where the call is split along these.

    Raises:
        ArgumentError: It is one.
    """
    blocks = getattr(function, "block_mask", function)
    for split, size in zip((BATCH, HEADS), getattr(blocks, "shape", ())[:2], strict=False):
        if split in splits and size != 1:
            required = f"blocks that are the same along the {split}, where the call is split"
            to_do = "make it with B=None and H=None, or pass masks.Function of its mask_mod"
            raise argument_error(name, required, f"{size} of them", to_do)


def from_row_and_head(function: Any, row: int, head: int) -> Any:
    """Return a mask or bias function that is asked with a process's own indices; another object as it is.

    Args:
        function: A `Function` of masks or biases.
        row: The first batch row of the process.
        head: Its first query head.
    """
    if isinstance(function, MaskFunction):
        mask_mod = function.mask_mod
        reads = (row and function.per_batch) or (head and function.per_head)
        shifted = lambda b, h, q, k: mask_mod(b + row, h + head, q, k)  # noqa: E731 - torch traces it.
        return replace(function, mask_mod=shifted) if reads else function
    if isinstance(function, BiasFunction) and (row or head):
        score_mod = function.score_mod
        return BiasFunction(lambda score, b, h, q, k: score_mod(score, b + row, h + head, q, k))
    return function
