"""Checks of the arguments of mask and bias objects: each raises an `ArgumentError` that names the argument.

Nothing here imports torch: a tensor is recognised by its attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from attnroute.errors import argument_error
from attnroute.question import fits

if TYPE_CHECKING:
    from torch import Tensor


_ALIGNMENTS = ("top_left", "bottom_right")
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
"""The dtypes of whole numbers that torch can compare and add up."""
_TRACED = ("FakeTensor", "FunctionalTensor")
"""The classes of `masks.tracing.is_traced` by name, since nothing here imports torch."""


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a torch.Tensor."""
    return hasattr(value, "data_ptr")


def is_number(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer, or one that a tracer leaves open."""
    return isinstance(value, int) or type(value).__name__ == "SymInt"


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 0; True and False are none."""
    return is_number(value) and not isinstance(value, bool) and value >= 0


def is_readable(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting for a device.

    They lie on the CPU, and neither a tracer nor a functorch transform holds the tensor.
    """
    if tensor.device.type != "cpu" or type(tensor).__name__ in _TRACED:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        # A transform's tensor has no memory of its own.
        return False
    return True


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
    required = f"a {' or '.join(f'{n}-D' for n in dims)} integer tensor"
    if not is_tensor(tensor):
        raise argument_error(name, required, kind_of(tensor), "convert it")
    strided(name, tensor)
    if str(tensor.dtype).removeprefix("torch.") not in _INTEGERS or tensor.dim() not in dims:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise argument_error(name, required, got, "convert it" + (", e.g. to int64" if "uint" in got else ""))


def strided(name: str, tensor: Tensor) -> None:
    """A dense tensor with strides: neither nested nor sparse."""
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        got, to_do = "a nested or sparse one", "call to_dense() on a sparse one, pad a nested one"
        raise argument_error(name, "a dense strided tensor", got, to_do)


def is_plain_number(value: object) -> bool:
    """Return whether a value is a Python int or float; bools, tensors and NumPy's numbers are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def softcap(name: str, value: Any, kind: str = "number") -> None:
    """A cap by which kernels divide, as float32: not so small that it is 0 there, nor so large as no number.

    Args:
        name: The argument.
        value: What was given.
        kind: What it should be.
    """
    if not is_plain_number(value):
        got = repr(value) if value is None else kind_of(value)
        raise argument_error(name, f"a finite {kind} of at least 0", got, "pass 0.0 to switch it off")
    fits.cap(name, value, kind)


def kind_of(value: object) -> str:
    """Return the name of a value's type, for an error."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def at_least_two(name: str, tensor: Tensor) -> None:
    """A start and an end."""
    if tensor.shape[0] < 2:
        required = "at least two elements, a start and an end"
        raise argument_error(name, required, tensor.shape[0], "pass [0, seqlen] for one document")


def bools(name: str, tensor: Any, to_do: str) -> None:
    """A bool tensor."""
    if not (is_tensor(tensor) and str(tensor.dtype) == "torch.bool"):
        got = tensor.dtype if is_tensor(tensor) else kind_of(tensor)
        raise argument_error(name, "a bool tensor", got, to_do)
    strided(name, tensor)


def documents(
    lengths: tuple[int, ...] | None, per_token: Mapping[str, Tensor | None], extent: fits.Sizes
) -> None:
    """As many queries as keys, and lengths, or values per token, that fill them."""
    fits.documents(lengths, extent)
    seqlen = extent.seqlen_kv
    for name, tensor in per_token.items():
        if tensor is not None and tuple(tensor.shape) not in ((seqlen,), (1, seqlen), (extent.batch, seqlen)):
            required = f"shape ({seqlen},) or ({extent.batch}, {seqlen})"
            to_do = "give every token its " + ("position" if name == "position_ids" else "document's id")
            raise argument_error(f"mask Documents {name}", required, tuple(tensor.shape), to_do)


def document_sums(sums: Tensor, seqlen: int) -> None:
    """Sums that rise from 0 to the sequence length; those that lie on a device are not read."""
    if is_readable(sums) and not _rise(values := sums.tolist(), seqlen):
        required = f"sums that rise from 0 to seqlen = {seqlen}"
        to_do = "add the missing tokens as a document of their own"
        raise argument_error("mask Documents cu_seqlens", required, values, to_do)


def sequence_sums(name: str, sums: Tensor, total: int) -> None:
    """Sums that rise from 0 to a number of tokens; those that lie on a device are not read."""
    if is_readable(sums) and not _rise(values := sums.tolist(), total):
        required = f"prefix sums that rise from 0 to the {total} tokens there are"
        raise argument_error(name, required, values, "pass 0 and then the end of each sequence")


def longest(name: str, bound: int | None, sums: Tensor) -> None:
    """A bound that no sequence is longer than; sums that lie on a device are not read."""
    if bound is None or not is_readable(sums):
        return
    found = int(sums.diff().max())
    if bound < found:
        to_do = "correct it, or leave it out"
        raise argument_error(name, f"at least the longest sequence ({found})", bound, to_do)


def _rise(values: list[int], total: int) -> bool:
    return values == sorted(values) and (values[0], values[-1]) == (0, total)


def key_padding(
    given: Mapping[str, Sequence[int] | Tensor | None],
    keep: Tensor | None,
    extent: fits.Sizes,
    *,
    node: str = "KeyPadding",
) -> None:
    """One entry per batch row, and a count no larger than seqlen_kv."""
    for name, value in given.items():
        if isinstance(value, tuple):
            fits.counts(f"{node} {name}", value, extent)
        elif value is not None:
            fits.entries(f"{node} {name}", len(value), extent)
    full = (extent.batch, extent.seqlen_kv)
    if keep is not None and tuple(keep.shape) != full:
        to_do = "pass one bool per key and batch row"
        raise argument_error("mask KeyPadding keep", f"shape {full}", tuple(keep.shape), to_do)


def function(name: str, value: object) -> None:
    """Something that can be called."""
    if not callable(value):
        raise argument_error(name, "a function", type(value).__name__, "pass a mask_mod or score_mod")


def blocks(value: Any) -> None:
    """A BlockMask of torch, recognised by its attributes."""
    if not all(hasattr(value, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod")):
        to_do = "make one with create_block_mask, or pass the function as masks.Function(mask_mod)"
        raise argument_error("mask Blocks", "a BlockMask of torch", type(value).__name__, to_do)


def block_lengths(mask: Any) -> tuple[int, int]:
    """Return the lengths that a BlockMask was made for; the first releases of it only know whole blocks."""
    lengths = getattr(mask, "seq_lengths", None)
    seqlen_q, seqlen_kv = mask.shape[-2:] if lengths is None else lengths
    return int(seqlen_q), int(seqlen_kv)


def block_mask(mask: Any, extent: fits.Sizes) -> None:
    """Lengths, batch and heads of a BlockMask must be those of the call, batch and heads of 1 aside."""
    fits.blocks(block_lengths(mask), extent)
    full = (extent.batch, extent.num_heads_q)
    if any(n not in (1, m) for n, m in zip(mask.shape[:2], full, strict=True)):
        required = f"a BlockMask for 1 or {full[0]} batch rows and 1 or {full[1]} heads"
        raise argument_error("mask", required, tuple(mask.shape[:2]), "make one for this batch and heads")
