"""Operators of the cuDNN frontend in float64; each call is held against the schema of every release."""

from __future__ import annotations

import torch
from support import cudnn_graph, signatures
from support.cudnn_graph import Graph

RECORDED = signatures.recorded("nvidia-cudnn-frontend")
RAGGED = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


class Operators:
    """The namespace `torch.ops.cudnn`: calls are held against every release's schema and kept."""

    def __init__(self):
        self.calls = []

    @property
    def forward(self):
        (call,) = (given for name, given in self.calls if name == "sdpa_fwd")
        return call

    @property
    def backward(self):
        (call,) = (given for name, given in self.calls if name == "sdpa_bwd")
        return call

    def sdpa_fwd(self, *args, **given):
        given = _by_name("sdpa_fwd", args, given)
        graph, cuts, _ = self._seen("sdpa_fwd", given)
        tensors = (given["q"], given["k"], given["v"])
        assert given["return_lse"] is True
        if cuts is None:
            out, lse = graph.forward(*tensors)
            return out, lse[..., None]
        out, lse = cudnn_graph.ragged_forward(graph, *tensors, cuts)
        return out, lse[..., None]

    def sdpa_bwd(self, *args, **given):
        given = _by_name("sdpa_bwd", args, given)
        graph, cuts, lengths = self._seen("sdpa_bwd", given)
        read = (given["q"], given["k"], given["v"])
        assert given["lse"].is_contiguous()
        if cuts is None:
            assert given["lse"].shape == given["q"].shape[:3]
            return graph.backward(*read, given["o"], given["lse"], given["grad_out"])
        sequences = given["cu_seqlens_q"].numel() - 1
        assert given["lse"].shape == (sequences, given["q"].shape[1], given["max_seqlen_q"])
        lse = cudnn_graph.per_token(given["lse"], lengths)
        return cudnn_graph.ragged_backward(graph, (*read, given["o"], given["grad_out"]), lse, cuts)

    def _seen(self, name, given):
        for release in RECORDED.values():
            release[name].bind(**given)
        self.calls.append((name, given))
        _check_types(given)
        band = given["is_causal"] or given["window_left"] >= 0 or given["window_right"] >= 0
        assert band or not given["causal_bottom_right"], "re-anchors an active diagonal band only"
        assert not (given["is_causal"] and given["window_right"] > 0)
        right = given["window_right"] if given["window_right"] >= 0 else 0 if given["is_causal"] else None
        left = given["window_left"] if given["window_left"] >= 0 else None
        graph = Graph(given["attn_scale"], left, right, given["causal_bottom_right"], given.get("sinks"))
        return graph, *_cuts(given)


def _by_name(operator, args, given):
    """Return the arguments by name, with those of a ragged batch as they are without one."""
    (*_, latest) = RECORDED.values()
    none = dict(zip(RAGGED, (None, None, 0, 0), strict=True))
    return none | latest[operator].bind(*args, **given).arguments


def _check_types(given):
    for name in ("is_causal", "causal_bottom_right", "return_lse", "is_deterministic"):
        assert isinstance(given.get(name, False), bool)
    for name in ("window_left", "window_right", "max_seqlen_q", "max_seqlen_kv"):
        assert type(given[name]) is int
    assert given.get("sinks") is None or given["sinks"].dtype == torch.float32
    assert given.get("lse") is None or given["lse"].dtype == torch.float32


def _cuts(given):
    """Return the sequences of a ragged batch and the lengths of their queries; None for a padded one."""
    if given["cu_seqlens_q"] is None:
        assert [given[n] for n in RAGGED] == [None, None, 0, 0]
        assert given["q"].dim() == 4
        return None, None
    assert given["q"].dim() == 3
    sums = (given["cu_seqlens_q"], given["cu_seqlens_kv"])
    lengths = [cudnn_graph.lengths_of(s) for s in sums]
    for sums_of, most, bound in zip(sums, lengths, ("max_seqlen_q", "max_seqlen_kv"), strict=True):
        assert sums_of.dtype == torch.int32
        assert max(most) <= given[bound]
        assert min(most) >= 0
    starts = [s[:-1].tolist() for s in sums]
    return list(cudnn_graph.sequences(*lengths, *starts)), lengths[0]
