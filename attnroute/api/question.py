"""The question that the engine answers, as plain data, from the tensors of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attnroute.executors.strides import is_packed
from attnroute.masks import Dense, Mask
from attnroute.masks.layout import is_aligned
from attnroute.masks.lowered.form import Extent, as_4d
from attnroute.masks.recognition.summary import inspected_node
from attnroute.masks.tracing import address, guard_bool, is_capturing, is_open, size_hint
from attnroute.question.call import Call, Context, Strides
from attnroute.question.nodes import AlibiBias, Bias, DenseBias, FunctionBias, MaskNode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnroute.api.records import Problem
    from attnroute.vocabulary import Dtype, Layout, ScaleSign, Transform


def call_of(problem: Problem, *, recognize: bool, shapes_vary: bool = False) -> Call:
    """Return the question about a call.

    Args:
        problem: The call.
        recognize: Dense bool masks may be read, to find what they are.
        shapes_vary: Calls like it come with other shapes; sizes that a tracer leaves open say so too.
    """
    given, extent = problem.given, example_extent(problem.extent)
    bias = _bias(problem)
    # The arguments are checked by now.
    return Call.unchecked(
        dtype=dtype_word(problem.query.dtype),
        batch=extent.batch,
        num_heads_q=extent.num_heads_q,
        num_heads_kv=int(problem.key.shape[1]),
        seqlen_q=extent.seqlen_q,
        seqlen_kv=extent.seqlen_kv,
        head_dim_qk=int(problem.query.shape[-1]),
        head_dim_v=int(problem.value.shape[-1]),
        layout=cast("Layout", given.layout),
        phase="training" if problem.training else "inference",
        mask=_nodes(problem.whole_mask, extent, recognize=recognize),
        bias=bias,
        scale=scale_sign(problem.scale),
        softcap=float(given.softcap),
        sink=given.sink is not None,
        dropout_p=float(given.dropout_p),
        deterministic=problem.deterministic,
        return_lse=given.return_lse,
        qkv_requires_grad=_trains_inputs(problem, bias),
        strides=strides_of(problem),
        context=Context.unchecked(
            compiled=problem.traced,
            cuda_graph=_is_captured(problem),
            transform=cast("Transform | None", problem.transform),
            dispatch_mode=problem.dispatch_mode,
            shapes_vary=shapes_vary or (problem.traced and is_open(problem.extent)),
            distributed=problem.distributed,
        ),
    )


def example_extent(extent: Extent) -> Extent:
    """Return the sizes of the call that is traced, as Python ints."""
    batch, heads, seqlen_q, seqlen_kv, device = extent
    return Extent(size_hint(batch), int(heads), size_hint(seqlen_q), size_hint(seqlen_kv), device)


def _is_captured(problem: Problem) -> bool:
    """Asked when a route is made: a call that was warmed up before a capture has one already."""
    return not problem.traced and is_capturing(problem.query)


def dtype_word(dtype: torch.dtype) -> Dtype:
    """Return the vocabulary's word for a torch dtype."""
    return cast("Dtype", str(dtype).removeprefix("torch."))


def scale_sign(scale: float | None) -> ScaleSign:
    """Return what kernels care about in a scale."""
    if scale is None or scale > 0:
        return "positive"
    return "negative" if scale < 0 else "zero"


def _nodes(mask: Mask | None, extent: Extent, *, recognize: bool) -> tuple[MaskNode, ...]:
    if mask is None:
        return ()
    nodes: list[MaskNode] = []
    for part in mask.nodes:
        if recognize and isinstance(part, Dense):
            nodes.append(inspected_node(part.tensor, extent))
        else:
            nodes.extend(part.describe(extent))
    return tuple(nodes)


def _bias(problem: Problem) -> Bias | None:
    follows, bias, slopes = problem.training, problem.bias, problem.given.alibi_slopes
    if problem.score_mod is not None:
        return FunctionBias(requires_grad=follows and any(t.requires_grad for t in problem.captured))
    if slopes is not None:
        return AlibiBias(requires_grad=follows and slopes.requires_grad, per_batch=slopes.dim() > 1)
    if bias is None:
        return None
    full = as_4d(bias)
    return DenseBias(
        dtype=dtype_word(bias.dtype),
        shape=tuple(size_hint(n) for n in bias.shape),
        requires_grad=follows and bias.requires_grad,
        last_dim_contiguous=guard_bool(full.stride(-1) == 1),
        aligned=problem.transform is not None or is_aligned(full),
    )


def _trains_inputs(problem: Problem, bias: Bias | None) -> bool | None:
    """Whether query, key or value train; only a bias that trains makes it matter."""
    if not (problem.training and bias is not None and bias.requires_grad):
        return None
    return any(t.requires_grad for t in (problem.query, problem.key, problem.value))


def strides_of(problem: Problem) -> Strides:
    """Return what kernels ask about the memory of query, key and value."""
    if problem.transform is not None:
        # Inside a functorch transform a tensor has no memory of its own to ask about.
        return Strides()
    tensors = (problem.query, problem.key, problem.value)
    # Only documents and padding, which are masks, can become a ragged batch.
    tokens = () if problem.mask is None else [t.transpose(1, 2) for t in tensors]
    return Strides.unchecked(
        last_dim_contiguous=all(guard_bool(t.stride(-1) == 1) for t in tensors),
        packed=False not in [t.is_contiguous() or t.transpose(1, 2).is_contiguous() for t in tensors],
        tokens_contiguous=False not in [t.is_contiguous() for t in tokens],
        aligned_16=False not in [_aligned(t) for t in tensors],
        kv_heads_expanded=not all(
            guard_bool(t.shape[1] <= 1) or guard_bool(t.stride(1) != 0) for t in tensors[1:]
        ),
    )


def _aligned(tensor: Tensor) -> bool:
    """Start and rows at multiples of 16 bytes; rows without a gap between them are as they must be."""
    gapless = tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous() or tensor.stride(-1) != 1
    return address(tensor) % 16 == 0 if gapless else is_packed(tensor)
