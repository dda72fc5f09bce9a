"""From the tensors of a call to the question as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.executors.prepare.apply import is_packed
from attnroute.masks import All, Causal, Dense, Mask, Window
from attnroute.masks.layout import is_aligned
from attnroute.masks.lowered.form import Extent, as_4d
from attnroute.masks.recognition.summary import inspected_node
from attnroute.masks.tracing import address, example, holds
from attnroute.question.call import AlibiBias, Bias, Call, Context, DenseBias, FunctionBias, MaskNode, Strides
from attnroute.vocabulary import HEAD_DIM_MULTIPLE

if TYPE_CHECKING:
    from attnroute.executors.inputs import ScoreMod
    from attnroute.vocabulary import Alignment, Dtype, Layout, ScaleSign, Transform


@dataclass(slots=True)
class Arguments:
    """The arguments of one `attention()` call, in its order, and what surrounds it.

    As given at first; `collect` turns bias objects, torch's mask objects and packed sequences into what they
    mean, and fills in what follows `return_lse`.

    Attributes:
        score_mod: The function of a bias object.
        captured: The tensors that the function reads.
        training: Gradients will be asked for.
        transform: The functorch transform around the call.
        dispatch_mode: A TorchDispatchMode is active.
        traced: A tracer holds the tensors: torch.compile, torch.export; or they lie on the device "meta".
        no_values: The values had no features before some were added, and the output has none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | Mask | None
    bias: Tensor | None
    is_causal: bool
    causal_alignment: str | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    layout: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    deterministic: bool | None
    return_lse: bool
    score_mod: ScoreMod | None = None
    captured: tuple[Tensor, ...] = ()
    training: bool = False
    transform: str | None = None
    dispatch_mode: bool = False
    traced: bool = False
    no_values: bool = False


def device_of(query: Tensor) -> tuple[str, int | None]:
    """Return type and index of the device whose kernels are asked about: those of the CPU for "meta"."""
    device = query.device
    return ("cpu", None) if device.type == "meta" else (device.type, device.index)


def widen(args: Arguments) -> None:
    """Give heads without features a few that are zero, which no kernel and no row needs to know of.

    Without features every score is 0, and with zeros it is 0 too; an output without features is cut again.
    """
    query, key, value = args.query, args.key, args.value
    if key.shape[-1:] != query.shape[-1:] or not value.dim():
        # The checks say so.
        return
    narrow, narrow_v = int(query.shape[-1]), int(value.shape[-1])
    width = max(narrow, narrow_v) or HEAD_DIM_MULTIPLE
    if args.scale is None:
        args.scale = narrow**-0.5 if narrow else 1.0
    args.no_values = narrow_v == 0
    args.query, args.key = pad(query, (0, width - narrow)), pad(key, (0, width - narrow))
    args.value = pad(value, (0, width - narrow_v))


def places(layout: str) -> tuple[int, int]:
    """Return the dimensions of heads and length; packed tensors have become bhsd by now."""
    return (2, 1) if layout == "bshd" else (1, 2)


def extent_of(args: Arguments) -> Extent:
    """Return batch, query heads and lengths."""
    heads_at, length_at = places(args.layout)
    shape, kv_shape = args.query.shape, args.key.shape
    return Extent(shape[0], shape[heads_at], shape[length_at], kv_shape[length_at], args.query.device)


def example_of(extent: Extent) -> Extent:
    """Return the sizes of the call that is traced, as Python ints."""
    batch, heads, seqlen_q, seqlen_kv, device = extent
    return Extent(example(batch), int(heads), example(seqlen_q), example(seqlen_kv), device)


def mask_of(args: Arguments) -> Mask | None:
    """Return everything that masks as one object: the mask, is_causal and window hold together."""
    parts: list[Mask] = []
    if isinstance(args.mask, Mask):
        parts.extend(args.mask.nodes)
    elif isinstance(args.mask, Tensor) and args.mask.dtype == torch.bool:
        parts.append(Dense(args.mask))
    alignment = cast("Alignment", args.causal_alignment or "top_left")
    if args.is_causal:
        parts.append(Causal(alignment))
    if args.window is not None:
        left, right = args.window
        parts.append(Window(left, right, alignment))
    if not parts:
        return None
    if isinstance(args.mask, Mask) and len(parts) == len(args.mask.nodes):
        return args.mask
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def bias_of(args: Arguments) -> Tensor | None:
    """Return the bias; a float mask is one, and both add up."""
    mask = args.mask
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        return mask if args.bias is None else _sum(mask, args.bias, args.query.dtype)
    return args.bias


