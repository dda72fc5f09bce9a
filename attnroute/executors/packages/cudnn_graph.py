"""Executes graphs of cuDNN's frontend for padded batches, without the operators around them.

`cudnn::sdpa_fwd` and `cudnn::sdpa_bwd` work out in each call which graph it needs, in Python: that costs the
host several times what executing the graph does. Here a graph is made once for each kind of call, by the
functions that the operators make theirs with. Read in nvidia-cudnn-frontend 1.31 and 1.32
(cudnn/sdpa/fwd/torch_op.py): a plan that is built does not change, and threads share it, each with a handle
of its own on torch's current stream; outputs and workspace are torch's memory, new in each call. What is not
known here is left to the operators: other releases, and memory that they would copy first.
"""

from __future__ import annotations

import atexit
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnroute.memory import INSTALLED, cached, reset

# Graphs that outlive the package's module at the end of a process are reported as leaks, line by line.
atexit.register(reset)

_NAMES = (
    "_build_graph",
    "_build_bwd_graph",
    "_get_handle",
    "_graph_cache_lock",
    "_like_layout_stride",
    "_TORCH_DTYPE_TO_CUDNN",
    "_UIDs",
)
"""What is taken of the package's module, beside `cudnn.pygraph`."""
_FORWARD = ("Q", "K", "V", "O", "STATS")
_BACKWARD = ("Q", "K", "V", "O", "DO", "STATS", "DQ", "DK", "DV")
"""The buffers of either graph, in their order."""
_ALIGNED_BYTES = 16
_KEPT = 256
_BUILT = 3
"""What a builder returns: graph, bytes of workspace and the order of buffers."""

Place = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides of a tensor."""


class Settings(NamedTuple):
    """The arguments of both operators that are no tensors, as they name them."""

    attn_scale: float
    is_causal: bool
    causal_bottom_right: bool
    window_left: int
    window_right: int


class _Graph(NamedTuple):
    """A graph that is built.

    Attributes:
        graph: The package's.
        workspace: Bytes of memory that it works in.
        uids: What its buffers are, in their order.
        outputs: Shapes and strides of what it writes, the log-sum-exp aside.
    """

    graph: Any
    workspace: int
    uids: tuple[int, ...]
    outputs: tuple[Place, ...]

    def execute(self, buffers: list[Tensor]) -> None:
        """Execute the graph on torch's current stream."""
        device = buffers[0].device
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device)
        handle = _torch_op()._get_handle(device)
        self.graph.execute(buffers, workspace, handle=handle, tensor_uids=self.uids)


