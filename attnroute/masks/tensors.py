"""What masks do with tensors: materialise, prepare, keep what was prepared for as long as its mask lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad

from attnroute.masks.lowered.region import allowed, whole
from attnroute.masks.marks import Mark, is_private, places_of
from attnroute.masks.objects import checks
from attnroute.masks.objects.identity import KEEPER
from attnroute.masks.tracing import address, holds, is_exporting, is_traced, is_tracing
from attnroute.memory import Memory
from attnroute.question import fits

if TYPE_CHECKING:
    from attnroute.masks.lowered.form import LoweredMask
    from attnroute.masks.objects.bands import PrefixLM
    from attnroute.masks.objects.nodes import Extent, Mask
    from attnroute.masks.objects.tokens import Documents, KeyPadding

ALIGN = 8
"""Elements. EFFICIENT needs row strides of 16 bytes at 16 bit; stock SDPA pads to the same multiple."""
_DIMS = 4
_T = TypeVar("_T")


def materialize(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as a bool tensor (batch or 1, heads or 1, seqlen_q, seqlen_kv), True = attend."""
    shape = (1, 1, extent.seqlen_q, extent.seqlen_kv)
    allowed = build(lowered, extent)
    return allowed.expand(torch.broadcast_shapes(tuple(allowed.shape), shape))


def build(lowered: LoweredMask, extent: Extent) -> Tensor:
    """Return a lowered mask as the smallest bool tensor that broadcasts to it: key padding has one row."""
    found = allowed(lowered, whole(extent))
    if found is None:
        return torch.ones((1, 1, 1, extent.seqlen_kv), dtype=torch.bool, device=extent.device)
    return found


