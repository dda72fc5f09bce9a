"""`make_mask`, the mask function that transformers calls once per forward pass and kind of layer."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.integrations.transformers.graph_mask import existing, graph_mask
from attnroute.integrations.transformers.mask_functions import MaskFunction, Reading, read
from attnroute.integrations.transformers.pattern import Pattern
from attnroute.masks.tracing import is_traced


def refuse_old_transformers() -> None:
    """Raise an ImportError where transformers passes no query lengths and offsets to a mask function."""
    missing = {"q_length", "q_offset"} - set(signature(sdpa_mask).parameters)
    if missing:
        from transformers import __version__

        msg = (
            "The transformers integration requires mask functions with q_length and q_offset, which "
            f"transformers has from 5.4 on; got {__version__}; install a newer one."
        )
        raise ImportError(msg)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return who may attend, with the meaning of transformers' `sdpa_mask`.

    Args:
        batch_size: Batch size.
        q_length: Queries.
        kv_length: Keys, cached ones included.
        q_offset: Position of the first query; a tensor for static caches.
        kv_offset: Position of the first key.
        mask_function: Returns for index tensors (batch, head, query, key) who may attend.
        attention_mask: Bool tensor (batch, positions), False for padding.
        allow_is_causal_skip: False also means, for a single query, that a compiled step may take the mask.
        allow_is_bidirectional_skip: None may be returned where nothing is masked.
        device: Where the mask lies.
        **kwargs: What else transformers passes to every mask function; `sdpa_mask` gets it for dense masks.

    Returns:
        A `CarriedMask` where the mask is known as an object, else a bool tensor (batch_size, 1, q_length,
        kv_length), True = attend. None for a mask without any False, only where that is allowed or one query
        is all there is: then nothing is left open, unless a module has a window. None also in a graph, for
        the causal mask of as many queries as keys, where `allow_is_causal_skip` says that modules know it.
        The tensor of a graph may stand for a mask object, as `graph_mask` says.
    """
    sizes = (batch_size, q_length, kv_length)
    pattern = None
    # Values of a traced tensor cannot be read, and without reading them nothing is certain. A compiled step
    # of decoding takes masks as inputs of one form, and one row costs next to nothing.
    traced = is_tracing(attention_mask) or (isinstance(q_offset, Tensor) and is_tracing(q_offset))
    # A graph cannot make a `CarriedMask`, and no mask is the other way to have none of seqlen x seqlen.
    plain = allow_is_causal_skip and mask_function is causal_mask_function and attention_mask is None
    if traced and plain and _needs_no_mask(q_length, kv_length, q_offset, kv_offset, kwargs.get("config")):
        return None
    if is_compiling():
        known = graph_mask(sizes, q_offset, kv_offset, mask_function, attention_mask, device)
        if known is not None:
            return known
    unread = not traced and (_is_unread(attention_mask) or _is_unread(q_offset))
    if not traced and not unread and (q_length > 1 or allow_is_causal_skip):
        pattern = _pattern(sizes, q_offset, kv_offset, mask_function, attention_mask)
    if pattern is None:
        dense: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and not unread,
            # A module that sees no mask guesses the alignment; a mask states it.
            **{**kwargs, "allow_is_causal_skip": False},
        )
        return dense
    # A mask with a window stays, for its modules pass the window on and would ask what it means without a
    # mask.
    if pattern.left is None and pattern.is_full:
        alone = q_length == 1 and _has_no_window(kwargs.get("config"))
        if alone or allow_is_bidirectional_skip:
            return None
    return CarriedMask.carry(pattern, device)


def _needs_no_mask(
    q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, config: object
) -> bool:
    """Whether a causal module that gets no mask in a graph means exactly the causal mask.

    It does where queries and keys are the same tokens, which leaves no alignment open, and where one query
    attends all keys.
    """
    if isinstance(q_offset, Tensor):
        return False
    if q_length == 1:
        return _has_no_window(config) and q_offset - kv_offset + 1 == kv_length
    return q_length == kv_length and q_offset == kv_offset


def _has_no_window(config: object) -> bool:
    """Whether no module of a model has a window, and so asks for a mask of a single query."""
    return config is not None and getattr(config, "sliding_window", None) is None


def _is_unread(value: object) -> bool:
    """Whether a tensor's values cannot be read: it is fake, on the meta device, or mapped by torch.vmap."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - torch has no public question
    return isinstance(value, Tensor) and (is_traced(value) or bool(wrapped(value)))


def _pattern(
    sizes: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    function: MaskFunction,
    padding: Tensor | None,
) -> Pattern | None:
    """Return the mask as a pattern, or None where it is not known for certain to be one."""
    reading = read(function)
    if reading is None or min(sizes) < 1:
        return None
    if isinstance(q_offset, Tensor):
        # Reading the tensor waits for the device, once per prompt, and is not worth it for a single token.
        if sizes[1] == 1:
            return None
        q_offset = int(q_offset)
    band = Pattern(*sizes, q_offset - kv_offset, reading.left, reading.right)
    if reading.ids is not None or reading.positions is not None:
        if padding is not None or q_offset or kv_offset:
            return None
        if _is_unread(reading.ids) or _is_unread(reading.positions):
            return None
        return _with_documents(band, reading)
    return band if padding is None else _with_padding(band, padding, kv_offset)


def _with_padding(band: Pattern, padding: Tensor, kv_offset: int) -> Pattern | None:
    if padding.dtype != torch.bool or padding.dim() != 2 or padding.shape[0] != band.batch:
        return None
    keep = existing(padding, kv_offset, band.kv_length)
    in_reach = keep[:, slice(*band.keys)]
    if band.q_length == 1:
        # Kernels take the flags of one row as they are, and at which side they lie is not worth a look.
        return band if bool(in_reach.all()) else replace(band, keep=keep)
    all_exist, at_left, at_right = _ends(in_reach)
    if all_exist:
        return band
    return replace(band, keep=keep, padding_side="left" if at_left else "right" if at_right else None)


def _ends(keep: Tensor) -> list[bool]:
    """Return whether all keys exist, and whether the missing ones are all at the left, or all at the right.

    All of it costs one wait for the device.
    """
    before, after = keep[:, :-1], keep[:, 1:]
    found: list[bool] = torch.stack([keep.all(), (after >= before).all(), (before >= after).all()]).tolist()
    return found


def _with_documents(band: Pattern, reading: Reading) -> Pattern | None:
    """Add packed documents. Where the band counts in positions, they must go up by one in each document."""
    ids, shape = reading.ids, (band.batch, band.q_length)
    if ids is None or ids.shape != shape or band.q_length != band.kv_length:
        return None
    same = ids[:, 1:] == ids[:, :-1]
    steps = torch.ones_like(same)
    if reading.positions is not None:
        if reading.positions.shape != shape:
            return None
        steps = reading.positions[:, 1:] - reading.positions[:, :-1] == 1
    ascending = ids[:, 1:] >= ids[:, :-1]
    same, sound = torch.stack([same, ascending & (steps | ~same)]).cpu()
    if reading.positions is not None and not bool(sound.all()):
        return None
    sums = _cu_seqlens(same[0]) if band.batch == 1 and bool(sound.all()) else None
    if sums is not None and len(sums) == 2:
        return band
    return replace(band, ids=ids, cu_seqlens=sums)


def _cu_seqlens(same: Tensor) -> Tensor:
    """Prefix sums of the documents of one row, given which tokens belong with the one before them."""
    starts = [at + 1 for at, joined in enumerate(same.tolist()) if not joined]
    return torch.tensor([0, *starts, len(same) + 1], dtype=torch.int32)
