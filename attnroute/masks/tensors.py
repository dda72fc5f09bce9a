"""What masks do with tensors: materialise, look into dense masks, keep what was prepared for them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnroute.call import CausalNode, DenseNode
from attnroute.errors import argument_error
from attnroute.masks import checks

if TYPE_CHECKING:
    from attnroute.masks.lowered import LoweredMask
    from attnroute.masks.nodes import Documents, Extent, KeyPadding
    from attnroute.vocabulary import EmptyRows

ALIGN = 8
"""Elements. EFFICIENT needs row strides of 16 bytes at 16 bit; stock SDPA pads to the same multiple."""
LOOK_THRESHOLD = 256 * 256
"""Elements of seqlen_q * seqlen_kv below which a look costs more than a dense mask does."""
_LOOK_CHUNK = 2**24
_MATRIX_DIMS = 2
_DIMS = 4
_T = TypeVar("_T")


def materialize(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as a bool tensor (batch or 1, heads or 1, seqlen_q, seqlen_kv), True = attend."""
    shape = (1, 1, extent.seqlen_q, extent.seqlen_kv)
    allowed = build(lowered, extent)
    return allowed.expand(torch.broadcast_shapes(tuple(allowed.shape), shape))


def build(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as the smallest bool tensor that broadcasts to it: key padding has one row."""
    parts = [p for p in (_band(lowered, extent), _same_document(lowered), lowered.dense) if p is not None]
    if lowered.key_keep is not None:
        parts.append(lowered.key_keep[:, None, None, :])
    if not parts:
        return torch.ones((1, 1, 1, extent.seqlen_kv), dtype=torch.bool, device=extent.device)
    allowed = parts[0]
    for part in parts[1:]:
        allowed = allowed & part
    return allowed


def _band(lowered: LoweredMask, extent: Extent) -> Tensor | None:
    if lowered.band_lo is None and lowered.band_hi is None:
        return None
    rows = torch.arange(extent.seqlen_q, device=extent.device)[:, None]
    columns = torch.arange(extent.seqlen_kv, device=extent.device)[None]
    if lowered.band_hi is None:
        return (columns >= rows + (lowered.band_lo or 0))[None, None]
    below = columns <= rows + lowered.band_hi
    return (below if lowered.band_lo is None else below & (columns >= rows + lowered.band_lo))[None, None]


def _same_document(lowered: LoweredMask) -> Tensor | None:
    if lowered.document_ids_q is None or lowered.document_ids_kv is None:
        return None
    return lowered.document_ids_q[:, None, :, None] == lowered.document_ids_kv[:, None, None, :]


def additive(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return mask and bias as one additive tensor, 0 or the bias where allowed and -inf elsewhere.

    The storage is padded so that every row starts at a multiple of `ALIGN` elements. Differentiable in
    `bias`.
    """
    if allowed is None:
        if bias is None:
            msg = "additive() requires a mask or a bias."
            raise ValueError(msg)
        return aligned(bias.to(dtype))
    if _is_followed(allowed, bias):
        start = torch.zeros((), dtype=dtype, device=allowed.device) if bias is None else bias.to(dtype)
        return aligned(start.masked_fill(~allowed, -math.inf))
    shape = tuple(allowed.shape) if bias is None else torch.broadcast_shapes(allowed.shape, bias.shape)
    target = aligned_empty(shape, dtype, allowed.device)
    if bias is None:
        target.fill_(-math.inf)
        return target.masked_fill_(allowed, 0.0)
    return target.copy_(bias.detach()).masked_fill_(~allowed, -math.inf)


def _is_followed(allowed: Tensor, bias: Tensor | None) -> bool:
    """Return whether a gradient, forward-mode duals or a functorch transform must see each step."""
    if bias is not None and (
        (bias.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0
    ):
        return True
    return any(is_wrapped(t) for t in (allowed, bias) if t is not None)


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a functorch transform holds this tensor, which then has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # type: ignore[attr-defined]


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised storage whose rows start at multiples of `ALIGN` elements."""
    width = -(-shape[-1] // ALIGN) * ALIGN
    return torch.empty((*shape[:-1], width), dtype=dtype, device=device)[..., : shape[-1]]


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself when its rows are aligned, else a differentiable copy that is."""
    if tensor.dim() == 0 or is_wrapped(tensor) or (is_aligned(tensor) and tensor.stride(-1) == 1):
        return tensor
    pad = -tensor.shape[-1] % ALIGN
    copy = torch.nn.functional.pad(tensor, (0, pad)) if pad else tensor.contiguous()
    if copy.data_ptr() == tensor.data_ptr():
        copy = tensor.clone(memory_format=torch.contiguous_format)
    return copy[..., : tensor.shape[-1]]


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows, heads and batches start at multiples of `ALIGN` elements, and all at 16 bytes."""
    if is_wrapped(tensor):
        return True
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(s % ALIGN == 0 for n, s in strides if n > 1) and tensor.data_ptr() % 16 == 0


def as_4d(tensor: Tensor) -> Tensor:
    """Return a 0-, 1-, 2- or 4-D tensor with leading dimensions of size 1 added up to four."""
    return tensor[(None,) * (_DIMS - tensor.dim())]


def check_dense(name: str, tensor: Tensor, extent: Extent) -> None:
    """Raise unless the tensor broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) in one way only.

    Raises:
        ArgumentError: It is 3-D (batch or heads first?), has more than four dimensions, or does not
            broadcast.
    """
    full = (extent.batch, extent.num_heads_q, extent.seqlen_q, extent.seqlen_kv)
    shape = tuple(tensor.shape)
    required = f"a shape that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) = {full}"
    if tensor.dim() == _DIMS - 1:
        to_do = f"say whether the first dimension is batch ({name}[:, None]) or heads ({name}[None])"
        raise argument_error(name, required + ", with 1, 2 or 4 dimensions", f"3-D shape {shape}", to_do)
    fits = tensor.dim() <= _DIMS and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        other = ", or pass masks.KeyPadding(keep=...) for one bool per key and batch row"
        to_do = "reshape it" + (other if tensor.dtype == torch.bool else "")
        raise argument_error(name, required, shape, to_do)


def document_ids(node: Documents, extent: Extent) -> Tensor:
    """Return int32 ids (batch or 1, seqlen) on the extent's device, made once per node."""

    def make() -> Tensor:
        if node.ids is not None:
            return (node.ids if node.ids.dim() > 1 else node.ids[None]).to(extent.device)
        if node.cu_seqlens is not None:
            tokens = torch.arange(extent.seqlen_kv, device=extent.device)
            ends = _covering(node.cu_seqlens, extent)[1:]
            return torch.searchsorted(ends, tokens, right=True).to(torch.int32)[None]
        lengths = torch.tensor(node.lengths, dtype=torch.int64, device=extent.device)
        order = torch.arange(len(node.lengths or ()), dtype=torch.int32, device=extent.device)
        return torch.repeat_interleave(order, lengths, output_size=extent.seqlen_kv)[None]

    return remember(node, ("document_ids", extent.seqlen_kv, extent.device), make)


def cu_seqlens(node: Documents, extent: Extent) -> Tensor | None:
    """Return int32 prefix sums (documents + 1,) on the extent's device, None for documents given as ids."""
    if node.ids is not None:
        return None

    def make() -> Tensor:
        if node.cu_seqlens is not None:
            return _covering(node.cu_seqlens, extent).to(torch.int32)
        sums = [0]
        for length in node.lengths or ():
            sums.append(sums[-1] + length)
        return torch.tensor(sums, dtype=torch.int32, device=extent.device)

    return remember(node, ("cu_seqlens", extent.seqlen_kv, extent.device), make)


def _covering(sums: Tensor, extent: Extent) -> Tensor:
    """Return int64 prefix sums that cover the sequence and nothing else, whatever their values are.

    On the CPU wrong ones are refused. A device is not waited for: there the first document starts with the
    sequence and the last one ends with it, so that a kernel reads nothing behind it and writes every row.
    """
    if sums.device.type == "cpu":
        checks.prefix_sums(sums, extent.seqlen_kv)
    covering = sums.to(device=extent.device, dtype=torch.int64).clamp(0, extent.seqlen_kv).cummax(0).values
    covering[0], covering[-1] = 0, extent.seqlen_kv
    return covering


def key_keep(node: KeyPadding, extent: Extent) -> Tensor:
    """Return a bool tensor (batch, seqlen_kv) on the extent's device, made once per node."""

    def make() -> Tensor:
        if node.keep is not None:
            return node.keep.to(device=extent.device, dtype=torch.bool)
        tokens = torch.arange(extent.seqlen_kv, device=extent.device)[None]
        counts = torch.as_tensor(node.lengths if node.left is None else node.left, device=extent.device)[
            :, None
        ]
        return tokens < counts if node.left is None else tokens >= counts

    return remember(node, ("key_keep", extent.seqlen_kv, extent.device), make)


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what a decision may depend on, without looking at values."""
    memory = None if is_wrapped(tensor) else (tensor.stride(), tensor.data_ptr() % 16 == 0)
    return (tensor.dtype, tuple(tensor.shape), memory, tensor.requires_grad)


def dense_node(tensor: Tensor, extent: Extent, *, look: bool) -> DenseNode:
    """Return a bool tensor as data, with what a look into it found where a look is allowed."""
    seen = look_into(tensor, extent) if look else None
    return DenseNode(
        shape=tuple(tensor.shape),
        requires_grad=tensor.requires_grad,
        last_dim_contiguous=tensor.dim() == 0 or tensor.stride(-1) == 1,
        aligned=is_aligned(tensor),
        empty_rows="unknown" if seen is None else seen.empty_rows,
        recognized=None if seen is None else seen.recognized,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look into a dense bool mask found."""

    empty_rows: EmptyRows
    recognized: tuple[CausalNode, ...] | None


def look_into(tensor: Tensor, extent: Extent) -> Seen | None:
    """Look into a dense bool mask once per tensor and version; None where a look is not allowed or worth it.

    A look reads the whole mask on its device and waits for the answer.
    """
    worth = tensor.dim() >= _MATRIX_DIMS and extent.seqlen_q * extent.seqlen_kv >= LOOK_THRESHOLD
    fits = tensor.dim() >= _MATRIX_DIMS and tuple(tensor.shape[-2:]) == (extent.seqlen_q, extent.seqlen_kv)
    if not worth or not fits or not _is_readable(tensor) or not may_remember(tensor):
        return None
    return remember(tensor, ("seen",), lambda: _look(tensor))


def _look(tensor: Tensor) -> Seen:
    leading = zip(tensor.shape[:-2], tensor.stride()[:-2], strict=True)
    matrix = tensor[tuple(0 if stride == 0 and size > 1 else slice(None) for size, stride in leading)]
    seqlen_q, seqlen_kv = matrix.shape[-2:]
    rows = max(1, _LOOK_CHUNK * seqlen_q // max(1, matrix.numel()))
    full = torch.ones((), dtype=torch.bool, device=tensor.device)
    verdicts = [full, full, full, full]
    columns = torch.arange(seqlen_kv, device=tensor.device)
    for start in range(0, seqlen_q, rows):
        part = matrix[..., start : start + rows, :]
        index = torch.arange(start, start + part.shape[-2], device=tensor.device)[:, None]
        top_left = columns <= index
        bottom_right = columns <= index + (seqlen_kv - seqlen_q)
        found = [
            part.any(-1).all(),
            part.all(),
            (part == top_left).all(),
            (part == bottom_right).all(),
        ]
        verdicts = [a & b for a, b in zip(verdicts, found, strict=True)]
    has_keys, everything, top_left_causal, bottom_right_causal = torch.stack(verdicts).tolist()
    recognized: tuple[CausalNode, ...] | None = None
    if everything:
        recognized = ()
    elif top_left_causal:
        recognized = (CausalNode(),)
    elif bottom_right_causal:
        recognized = (CausalNode(alignment="bottom_right"),)
    return Seen("none" if has_keys else "some", recognized)


def _is_readable(tensor: Tensor) -> bool:
    """Only a plain tensor has values here, and none can be waited for while a CUDA graph records."""
    if type(tensor) is not Tensor or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(slots=True)
class _Memory:
    reference: weakref.ref[object]
    version: tuple[int, ...]
    made: dict[object, object] = field(default_factory=dict)


_MEMORY: dict[int, _Memory] = {}


def may_remember(owner: object) -> bool:
    """Return whether what is made may be kept: not under tracing, nor where changes cannot be seen."""
    if torch.compiler.is_compiling():
        return False
    return all(not t.requires_grad and not t.is_inference() for t in _tensors(owner))


def remember(owner: object, what: object, make: Callable[[], _T]) -> _T:
    """Return what was made for an owner before, or make it; it goes with the owner or when that changes.

    The owner is a tensor or a mask object; an object changes when a tensor in it does.
    """
    if not may_remember(owner):
        return make()
    version = tuple(t._version for t in _tensors(owner))
    memory = _MEMORY.get(id(owner))
    if memory is None or memory.reference() is not owner or memory.version != version:
        place = id(owner)
        reference = weakref.ref(owner, lambda _: _MEMORY.pop(place, None))
        memory = _MEMORY[place] = _Memory(reference, version)
    if what not in memory.made:
        memory.made[what] = _lasting(make)
    return memory.made[what]  # type: ignore[return-value]


def _tensors(owner: object) -> tuple[Tensor, ...]:
    return (owner,) if isinstance(owner, Tensor) else getattr(owner, "tensors", ())


def _lasting(make: Callable[[], _T]) -> _T:
    """Make a tensor that training may use later, although inference mode asks for it first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(mode=False), torch.no_grad():
        return make()
