"""CUDNN_FE: the attention operators of NVIDIA's cuDNN frontend, `cudnn::sdpa_fwd` and `cudnn::sdpa_bwd`.

Read in nvidia-cudnn-frontend 1.29 to 1.32 (cudnn/sdpa/fwd/torch_op.py): batches are (batch, num_heads,
seqlen, head_dim) of any strides or (total, num_heads, head_dim); `window_left` counts the diagonal's key as
well; the log-sum-exp is natural and includes sinks; a ragged backward wants it padded and knows no sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnroute.executors import ragged
from attnroute.executors.packages.cudnn_band import (
    band_of,
    sink_gradient,
    without_minus_infinity,
    zero_unattended_gradients,
    zero_unattended_rows,
)
from attnroute.executors.packages.external import External
from attnroute.executors.packages.request import TENSORS, Gradients, Launched, Request, to_bhsd
from attnroute.memory import INSTALLED, cached

_OPEN = -1


@cached(1, INSTALLED)
def _operators() -> Any:
    import_module("cudnn.sdpa.fwd.torch_op")
    return torch.ops.cudnn


class _Kernel:
    """Both operators on one request; between them stands nothing but output and log-sum-exp."""

    heads_first = True

    def forward(self, request: Request) -> Launched:
        """Launch `cudnn::sdpa_fwd`."""
        run = _bound("sdpa_fwd", request.is_ragged, request.numbers)
        given = _sequences(request)
        if request.sink is not None:
            given["sinks"] = request.sink.float()
        # The operator has an autograd layer of Python, which records nothing here and costs the host time.
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = run(*_heads_first(request, *request[:3]), **given)
        if not request.is_ragged:
            (out,) = _heads_first(request, out)
            return Launched(out, lse.squeeze(-1))
        return zero_unattended_rows(request, Launched(out, lse.squeeze(-1).T))

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch `cudnn::sdpa_bwd`, which makes its weights from the log-sum-exp and so needs no sink."""
        lse = without_minus_infinity(request, result.lse)
        run = _bound("sdpa_bwd", request.is_ragged, request.numbers)
        read = _heads_first(request, grad_out, *request[:3], result.out)
        made = run(*read, _rows(request, lse), **_sequences(request))
        query, key, value = _heads_first(request, *made)
        grads = Gradients(query, key, value, sink_gradient(request, result.out, lse, grad_out))
        return zero_unattended_gradients(request, grads) if request.is_ragged else grads


def _heads_first(request: Request, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of a padded batch in layout bhsd, which is its own inverse."""
    if request.is_ragged or request.heads_first:
        return tensors
    return tuple(to_bhsd(request, t) for t in tensors)


def _rows(request: Request, lse: Tensor) -> Tensor:
    """Return the log-sum-exp as (batch or sequences, num_heads_q, longest sequence)."""
    if request.cu_seqlens_q is None:
        return lse.contiguous()
    return ragged.per_sequence(lse, request.cu_seqlens_q, request.max_seqlen_q)


@cached(1024, INSTALLED)
def _bound(operator: str, is_ragged: bool, numbers: tuple[Any, ...]) -> Callable[..., Any]:
    """Return an operator with all arguments but tensors."""
    request = Request(*[None] * TENSORS, *numbers)  # type: ignore[arg-type]
    settings = _settings(request, is_ragged=is_ragged)
    if operator == "sdpa_fwd":
        settings["return_lse"] = True
    else:
        settings["is_deterministic"] = request.deterministic
    return partial(getattr(_operators(), operator), **settings)


def _settings(request: Request, *, is_ragged: bool) -> dict[str, Any]:
    """Return the arguments that both operators have and that are no tensors."""
    band = band_of(request, is_ragged=is_ragged)
    settings = {
        "attn_scale": request.scale,
        "is_causal": band.right == 0,
        "causal_bottom_right": band.bottom_right,
        "window_left": _OPEN if band.left is None else band.left + 1,
        "window_right": band.right or _OPEN,
    }
    if is_ragged:
        settings |= {"max_seqlen_q": request.max_seqlen_q, "max_seqlen_kv": request.max_seqlen_kv}
    return settings


def _sequences(request: Request) -> dict[str, Any]:
    if not request.is_ragged:
        return {}
    sums_q, sums_kv = _sums(request)
    return {"cu_seqlens_q": sums_q, "cu_seqlens_kv": sums_kv}


def _sums(request: Request) -> tuple[Tensor | None, Tensor | None]:
    """Return prefix sums; keys that are left out become sequences without a query behind the others."""
    sums_q, sums_kv, used = request.cu_seqlens_q, request.cu_seqlens_kv, request.used_kv
    if sums_q is None or sums_kv is None or used is None:
        return sums_q, sums_kv
    ends_q = torch.stack([sums_q[1:], sums_q[1:]], 1).flatten()
    ends_kv = torch.stack([sums_kv[:-1] + used, sums_kv[1:]], 1).flatten()
    return torch.cat([sums_q[:1], ends_q]), torch.cat([sums_kv[:1], ends_kv])


executor = External("cudnn_fe", _Kernel()).executor
