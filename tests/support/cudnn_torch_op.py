"""The module of the cuDNN frontend that builds graphs, on the CPU in float64, held against releases.

A graph reads and writes its buffers where its tensors were said to lie: wrong strides give wrong numbers.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace

import torch
from support import cudnn_graph, signatures

RECORDED = signatures.recorded("nvidia-cudnn-frontend")
RELEASES = ("1.31.0", "1.32.0")
"""Those whose graphs are executed."""


class UIDs(IntEnum):
    Q = 1
    K = 2
    V = 3
    SINKS = 4
    O = 100  # noqa: E741 - as the package names it
    STATS = 101
    DO = 200
    DQ = 201
    DK = 202
    DV = 203


class Graph:
    """One graph: what each buffer's tensor was said to be, and what is computed from them."""

    def __init__(self, tensors, compute):
        self._tensors, self._compute = tensors, compute
        self.executions = 0

    def execute(self, buffers, workspace, handle, tensor_uids):
        assert handle == f"handle of {threading.get_ident()}"
        assert workspace.dtype == torch.uint8
        assert len(buffers) == len(tensor_uids) == len(self._tensors)
        read = {}
        for buffer, uid in zip(buffers, tensor_uids, strict=True):
            shape, strides = self._tensors[uid]
            assert buffer.shape == torch.Size(shape)
            assert buffer.data_ptr() % 16 == 0
            read[UIDs(uid).name] = buffer.as_strided(shape, strides)
        self._compute(read)
        self.executions += 1


class TorchOp:
    """The module, and all graphs that it built."""

    _TORCH_DTYPE_TO_CUDNN = {torch.float64: "double"}  # noqa: RUF012 - a constant of the package
    _UIDs = UIDs

    def __init__(self, graph=Graph):
        self.graphs = []
        self.cudnn = SimpleNamespace(pygraph=graph)
        self._graph_cache_lock = nullcontext()

    def _get_handle(self, device):
        assert isinstance(device, torch.device)
        return f"handle of {threading.get_ident()}"

    @staticmethod
    def _like_layout_stride(shape, like):
        strides, total = [0] * len(shape), 1
        if 0 in like.stride():
            return torch.empty(shape, device="meta").stride()
        for dim in sorted(range(like.dim()), key=like.stride):
            strides[dim] = total
            total *= shape[dim]
        return tuple(strides)

    def _build_graph(self, *args, **given):
        _hold("_build_graph", args, given)
        assert (given["has_seq_lens"], given["is_thd"], given["return_lse"]) == (False, False, True)
        tensors = _inputs(given)
        if given["has_sinks"]:
            tensors[UIDs.SINKS] = ((1, given["H_q"], 1, 1), (given["H_q"], 1, 1, 1))
        order = (UIDs.Q, UIDs.K, UIDs.V, UIDs.O, UIDs.STATS) + ((UIDs.SINKS,) if given["has_sinks"] else ())

        def compute(read):
            sink = read["SINKS"].flatten() if given["has_sinks"] else None
            out, lse = _graph(given, sink).forward(read["Q"], read["K"], read["V"])
            read["O"].copy_(out)
            read["STATS"].copy_(lse[..., None])

        return self._made(tensors, compute, order)

    def _build_bwd_graph(self, *args, **given):
        _hold("_build_bwd_graph", args, given)
        assert (given["is_thd"], given["total_q"], given["total_kv"]) == (False, 0, 0)
        tensors = _inputs(given)
        tensors[UIDs.DO] = tensors[UIDs.O]
        for uid, of, strides in zip(
            (UIDs.DQ, UIDs.DK, UIDs.DV), "QKV", ("dq_stride", "dk_stride", "dv_stride"), strict=True
        ):
            tensors[uid] = (tensors[UIDs[of]][0], given[strides])
        order = [UIDs[name] for name in ("Q", "K", "V", "O", "DO", "STATS", "DQ", "DK", "DV")]

        def compute(read):
            tensors = (read[name] for name in ("Q", "K", "V", "O"))
            made = _graph(given, None).backward(*tensors, read["STATS"][..., 0], read["DO"])
            for name, grad in zip(("DQ", "DK", "DV"), made, strict=True):
                read[name].copy_(grad)

        return self._made(tensors, compute, order)

    def _made(self, tensors, compute, order):
        graph = Graph({int(uid): place for uid, place in tensors.items()}, compute)
        self.graphs.append(graph)
        return graph, 0, tuple(map(int, order))


def _hold(builder, args, given):
    """Hold a call against the builder of every release whose graphs are executed."""
    for release in RELEASES:
        RECORDED[release][builder].bind(*args, **given)


def _inputs(given):
    sizes = [given[n] for n in ("B", "H_q", "S_q", "H_k", "H_v", "S_kv", "D_qk", "D_v")]
    batch, heads, seqlen_q, heads_k, heads_v, seqlen_kv, head_dim, head_dim_v = sizes
    return {
        UIDs.Q: ((batch, heads, seqlen_q, head_dim), given["q_stride"]),
        UIDs.K: ((batch, heads_k, seqlen_kv, head_dim), given["k_stride"]),
        UIDs.V: ((batch, heads_v, seqlen_kv, head_dim_v), given["v_stride"]),
        UIDs.O: ((batch, heads, seqlen_q, head_dim_v), given["o_stride"]),
        UIDs.STATS: ((batch, heads, seqlen_q, 1), given["stats_stride"]),
    }


def _graph(given, sink):
    right = given["window_right"] if given["window_right"] >= 0 else 0 if given["is_causal"] else None
    left = given["window_left"] if given["window_left"] >= 0 else None
    return cudnn_graph.Graph(given["attn_scale"], left, right, given["causal_bottom_right"], sink)
