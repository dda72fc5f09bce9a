"""flash-attn-4's two functions in every release, computing in float64 on the CPU what its kernels compute.

Kept are: the signatures, how many values are returned, how sides of windows are read, the log-sum-exp of rows
with no key, and what the functions refuse.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from support import signatures
from support.flash_attn_math import Attention, cuts_of, ragged_backward, ragged_forward

RECORDED = signatures.recorded("flash-attn-4")
MODULE = "flash_attn.cute.interface"
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"
SIDES = ("window_size_left", "window_size_right")
LENGTHS = ("max_seqlen_q", "max_seqlen_k")
SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DTYPE = torch.float64


def beta_of(release):
    return int(release.removeprefix("4.0.0b"))


class Package:
    """One release; its calls are kept as they were made.

    Attributes:
        release: Which one.
        calls: (function, arguments).
    """

    def __init__(self, release="4.0.0b36"):
        self.release = release
        self.calls = []
        self._beta = beta_of(release)

    @property
    def modules(self):
        found = ModuleType(MODULE)
        for name, run in ((FORWARD, self._forward), (BACKWARD, self._backward)):
            setattr(found, name, self._function(name, run))
        return {"flash_attn": ModuleType("flash_attn"), MODULE.rpartition(".")[0]: ModuleType("cute")} | {
            MODULE: found
        }

    def only(self, function):
        (given,) = (given for name, given in self.calls if name == function)
        return given

    def _function(self, name, run):
        signature = RECORDED[self.release][name]

        def function(*args, **given):
            assert not args, "everything is passed by name"
            signature.bind(**given)
            self.calls.append((name, given))
            _check(given)
            return run(given)

        function.__signature__ = signature
        return function

    def _forward(self, given):
        attention, tensors, cuts = self._read(given)
        assert given["return_lse"] is True, "without it there is no log-sum-exp in inference"
        run = attention.forward(*tensors) if cuts is None else ragged_forward(attention, tensors, cuts)
        out, lse = self._with_sink(*run, given.get("learnable_sink"))
        more = 2 * (self._beta >= 19) + (self._beta >= 33)
        return out.to(_DTYPE), lse, *[None] * more

    def _with_sink(self, out, lse, sink):
        if sink is None:
            return out, lse
        assert sink.shape == (out.shape[-2],)
        assert sink.dtype in (SINK_DTYPES if self._beta >= 26 else (torch.bfloat16,))
        total = torch.logaddexp(lse, sink.float()[:, None])
        kept = torch.exp(lse - total).nan_to_num(0.0)
        return out * kept.transpose(-2, -1)[..., None], total

    def _backward(self, given):
        assert "learnable_sink" not in given, "a fourth result, from release 26 on"
        attention, tensors, cuts = self._read(given)
        lse, read = given["lse"], (given["out"], given["lse"], given["dout"])
        heads, rows = tensors[0].shape[-2], tensors[0].shape[:-2]
        assert lse.shape == ((heads, *rows) if cuts is not None else (rows[0], heads, rows[1]))
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        assert all(_is_readable(t) for t in (given["out"], given["dout"]))
        if cuts is None:
            grads = attention.backward(*tensors, *read)
        else:
            grads = ragged_backward(attention, tensors, *read, cuts)
        return tuple(grad.to(_DTYPE) for grad in grads)

    def _read(self, given):
        """Return the attention as the package reads it, the tensors and the sequences."""
        left, right = (given.get(n) for n in SIDES)
        right = 0 if given["causal"] else right
        # Older releases open a window whose sides are negative together, newer ones take them literally.
        assert all(side is None or side >= 0 for side in (left, right))
        sides = (-1 if side is None else side for side in (left, right))
        tensors = [given[n] for n in "qkv"]
        attention = Attention(given["softmax_scale"], *sides, given["softcap"], empty=-math.inf)
        if "cu_seqlens_q" not in given:
            assert not {"cu_seqlens_k", "seqused_k", *LENGTHS} & given.keys()
            return attention, tensors, None
        cuts = cuts_of(given["cu_seqlens_q"], given["cu_seqlens_k"], given.get("seqused_k"))
        assert max(rows.stop - rows.start for rows, _ in cuts) <= given["max_seqlen_q"]
        assert max(keys.stop - keys.start for _, keys in cuts) <= given["max_seqlen_k"]
        return attention, tensors, cuts


def _is_readable(tensor):
    """Return whether rows can be read by loads of 16 bytes, of 16-bit elements."""
    *rows, last = tensor.stride()
    return last == 1 and not any(s % 8 for s in rows) and tensor.data_ptr() % 16 == 0


def _check(given):
    for name in ("causal", "deterministic", "return_lse", "pack_gqa"):
        assert isinstance(given.get(name, False), bool)
    for name in (*LENGTHS, *SIDES, "num_splits"):
        assert type(given.get(name, 0)) is int
    for name in ("softmax_scale", "softcap"):
        assert type(given[name]) is float
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        sums = given.get(name)
        assert sums is None or (sums.dtype == torch.int32 and sums.stride(0) == 1)
    assert None not in given.values(), "what a call does not have is left out"
