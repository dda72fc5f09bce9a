"""What the arguments of mask objects must be: each check raises one sentence that names the argument.

Nothing here imports torch: a tensor is told by what it can do.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from attnroute.errors import argument_error

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.masks.nodes import Extent

_ALIGNMENTS = ("top_left", "bottom_right")


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Tell a torch.Tensor from a sequence."""
    return hasattr(value, "data_ptr")


def alignment(value: str) -> None:
    """The corner in which a diagonal ends."""
    if value not in _ALIGNMENTS:
        to_do = "state which corner the diagonal ends in"
        raise argument_error("alignment", 'one of "top_left" and "bottom_right"', repr(value), to_do)


def counts(name: str, values: Any) -> tuple[int, ...]:
    """Return whole numbers of at least 0 as a tuple."""
    try:
        found = tuple(operator.index(n) for n in values)
    except TypeError:
        raise argument_error(name, "a sequence of counts", repr(values), "pass a list of ints") from None
    if any(n < 0 for n in found):
        raise argument_error(name, "counts of at least 0", found, "pass how many tokens there are")
    return found


def integers(name: str, tensor: Any, dims: tuple[int, ...]) -> None:
    """A tensor of whole numbers with so many dimensions."""
    required = f"an integer tensor with {' or '.join(map(str, dims))} dimensions"
    if not is_tensor(tensor):
        raise argument_error(name, required, type(tensor).__name__, "convert it")
    if tensor.is_floating_point() or str(tensor.dtype) == "torch.bool" or tensor.dim() not in dims:
        raise argument_error(name, required, f"{tensor.dtype} of shape {tuple(tensor.shape)}", "convert it")


def bools(name: str, tensor: Any, to_do: str) -> None:
    """A bool tensor."""
    if not (is_tensor(tensor) and str(tensor.dtype) == "torch.bool"):
        got = tensor.dtype if is_tensor(tensor) else type(tensor).__name__
        raise argument_error(name, "a bool tensor", got, to_do)


def documents(lengths: tuple[int, ...] | None, ids: Tensor | None, extent: Extent) -> None:
    """Documents need as many queries as keys, and lengths that fill them."""
        if extent.seqlen_q != extent.seqlen_kv:
            raise argument_error(
                "mask Documents",
                "as many queries as keys",
                f"seqlen_q = {extent.seqlen_q}, seqlen_kv = {extent.seqlen_kv}",
                "pass a dense bool mask for cached decoding of packed documents",
            )
        if lengths is not None and sum(lengths) != extent.seqlen_kv:
            raise argument_error(
                "mask Documents lengths",
                f"a sum of seqlen = {extent.seqlen_kv}",
                f"{lengths} with sum {sum(lengths)}",
                "add the missing tokens as a document of their own",
            )
        if ids is not None and tuple(ids.shape) not in (
            (extent.seqlen_kv,),
            (1, extent.seqlen_kv),
            (extent.batch, extent.seqlen_kv),
        ):
            raise argument_error(
                "mask Documents ids",
                f"shape ({extent.seqlen_kv},) or ({extent.batch}, {extent.seqlen_kv})",
                tuple(ids.shape),
                "give every token the id of its document",
            )


def key_padding(
    given: Mapping[str, tuple[int, ...] | Tensor | None], keep: Tensor | None, extent: Extent
) -> None:
    """There must be one entry per batch row, and a key count no larger than seqlen_kv."""
        for name in ("lengths", "left"):
            value = getattr(self, name)
            if value is not None and len(value) != extent.batch:
                raise argument_error(
                    f"mask KeyPadding {name}", f"one entry per batch row ({extent.batch})", len(value), "pass one count per row"
                )
            if isinstance(value, tuple) and any(n < 0 or n > extent.seqlen_kv for n in value):
                raise argument_error(
                    f"mask KeyPadding {name}",
                    f"counts from 0 to seqlen_kv = {extent.seqlen_kv}",
                    value,
                    "count keys, not queries",
                )
        if keep is not None and tuple(keep.shape) != (extent.batch, extent.seqlen_kv):
            raise argument_error(
                "mask KeyPadding keep",
                f"shape ({extent.batch}, {extent.seqlen_kv})",
                tuple(keep.shape),
                "pass one bool per key and batch row",
            )