def _sum(mask: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Add two biases in the widest of their dtypes and the query's, and never in fewer than 32 bits.

    A sum of 16-bit ones goes back to the query's 16 bits with one rounding. What is finite stays finite, as
    -inf would leave out a key that large negative numbers only move away.
    """
    wide = torch.float32
    for other in (mask.dtype, bias.dtype, dtype):
        # torch promotes no 8-bit float.
        wide = wide if other.itemsize == 1 else torch.promote_types(wide, other)
    total = mask.to(wide) + bias.to(wide)
    if max(mask.dtype.itemsize, bias.dtype.itemsize, dtype.itemsize) > 2 or dtype.itemsize == 1:
        return total
    bound = torch.finfo(dtype).max
    return torch.where(total.isinf(), total, total.clamp(-bound, bound)).to(dtype)


def call_of(args: Arguments, extent: Extent, mask: Mask | None, *, look: bool) -> Call:
    """Return the question.

    Args:
        args: The arguments.
        extent: Their sizes, as Python ints.
        mask: `mask_of(args)`.
        look: Dense bool masks may be looked into.
    """
    heads_at, _ = places(args.layout)
    bias = _bias(args, bias_of(args))
    return Call(
        dtype=dtype_word(args.query.dtype),
        batch=extent.batch,
        num_heads_q=extent.num_heads_q,
        num_heads_kv=int(args.key.shape[heads_at]),
        seqlen_q=extent.seqlen_q,
        seqlen_kv=extent.seqlen_kv,
        head_dim_qk=int(args.query.shape[-1]),
        head_dim_v=int(args.value.shape[-1]),
        layout=cast("Layout", args.layout),
        phase="training" if args.training else "inference",
        mask=_nodes(mask, extent, look=look),
        bias=bias,
        scale=scale_sign(args.scale),
        softcap=float(args.softcap),
        sink=args.sink is not None,
        dropout_p=float(args.dropout_p),
        deterministic=bool(args.deterministic),
        return_lse=args.return_lse,
        qkv_requires_grad=_trains_inputs(args, bias),
        strides=_strides(args, heads_at),
        context=Context(
            compiled=args.traced,
            cuda_graph=_is_captured(args),
            transform=cast("Transform | None", args.transform),
            dispatch_mode=args.dispatch_mode,
        ),
    )


def _is_captured(args: Arguments) -> bool:
    """Asked when a route is made: a call that was warmed up before a capture has one already."""
    return not args.traced and args.query.is_cuda and torch.cuda.is_current_stream_capturing()


def dtype_word(dtype: torch.dtype) -> Dtype:
    """Return the vocabulary's word for a torch dtype."""
    return cast("Dtype", str(dtype).removeprefix("torch."))


def scale_sign(scale: float | None) -> ScaleSign:
    """Return what kernels care about in a scale."""
    if scale is None or scale > 0:
        return "positive"
    return "negative" if scale < 0 else "zero"


def _nodes(mask: Mask | None, extent: Extent, *, look: bool) -> tuple[MaskNode, ...]:
    if mask is None:
        return ()
    nodes: list[MaskNode] = []
    for part in mask.nodes:
        if look and isinstance(part, Dense):
            nodes.append(inspected_node(part.tensor, extent))
        else:
            nodes.extend(part.describe(extent))
    return tuple(nodes)


def _bias(args: Arguments, bias: Tensor | None) -> Bias | None:
    follows = args.training
    if args.score_mod is not None:
        return FunctionBias(requires_grad=follows and any(t.requires_grad for t in args.captured))
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes
        return AlibiBias(requires_grad=follows and slopes.requires_grad, per_batch=slopes.dim() > 1)
    if bias is None:
        return None
    full = as_4d(bias)
    return DenseBias(
        dtype=dtype_word(bias.dtype),
        shape=tuple(example(n) for n in bias.shape),
        requires_grad=follows and bias.requires_grad,
        last_dim_contiguous=holds(full.stride(-1) == 1),
        aligned=args.transform is not None or is_aligned(full),
    )


def _trains_inputs(args: Arguments, bias: Bias | None) -> bool | None:
    """Whether query, key or value train; only a bias that trains makes it matter."""
    if not (args.training and bias is not None and bias.requires_grad):
        return None
    return any(t.requires_grad for t in (args.query, args.key, args.value))


def _strides(args: Arguments, heads_at: int) -> Strides:
    tensors = (args.query, args.key, args.value)
    if args.transform is not None:
        # Inside a functorch transform a tensor has no memory of its own to ask about.
        return Strides()
    # Only documents and padding, which are masks, can become a ragged batch.
    places = () if args.mask is None else (t.transpose(1, 2) if heads_at == 1 else t for t in tensors)
    return Strides(
        last_dim_contiguous=all(holds(t.stride(-1) == 1) for t in tensors),
        packed=all(t.is_contiguous() or t.transpose(1, 2).is_contiguous() for t in tensors),
        tokens_contiguous=all(t.is_contiguous() for t in places),
        aligned_16=all(_aligned(t) for t in tensors),
        kv_heads_expanded=not all(
            holds(t.shape[heads_at] <= 1) or holds(t.stride(heads_at) != 0) for t in tensors[1:]
        ),
    )


def _aligned(tensor: Tensor) -> bool:
    """Start and rows at multiples of 16 bytes; rows without a gap between them are as they must be."""
    gapless = tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous() or tensor.stride(-1) != 1
    return address(tensor) % 16 == 0 if gapless else is_packed(tensor)
