"""TE: TransformerEngine's fused attention for 16-bit types, which is cuDNN's, without its module around it.

Read in transformer-engine 2.12 to 2.20 (pytorch/cpp_extensions/fused_attn.py and the C++ behind it): tensors
are taken to be contiguous whatever their strides say; ragged batches need a padding mask and offsets beside
their prefix sums; the log-sum-exp is natural, includes sinks and is the first auxiliary tensor.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnroute.executors import ragged
from attnroute.executors.packages.cudnn_band import (
    Band,
    band_of,
    sink_gradient,
    without_minus_infinity,
    zero_unattended_gradients,
    zero_unattended_rows,
)
from attnroute.executors.packages.external import External
from attnroute.executors.packages.request import Gradients, Launched, Request
from attnroute.masks.lowered import sequences
from attnroute.memory import INSTALLED, cached

_OPEN = -1
_IMPLIED = frozenset({"o_format", "do_format", "dqkv_layout"})
"""Arguments that releases before 2.15 do not have: outputs and gradients were in the inputs' layout."""


@cached(1, INSTALLED)
def _module() -> Any:
    return import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")


@cached(16, INSTALLED)
def _parameters(function: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(_module(), function)).parameters)


@cached(8, INSTALLED)
def _dtype(dtype: torch.dtype) -> Any:
    return import_module("transformer_engine.pytorch.constants").TE_DType[dtype]


class _Kernel:
    """Both functions on one request.

    A ragged batch's log-sum-exp is per token or padded, as cuDNN and the device want it. The backward wants
    what the forward gave, so its form is noted.
    """

    def __init__(self) -> None:
        self._is_padded: dict[torch.device, bool] = {}

    def forward(self, request: Request) -> Launched:
        """Launch the forward, of the training kind where weights are dropped: the other kind drops none."""
        out, auxiliary, *_ = _call(
            "fused_attn_fwd",
            is_training=request.training or request.dropout_p > 0.0,
            **_settings(request),
            **_softmax(request),
        )
        lse, state = auxiliary[0].squeeze(-1), auxiliary[1]
        state = state if request.dropout_p else None
        if request.cu_seqlens_q is None:
            return Launched(out, lse, state)
        self._is_padded[out.device] = lse.dim() == 3
        lse = per_token(lse, request.cu_seqlens_q, request.query.shape[0])
        return zero_unattended_rows(request, Launched(out, lse, state))

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward, which makes its weights from the log-sum-exp and so needs no sink."""
        lse = without_minus_infinity(request, result.lse)
        state = lse.new_zeros(2, dtype=torch.int64) if result.state is None else result.state
        query, key, value, *_ = _call(
            "fused_attn_bwd",
            o=result.out.contiguous(),
            d_o=grad_out.contiguous(),
            aux_ctx_tensors=[self._statistics(request, lse), state],
            deterministic=request.deterministic,
            do_format=_format(request),
            dqkv_layout=_layout(request),
            **_settings(request),
        )
        grads = Gradients(query, key, value, sink_gradient(request, result.out, lse, grad_out))
        return zero_unattended_gradients(request, grads) if request.is_ragged else grads

    def _statistics(self, request: Request, lse: Tensor) -> Tensor:
        """Return the log-sum-exp in the form of the forward, whose last dimension is 1."""
        if request.cu_seqlens_q is None:
            return lse.contiguous()[..., None]
        padded = self._is_padded.get(lse.device)
        if padded is None:
            msg = (
                "te's backward requires a forward before it, whose form of the log-sum-exp it takes; got none"
                f" on {lse.device} in this process; run the forward here too."
            )
            raise RuntimeError(msg)
        if padded:
            return ragged.per_sequence(lse, request.cu_seqlens_q, request.max_seqlen_q)[..., None]
        return lse.T.contiguous()[..., None]


def _call(name: str, **arguments: Any) -> Any:
    """Call a function of the package, whichever release it is."""
    names = _parameters(name)
    if "dqkv_dtype" in names:
        arguments["dqkv_dtype"] = _dtype(arguments["q"].dtype)
    missing = sorted(arguments.keys() - names - _IMPLIED)
    if missing:
        msg = (
            f"transformer-engine requires {name} to take {', '.join(missing)}; got a release that does not;"
            " install one that the tables name."
        )
        raise TypeError(msg)
    return getattr(_module(), name)(**{n: value for n, value in arguments.items() if n in names})


def _settings(request: Request) -> dict[str, Any]:
    """Return the arguments that both functions have."""
    band = band_of(request, is_ragged=request.is_ragged)
    return {
        "max_seqlen_q": request.max_seqlen_q,
        "max_seqlen_kv": request.max_seqlen_kv,
        **_sums(request),
        "q": request.query.contiguous(),
        "k": request.key.contiguous(),
        "v": request.value.contiguous(),
        "fake_dtype": request.query.dtype,
        "fused_attention_backend": _module().FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": request.scale,
        "dropout": request.dropout_p,
        "qkv_layout": _layout(request),
        "o_format": _format(request),
        "attn_mask_type": _mask_type(request, band),
        "window_size": tuple(_OPEN if side is None else side for side in (band.left, band.right)),
        "bottom_right_diagonal": band.bottom_right,
    }


def _sums(request: Request) -> dict[str, Tensor | None]:
    """Return prefix sums of the lengths, and where a ragged batch's sequences begin."""
    starts_q, starts_kv, used = request.cu_seqlens_q, request.cu_seqlens_kv, request.used_kv
    if starts_q is None or starts_kv is None:
        batch, device = request.query.shape[0], request.query.device
        rows = (sequences.whole_rows(batch, n, device) for n in (request.max_seqlen_q, request.max_seqlen_kv))
        sums_q, sums_kv = rows
    else:
        sums_q, sums_kv = starts_q, starts_kv if used is None else _from_zero(used)
    return {
        "cu_seqlens_q": sums_q,
        "cu_seqlens_kv": sums_kv,
        "cu_seqlens_q_padded": starts_q,
        "cu_seqlens_kv_padded": starts_kv,
    }


def _from_zero(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def _softmax(request: Request) -> dict[str, Any]:
    if request.sink is None:
        return {"softmax_type": "vanilla", "softmax_offset": None}
    return {"softmax_type": "learnable", "softmax_offset": request.sink.float().view(1, -1, 1, 1)}


def _mask_type(request: Request, band: Band) -> str:
    causal = "" if band.right != 0 else "causal_bottom_right" if band.bottom_right else "causal"
    if not request.is_ragged:
        return causal or "no_mask"
    return f"padding_{causal}" if causal else "padding"


def _format(request: Request) -> str:
    return "thd" if request.is_ragged else "bshd"


def _layout(request: Request) -> str:
    return "_".join([_format(request)] * 3)


def per_token(lse: Tensor, sums_q: Tensor, total: int) -> Tensor:
    """Return (num_heads_q, total) of (total, num_heads_q) or (sequences, num_heads_q, longest sequence)."""
    return lse.T if lse.dim() == 2 else ragged.per_token(lse, sums_q, total)


executor = External("te", _Kernel()).executor