def additive(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return mask and bias as one additive tensor, 0 or the bias where allowed and -inf elsewhere.

    The storage is padded so that every row starts at a multiple of `ALIGN` elements. Differentiable in
    `bias`.
    """
    if mask is None:
        if bias is None:
            msg = "additive() requires a mask or a bias."
            raise ValueError(msg)
        return aligned(bias.to(dtype))
    if _is_followed(mask, bias):
        start = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias.to(dtype)
        return aligned(start.masked_fill(~mask, -math.inf))
    shape = tuple(mask.shape) if bias is None else torch.broadcast_shapes(mask.shape, bias.shape)
    target = aligned_empty(shape, dtype, mask.device)
    if bias is None:
        target.fill_(-math.inf)
        return target.masked_fill_(mask, 0.0)
    return target.copy_(bias.detach()).masked_fill_(~mask, -math.inf)


def _is_followed(allowed: Tensor, bias: Tensor | None) -> bool:
    """Return whether a gradient, forward-mode duals, a functorch transform or export must see each step.

    What is written to a part of a tensor asks export whether that is the whole, which lengths decide.
    """
    if is_exporting():
        return True
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
    """Return the tensor itself when its rows are aligned, else a differentiable copy that is.

    The rows of an exported program's open lengths are contiguous only; the engine's repairs know that.
    """
    if tensor.dim() == 0 or is_wrapped(tensor) or (is_aligned(tensor) and holds(tensor.stride(-1) == 1)):
        return tensor
    if isinstance(tensor.shape[-1], SymInt) and is_exporting():
        # How much room an open length needs is asked by whoever reads the strides, which would close it.
        return tensor.contiguous()
    pad = -tensor.shape[-1] % ALIGN
    copy = torch.nn.functional.pad(tensor, (0, pad)) if pad else tensor.contiguous()
    if copy is tensor or (not is_traced(tensor) and copy.data_ptr() == tensor.data_ptr()):
        copy = tensor.clone(memory_format=torch.contiguous_format)
    return copy[..., : tensor.shape[-1]]


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows, heads and batches start at multiples of `ALIGN` elements, and all at 16 bytes."""
    if is_wrapped(tensor):
        return True
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(holds(n <= 1) or holds(s % ALIGN == 0) for n, s in strides) and address(tensor) % 16 == 0


def as_4d(tensor: Tensor) -> Tensor:
    """Return a 0-, 1-, 2- or 4-D tensor with leading dimensions of size 1 added up to four."""
    return tensor if tensor.dim() == _DIMS else tensor[(None,) * (_DIMS - tensor.dim())]


def check_dense(name: str, tensor: Tensor, extent: Extent) -> None:
    """Raise unless the tensor broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) in one way only.

    Raises:
        ArgumentError: It is 3-D (batch or heads first?), has more than four dimensions, or does not
            broadcast.
    """
    fits.broadcast(name, tuple(tensor.shape), extent, is_mask=tensor.dtype == torch.bool)


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
    if checks.is_readable(sums):
        checks.prefix_sums(sums, extent.seqlen_kv)
    covering = sums.to(device=extent.device, dtype=torch.int64).clamp(0, extent.seqlen_kv).cummax(0).values
    covering[:1].fill_(0)
    covering[-1:].fill_(extent.seqlen_kv)
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


def prefix_keep(node: PrefixLM, extent: Extent) -> Tensor:
    """Return a bool tensor (batch, seqlen_kv) on the extent's device, True in the prefix, made once."""

    def make() -> Tensor:
        counts = torch.as_tensor(node.lengths, device=extent.device)[:, None]
        return torch.arange(extent.seqlen_kv, device=extent.device)[None] < counts

    return remember(node, ("prefix_keep", extent.seqlen_kv, extent.device), make)


def prepare(mask: Mask, extent: Extent, make: Callable[[], LoweredMask]) -> LoweredMask:
    """Return what a mask is lowered to alone, made once per mask, extent and version of its tensors.

    A CUDA graph that is being captured gets its own, so that what it replays is made from the tensors then.
    """
    if any(t.is_cuda for t in mask.tensors) and torch.cuda.is_current_stream_capturing():
        return make()
    return remember(mask, ("lowered", extent), make)


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what a decision and the checks may depend on, without looking at values."""
    memory = None if is_wrapped(tensor) else (tensor.stride(), address(tensor) % 16 == 0)
    return (tensor.dtype, tuple(tensor.shape), memory, tensor.requires_grad, tensor.device)


peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
KEPT: Final = 64
"""Things that are kept with one tensor or mask object, whatever lengths it is read at."""


class Keeper:
    """Keeps what was made for one tensor or mask object, and of which tensors."""

    __slots__ = ("_made", "_marks")

    def __init__(self, marks: tuple[Mark, ...]) -> None:
        """Keep nothing yet.

        Args:
            marks: Of the tensors.
        """
        self._marks = marks
        self._made: Memory[Hashable, Any] = Memory(KEPT)

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether these are the tensors that it keeps something of, unchanged."""
        return len(tensors) == len(self._marks) and all(
            mark.fits(t) for t, mark in zip(tensors, self._marks, strict=True)
        )

    def keep(self, what: Hashable, make: Callable[[], _T]) -> _T:
        """Return what was made before, or make it."""
        made: _T = self._made.keep(what, lambda: _lasting(make))
        return made

    def things(self) -> list[Any]:
        """Return everything that is kept."""
        return self._made.values()

    def beside(self, other: Tensor) -> Keeper:
        """Return what keeps things that are made of another tensor too, as long as both live."""
        place = ("beside", id(other))
        pair: Keeper | None = self._made.get(place)
        if pair is None or not pair.fits((other,)):
            made = self._made

            def ended(_: Hashable) -> None:
                made.drop(lambda thing: thing is pair)

            pair = Keeper((Mark(other, ended=ended),))
            made.put(place, pair)
        return pair

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of an object, and a process that it is sent to, make everything anew."""
        return _nothing, ()


def _nothing() -> None:
    return None


_OF_TENSORS: dict[Hashable, Keeper] = {}
"""By the place of their marks; each goes with its tensor."""


def may_remember(owner: object) -> bool:
    """Return whether what is made may be kept: not under tracing, nor where changes cannot be seen."""
    if is_tracing() or peek_interpreter_stack() is not None:
        return False
    tensors = _tensors(owner)
    if any(is_traced(t) for t in tensors):
        return False
    # What was made before is baked into a graph that is captured, and stale when that is replayed.
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return all(not t.requires_grad and not t.is_inference() and is_private(t) for t in tensors)


def remember(owner: object, what: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for an owner before, or make it; it goes with the owner or when that changes.

    The owner is a tensor or a mask object; an object changes when a tensor in it does. What is kept with a
    tensor may not hold it, nor a view of it: it would keep it alive for ever.
    """
    keeper = keeper_of(owner)
    return make() if keeper is None else keeper.keep(what, make)


def remember_pair(owner: Tensor, other: Tensor, what: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for two tensors before, or make it; it goes with either."""
    keeper = keeper_of(owner) if may_remember(other) else None
    return make() if keeper is None else keeper.beside(other).keep(what, make)


def keeper_of(owner: object, *, views: int = 0) -> Keeper | None:
    """Return what keeps things for an owner as it is now, None where nothing may be kept.

    Args:
        owner: A tensor or a mask object; None = nobody.
        views: How many views of the tensor its caller holds.
    """
    if owner is None or not may_remember(owner):
        return None
    return _of_tensor(owner, views) if isinstance(owner, Tensor) else _of_object(owner)


def _of_tensor(tensor: Tensor, views: int) -> Keeper:
    for place in places_of(tensor):
        keeper = _OF_TENSORS.get(place)
        if keeper is not None and keeper.fits((tensor,)):
            return keeper
    mark = Mark(tensor, views=views, ended=partial(_forget, _OF_TENSORS))
    keeper = _OF_TENSORS[mark.place] = Keeper((mark,))
    return keeper


def _of_object(owner: object) -> Keeper:
    """Objects hold it themselves: what a mask is lowered to may hold functions of a model that owns it."""
    tensors, held = _tensors(owner), vars(owner)
    keeper: Keeper | None = held.get(KEEPER)
    if keeper is None or not keeper.fits(tensors):
        keeper = held[KEEPER] = Keeper(tuple(map(Mark, tensors)))
    return keeper


def _forget(memory: dict[Hashable, Keeper], place: Hashable) -> None:
    """Drop what goes with a tensor; when the interpreter ends, no name of this module may be needed."""
    memory.pop(place, None)


def _tensors(owner: object) -> tuple[Tensor, ...]:
    return (owner,) if isinstance(owner, Tensor) else getattr(owner, "tensors", ())


def _lasting(make: Callable[[], _T]) -> _T:
    """Make a tensor that training may use later, although inference mode asks for it first."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(mode=False), torch.no_grad():
        return make()
