"""flash-attn's functions of every release, computing in float64 on the CPU what the kernels compute.

Kept are: the signatures, what is returned, the forms of the log-sum-exp, how sides of windows are opened, and
that a bound of one query counts on one query in every sequence.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import torch
from support import signatures
from support.flash_attn_math import Attention, cuts_of, ragged_backward, ragged_forward

RECORDED = signatures.recorded("flash-attn")


class Package:
    """The module `flash_attn.flash_attn_interface` of one release; calls are kept."""

    def __init__(self, release):
        self.release = release
        self.calls = []
        self.is_new = "window_size_left" in RECORDED[release]["_flash_attn_forward"].parameters
        self.pads_lse = "softcap" not in RECORDED[release]["_flash_attn_forward"].parameters
        for name, signature in RECORDED[release].items():
            run = getattr(self, "_backward" if name.endswith("backward") else "_forward")
            setattr(self, name, self._function(name, signature, run))

    def _function(self, name, signature, run):
        def function(*args, **given):
            assert not args, "everything is passed by name"
            signature.bind(**given)
            self.calls.append((name, given))
            _check_types(given)
            return run(given)

        if not self.is_new:
            function.__signature__ = signature
            return function
        return Operator(function, list(signature.parameters))

    def _forward(self, given):
        attention, tensors, cuts = self._read(given)
        assert given["return_softmax"] is False
        state = torch.randint(2**31, (2,), dtype=torch.int64)
        attention.dropout = (given["dropout_p"], state)
        if cuts is None:
            out, lse = attention.forward(*tensors)
        else:
            out, lse = ragged_forward(attention, tensors, cuts)
            lse = self._as_given(lse, given) if self.pads_lse else lse
        out, rest = out.to(tensors[0].dtype), (out.new_empty(0), state)
        return (out, lse, *rest) if self.is_new else (out, *tensors, out, lse, *rest)

    def _backward(self, given):
        attention, tensors, cuts = self._read(given)
        lse, state = given["softmax_lse"], given["rng_state"]
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        assert (state is None) == (given["dropout_p"] == 0.0)
        attention.dropout = (given["dropout_p"], (0,) if state is None else state)
        read = (given["out"], lse, given["dout"])
        assert all(_is_readable(t) for t in (given["out"], given["dout"]))
        if cuts is None:
            grads = attention.backward(*tensors, *read)
        else:
            lse = _per_token(lse, given) if self.pads_lse else lse
            grads = ragged_backward(attention, tensors, given["out"], lse, given["dout"], cuts)
        made = [given[n] for n in ("dq", "dk", "dv")]
        for place, grad in zip(made, grads, strict=True):
            assert place.is_contiguous()
            place.copy_(grad)
        return lse if self.is_new else (*made, lse)

    def _read(self, given):
        """Return the attention as the C++ reads it, the tensors and the sequences."""
        sides = ("window_size_left", "window_size_right")
        left, right = (given[n] for n in sides) if self.is_new else given["window_size"]
        tensors = [given[n] for n in ("q", "k", "v")]
        is_ragged = "cu_seqlens_q" in given
        lengths = ("max_seqlen_q", "max_seqlen_k")
        longest_q, longest_kv = (
            [given[n] for n in lengths] if is_ragged else [tensors[n].shape[1] for n in (0, 1)]
        )
        has_alibi = given["alibi_slopes"] is not None
        right = 0 if given["causal"] and (longest_q > 1 or has_alibi) else right
        left, right = (-1 if side >= longest_kv else side for side in (left, right))
        # As set_params_fprop: one open side ends after seqlen_kv keys.
        if left >= 0 > right:
            right = longest_kv
        elif left < 0 < right:
            left = longest_kv
        attention = Attention(
            given["softmax_scale"], left, right, given.get("softcap", 0.0), given["alibi_slopes"]
        )
        return attention, tensors, self._cuts(given) if is_ragged else None

    def _cuts(self, given):
        cuts = cuts_of(given["cu_seqlens_q"], given["cu_seqlens_k"], given.get("seqused_k"))
        assert max(rows.stop - rows.start for rows, _ in cuts) <= given["max_seqlen_q"]
        assert max(keys.stop - keys.start for _, keys in cuts) <= given["max_seqlen_k"]
        if given["max_seqlen_q"] == 1:
            assert given["q"].shape[0] == len(cuts), "one query in every sequence"
        return cuts

    def _as_given(self, lse, given):
        sums = given["cu_seqlens_q"].tolist()
        padded = torch.full((len(sums) - 1, lse.shape[0], given["max_seqlen_q"]), math.nan)
        for n, (start, stop) in enumerate(pairwise(sums)):
            padded[n, :, : stop - start] = lse[:, start:stop]
        return padded


class Operator:
    """A function wrapped by `torch.library.custom_op`, which hides its signature."""

    def __init__(self, function, names):
        self._function = function
        schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])
        self._opoverload = SimpleNamespace(_schema=schema)

    def __call__(self, *args, **given):
        return self._function(*args, **given)


def _per_token(lse, given):
    sums = given["cu_seqlens_q"].tolist()
    assert lse.shape == (len(sums) - 1, given["q"].shape[1], given["max_seqlen_q"])
    return torch.cat([lse[n, :, : b - a] for n, (a, b) in enumerate(pairwise(sums))], 1)


def _is_readable(tensor):
    *rows, last = tensor.stride()
    return last == 1 and not any(s % 8 for s in rows)


def _check_types(given):
    for name in ("causal", "deterministic", "return_softmax"):
        assert isinstance(given.get(name, False), bool)
    for name in ("max_seqlen_q", "max_seqlen_k", "window_size_left", "window_size_right"):
        assert type(given.get(name, 0)) is int
    for name in ("softmax_scale", "dropout_p", "softcap"):
        assert type(given.get(name, 0.0)) is float
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        assert given.get(name) is None or given[name].dtype == torch.int32
    slopes = given["alibi_slopes"]
    assert slopes is None or slopes.dtype == torch.float32
