"""TransformerEngine's functions in float64, with the signatures of any recorded release."""

from __future__ import annotations

import functools
from itertools import pairwise
from types import ModuleType

import torch
from support import cudnn_graph, signatures
from support.cudnn_graph import Graph

RECORDED = signatures.recorded("transformer-engine")
MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
CONSTANTS = "transformer_engine.pytorch.constants"
MASKS = {
    "no_mask": (False, False, False),
    "causal": (False, True, False),
    "causal_bottom_right": (False, True, True),
    "padding": (True, False, False),
    "padding_causal": (True, True, False),
    "padding_causal_bottom_right": (True, True, True),
}
"""Whether lengths count, whether keys after the diagonal are out, and whether it ends with the last key."""


class Package:
    """One release of the package as modules; its calls are kept as they were made.

    Attributes:
        release: Which one.
        padded: Whether a ragged batch's statistics are padded, as older cuDNN's are.
        calls: (function, arguments).
    """

    def __init__(self, release="2.16.1", *, padded=False):
        self.release = release
        self.padded = padded
        self.calls = []
        self._drawn = 0

    @property
    def modules(self):
        fused, constants = ModuleType(MODULE), ModuleType(CONSTANTS)
        fused.fused_attn_fwd = self._recorded("fused_attn_fwd", self._forward)
        fused.fused_attn_bwd = self._recorded("fused_attn_bwd", self._backward)
        fused.FusedAttnBackend = {"F16_arbitrary_seqlen": "arbitrary", "FP8": "fp8"}
        constants.TE_DType = {torch.float64: "kFloat64"}
        return {MODULE: fused, CONSTANTS: constants}

    def only(self, function):
        (given,) = (given for name, given in self.calls if name == function)
        return given

    def _recorded(self, name, run):
        signature = RECORDED[self.release][name]

        @functools.wraps(run)
        def function(*args, **kwargs):
            assert not args, "every argument is named"
            signature.bind(**kwargs)
            self.calls.append((name, kwargs))
            return run(kwargs)

        function.__signature__ = signature
        return function

    def _forward(self, given):
        tensors = _tensors(given, "q", "k", "v")
        assert given["is_training"] or not given["dropout"], "inference drops nothing"
        sink = given["softmax_offset"]
        assert given["softmax_type"] == ("vanilla" if sink is None else "learnable")
        if sink is not None:
            assert (sink.shape, sink.dtype) == ((1, tensors[0].shape[-2], 1, 1), torch.float32)
        graph, cuts, lengths = _graph(given, None if sink is None else sink.flatten())
        state = torch.tensor([17, 4 * self._drawn], dtype=torch.int64)
        self._drawn += 1
        if cuts is None:
            out, lse = graph.forward(*(t.transpose(1, 2) for t in tensors))
            return out.transpose(1, 2).contiguous(), [lse[..., None], state]
        out, lse = cudnn_graph.ragged_forward(graph, *tensors, cuts)
        lse = cudnn_graph.padded(lse, lengths, given["max_seqlen_q"]) if self.padded else lse
        return out, [lse[..., None], state]

    def _backward(self, given):
        query, key, value, out, grad = _tensors(given, "q", "k", "v", "o", "d_o")
        assert given.get("softmax_type", "vanilla") == "vanilla"
        lse, state = given["aux_ctx_tensors"]
        assert (state.shape, state.dtype) == ((2,), torch.int64)
        assert (lse.dtype, lse.shape[-1]) == (torch.float32, 1)
        assert lse.is_contiguous()
        for name in ("do_format", "dqkv_layout"):
            assert name not in RECORDED[self.release]["fused_attn_bwd"].parameters or name in given
        graph, cuts, lengths = _graph(given, None)
        if cuts is None:
            assert lse.shape == (query.shape[0], query.shape[2], query.shape[1], 1)
            query, key, value, out, grad = (t.transpose(1, 2) for t in (query, key, value, out, grad))
            grads = graph.backward(query, key, value, out, lse[..., 0], grad)
            return [g.transpose(1, 2).contiguous() for g in grads] + [None, None]
        lse = cudnn_graph.per_token(lse[..., 0], lengths) if self.padded else lse[..., 0]
        assert lse.shape == query.shape[:2]
        return [*cudnn_graph.ragged_backward(graph, (query, key, value, out, grad), lse, cuts), None, None]


def _tensors(given, *names):
    """Return the tensors, which are taken to be packed in the layout that is said."""
    tensors = [given[n] for n in names]
    form = given["qkv_layout"].split("_")[0]
    assert given["qkv_layout"] == "_".join([form] * 3)
    assert given.get("dqkv_layout", given["qkv_layout"]) == given["qkv_layout"]
    assert {given.get(n, form) for n in ("o_format", "do_format")} == {form}
    assert all(t.is_contiguous() for t in tensors), "strides are not read"
    assert all(t.dim() == {"bshd": 4, "thd": 3}[form] for t in tensors)
    assert given["fake_dtype"] == tensors[0].dtype
    assert given.get("dqkv_dtype", "kFloat64") == "kFloat64"
    assert given["fused_attention_backend"] == "arbitrary"
    return tensors


def _graph(given, sink):
    """Return the graph, and of a ragged batch its sequences and the lengths of their queries."""
    padding, causal, bottom_right = MASKS[given["attn_mask_type"]]
    left, right = given["window_size"]
    assert padding == given["qkv_layout"].startswith("thd")
    assert not causal or right == 0
    assert not causal or given["bottom_right_diagonal"] == bottom_right
    graph = Graph(
        given["attn_scale"],
        None if left == -1 else left + 1,
        None if right == -1 else right,
        given["bottom_right_diagonal"],
        sink,
    )
    sums = (given["cu_seqlens_q"], given["cu_seqlens_kv"])
    starts = (given["cu_seqlens_q_padded"], given["cu_seqlens_kv_padded"])
    lengths = [[b - a for a, b in pairwise(s.tolist())] for s in sums]
    assert all(s.dtype == torch.int32 for s in sums)
    for most, name in zip(lengths, ("max_seqlen_q", "max_seqlen_kv"), strict=True):
        assert type(given[name]) is int
        assert max(most) <= given[name]
    if not padding:
        assert starts == (None, None)
        assert [set(n) for n in lengths] == [{given["max_seqlen_q"]}, {given["max_seqlen_kv"]}]
        return graph, None, None
    assert all(s.dtype == torch.int32 for s in starts)
    return graph, list(cudnn_graph.sequences(*lengths, *(s[:-1].tolist() for s in starts))), lengths[0]