def forward(
    settings: Settings, tensors: tuple[Tensor, ...], sink: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp (batch, num_heads_q, seqlen_q, 1), None where the operator must run.

    Args:
        settings: Of the call.
        tensors: Query, key and value in layout bhsd and any memory layout.
        sink: (num_heads_q,), float32.
    """
    query, key, value = tensors
    places = tuple((t.shape, t.stride()) for t in tensors)
    graph = _forward_graph(settings, query.dtype, query.device, places, sink is not None)
    if graph is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) % _ALIGNED_BYTES:
        return None
    ((shape, strides),) = graph.outputs
    out = torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)
    lse = torch.empty((*shape[:3], 1), dtype=torch.float32, device=query.device)
    buffers = [query, key, value, out, lse]
    if sink is not None:
        if not sink.is_contiguous() or sink.data_ptr() % _ALIGNED_BYTES:
            return None
        buffers.append(sink.view(1, -1, 1, 1))
    graph.execute(buffers)
    return out, lse


def backward(
    settings: Settings, tensors: tuple[Tensor, ...], lse: Tensor, grad_out: Tensor, *, deterministic: bool
) -> list[Tensor] | None:
    """Return the gradients of query, key and value, None where the operator must run.

    Args:
        settings: Of the call.
        tensors: Query, key, value and output in layout bhsd and any memory layout.
        lse: (batch, num_heads_q, seqlen_q), contiguous.
        grad_out: The gradient of the output.
        deterministic: Only a deterministic algorithm.
    """
    query, key, value, out = tensors
    places = tuple((t.shape, t.stride()) for t in tensors)
    graph = _backward_graph(settings, query.dtype, query.device, places, deterministic)
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr() | lse.data_ptr()
    if graph is None or addresses % _ALIGNED_BYTES:
        return None
    if grad_out.stride() != out.stride() or grad_out.data_ptr() % _ALIGNED_BYTES:
        # The graph reads it as it reads the output.
        grad_out = torch.empty_strided(*places[3], dtype=out.dtype, device=out.device).copy_(grad_out)
    made = [torch.empty_strided(*p, dtype=query.dtype, device=query.device) for p in graph.outputs]
    graph.execute([query, key, value, out, grad_out, lse.unsqueeze(-1), *made])
    return made


@cached(1, INSTALLED)
def _torch_op() -> Any:
    """Return the module that builds graphs, None where it does not have all that is taken of it.

    Graphs before 1.31 take no buffers in an order.
    """
    try:
        module = import_module("cudnn.sdpa.fwd.torch_op")
    except ImportError:
        return None
    if not all(hasattr(module, name) for name in _NAMES):
        return None
    return module if "tensor_uids" in signature(module.cudnn.pygraph.execute).parameters else None


@cached(_KEPT, INSTALLED)
def _forward_graph(
    settings: Settings, dtype: torch.dtype, device: torch.device, places: tuple[Place, ...], has_sink: bool
) -> _Graph | None:
    query, _, value = places
    sizes, module = _sizes(dtype, places), _torch_op()
    if sizes is None:
        return None
    out = (query[0][:3] + value[0][3:], query)
    (place,) = _laid_out(out)
    made = _built(
        "_build_graph",
        device,
        **sizes,
        **settings._asdict(),
        o_stride=place[1],
        has_sinks=has_sink,
        has_seq_lens=False,
        is_thd=False,
        return_lse=True,
    )
    names = (*_FORWARD, "SINKS") if has_sink else _FORWARD
    return _checked(made, tuple(int(module._UIDs[name]) for name in names), (place,))


@cached(_KEPT, INSTALLED)
def _backward_graph(
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    places: tuple[Place, ...],
    deterministic: bool,
) -> _Graph | None:
    sizes, module = _sizes(dtype, places), _torch_op()
    if sizes is None:
        return None
    grads = _laid_out(*((place[0], place) for place in places[:3]))
    made = _built(
        "_build_bwd_graph",
        device,
        **sizes,
        **settings._asdict(),
        total_q=0,
        total_kv=0,
        o_stride=places[3][1],
        is_deterministic=deterministic,
        is_thd=False,
        dq_stride=grads[0][1],
        dk_stride=grads[1][1],
        dv_stride=grads[2][1],
    )
    return _checked(made, tuple(int(module._UIDs[name]) for name in _BACKWARD), grads)


def _sizes(dtype: torch.dtype, places: tuple[Place, ...]) -> dict[str, Any] | None:
    """Return the arguments that both builders have for sizes; None where the operators copy, or refuse."""
    module = _torch_op()
    if module is None or dtype not in module._TORCH_DTYPE_TO_CUDNN:
        return None
    if any(strides[-1] != 1 for _, strides in places):
        return None
    (batch, heads, seqlen_q, head_dim), q_stride = places[0]
    (_, heads_k, seqlen_kv, _), k_stride = places[1]
    (_, heads_v, _, head_dim_v), v_stride = places[2]
    return {
        "dtype": dtype,
        "B": batch,
        "H_q": heads,
        "H_k": heads_k,
        "H_v": heads_v,
        "S_q": seqlen_q,
        "S_kv": seqlen_kv,
        "D_qk": head_dim,
        "D_v": head_dim_v,
        "q_stride": q_stride,
        "k_stride": k_stride,
        "v_stride": v_stride,
        "stats_stride": (heads * seqlen_q, seqlen_q, 1, 1),
    }


def _laid_out(*outputs: tuple[tuple[int, ...], Place]) -> tuple[Place, ...]:
    """Return where outputs of these shapes lie, each with its dimensions in the order of another tensor's."""
    order = _torch_op()._like_layout_stride
    return tuple(
        (torch.Size(shape), tuple(order(tuple(shape), torch.empty_strided(*like, device="meta"))))
        for shape, like in outputs
    )


def _built(builder: str, device: torch.device, **given: Any) -> tuple[Any, ...]:
    """Return what a builder of the package makes; it makes one graph at a time."""
    module = _torch_op()
    handle = module._get_handle(device)
    with module._graph_cache_lock:
        found: tuple[Any, ...] = getattr(module, builder)(handle, **given)
    return found


def _checked(made: tuple[Any, ...], uids: tuple[int, ...], outputs: tuple[Place, ...]) -> _Graph | None:
    """Return a graph that takes these buffers in this order, None where it takes others."""
    if len(made) != _BUILT or tuple(made[2]) != uids:
        return None
    return _Graph(made[0], max(made[1], 1), uids, outputs)
