"""One call cut along batch or heads, for kernels whose launch grid has a limit there.

What reads a batch row or a head by its number, a predicate or a score_mod, is called with the number that it
has in the whole call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import LoweredMask, MaskFunction, as_4d
from attnroute.masks.lowered.mods import scalar

if TYPE_CHECKING:
    from torch import Tensor

BATCH, HEADS = 0, 1


class Cut(NamedTuple):
    """Batch rows or query heads [start, stop).

    Attributes:
        axis: `BATCH` or `HEADS`.
        start: The first one.
        stop: The one after the last.
    """

    axis: int
    start: int
    stop: int

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """Cut a tensor that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv)."""
        return None if tensor is None else self._narrowed(as_4d(tensor), self.axis)

    def of_rows(self, tensor: Tensor | None) -> Tensor | None:
        """Cut a tensor (batch or 1, ...)."""
        return tensor if tensor is None or self.axis != BATCH else self._narrowed(tensor, 0)

    def of_heads(self, tensor: Tensor | None) -> Tensor | None:
        """Cut a tensor (num_heads_q,) or (batch, num_heads_q)."""
        if tensor is None or (self.axis == BATCH and tensor.dim() == 1):
            return tensor
        return self._narrowed(tensor, self.axis - 2 if tensor.dim() > 1 else 0)

    def _narrowed(self, tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim]
        return tensor if size == 1 else tensor.narrow(dim, self.start, self.stop - self.start)


def pieces(inputs: Inputs, axis: int, limit: int) -> Iterator[Inputs]:
    """Yield the inputs of each piece, in order.

    Args:
        inputs: Of the whole call.
        axis: `BATCH` or `HEADS`; query heads that share a key head stay together.
        limit: Batch rows or query heads of a piece, more only where one key head has more.
    """
    size_q, size_kv = inputs.query.shape[axis], inputs.key.shape[axis]
    group = max(1, size_q // max(1, size_kv))
    step = max(1, limit // group)
    for first in range(0, size_kv, step):
        number = min(step, size_kv - first)
        yield _piece(inputs, Cut(axis, first * group, (first + number) * group), first, number)


def _piece(inputs: Inputs, cut: Cut, first_kv: int, number_kv: int) -> Inputs:
    mod, axis = inputs.score_mod, cut.axis
    return replace(
        inputs,
        query=inputs.query.narrow(axis, cut.start, cut.stop - cut.start),
        key=inputs.key.narrow(axis, first_kv, number_kv),
        value=inputs.value.narrow(axis, first_kv, number_kv),
        mask=cut_mask(inputs.mask, cut, inputs.query.device),
        keeper=None,
        bias=cut.of(inputs.bias),
        sink=cut.of_heads(inputs.sink),
        alibi_slopes=cut.of_heads(inputs.alibi_slopes),
        score_mod=None if mod is None else _shifted(mod, cut, inputs.query.device, place=1),
    )


def cut_mask(mask: LoweredMask, cut: Cut, device: Any) -> LoweredMask:
    """Return the mask of a piece. Bands and sums of documents are the same for every row and head."""
    return replace(
        mask,
        key_keep=cut.of_rows(mask.key_keep),
        key_counts=cut.of_rows(mask.key_counts),
        document_ids_q=cut.of_rows(mask.document_ids_q),
        document_ids_kv=cut.of_rows(mask.document_ids_kv),
        dense=cut.of(mask.dense),
        either=tuple(tuple(cut_mask(m, cut, device) for m in alternatives) for alternatives in mask.either),
        exclude=tuple(cut_mask(m, cut, device) for m in mask.exclude),
        functions=tuple(_function(f, cut, device) for f in mask.functions),
        sparse=tuple(_blocks(b, cut, device) for b in mask.sparse),
    )


def _function(function: MaskFunction, cut: Cut, device: Any) -> MaskFunction:
    if not (function.per_batch, function.per_head)[cut.axis]:
        return function
    return replace(function, mask_mod=_shifted(function.mask_mod, cut, device))


def _shifted(function: Callable[..., Tensor], cut: Cut, device: Any, place: int = 0) -> Callable[..., Tensor]:
    """Return a function of a piece's numbers, for one of the whole call's; batch is its argument `place`."""
    if cut.start == 0:
        return function
    at, first = place + cut.axis, scalar(cut.start, device)

    def in_piece(*given: Tensor) -> Tensor:
        return function(*given[:at], given[at] + first, *given[at + 1 :])

    return in_piece


def _blocks(block_mask: Any, cut: Cut, device: Any) -> Any:
    """Cut a BlockMask of torch, which forgets its predicate when it is indexed."""
    if block_mask.shape[cut.axis] == 1:
        return block_mask
    lists = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    given = {name: getattr(block_mask, name) for name in lists}
    make = type(block_mask).from_kv_blocks
    lengths = {"seq_lengths"} & set(inspect.signature(make).parameters)
    return make(
        **{
            n: None if t is None else t.narrow(cut.axis, cut.start, cut.stop - cut.start)
            for n, t in given.items()
        },
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=_shifted(block_mask.mask_mod, cut, device),
        **{name: getattr(block_mask, name) for name in lengths},
    )
