"""CUDNN_FE: the attention operators of NVIDIA's cuDNN frontend, `cudnn::sdpa_fwd` and `cudnn::sdpa_bwd`.

Read in nvidia-cudnn-frontend 1.29 to 1.32 (cudnn/sdpa/fwd/torch_op.py): batches are (batch, num_heads,
seqlen, head_dim) of any strides or (total, num_heads, head_dim); `window_left` counts the diagonal's key as
well; the log-sum-exp is natural and includes sinks; a ragged backward wants it padded and knows no sinks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnroute.executors import ragged
from attnroute.executors.packages import cudnn_graph
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
        """Launch the forward."""
        return self.bound(request).forward(request)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward, which makes its weights from the log-sum-exp and so needs no sink."""
        return self.bound(request).backward(request, result, grad_out)

    def bound(self, request: Request) -> _Bound:
        """Return both operators with all arguments but tensors."""
        return _bound(request.is_ragged, request.numbers)


class _Bound:
    """`_Kernel` for requests with these numbers: a graph for padded batches, the operator for others."""

    def __init__(self, is_ragged: bool, numbers: tuple[Any, ...]) -> None:
        request = Request(*[None] * TENSORS, *numbers)  # type: ignore[arg-type]
        self._settings = _settings(request, is_ragged=is_ragged)
        lengths = {"max_seqlen_q": request.max_seqlen_q, "max_seqlen_kv": request.max_seqlen_kv}
        self._arguments = {**self._settings._asdict(), **(lengths if is_ragged else {})}

    def forward(self, request: Request) -> Launched:
        sink = None if request.sink is None else request.sink.float()
        tensors = _heads_first(request, *request[:3])
        found = None if request.is_ragged else cudnn_graph.forward(self._settings, tensors, sink)
        if found is None:
            given = _sequences(request) if sink is None else {**_sequences(request), "sinks": sink}
            # The operator has an autograd layer of Python, which records nothing here and costs time.
            with torch._C._AutoDispatchBelowAutograd():
                found = _operators().sdpa_fwd(*tensors, return_lse=True, **self._arguments, **given)
        out, lse = found
        if not request.is_ragged:
            (out,) = _heads_first(request, out)
            return Launched(out, lse.squeeze(-1))
        return zero_unattended_rows(request, Launched(out, lse.squeeze(-1).T))

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        lse = without_minus_infinity(request, result.lse)
        rows, deterministic = _rows(request, lse), request.deterministic
        grad, *tensors = _heads_first(request, grad_out, *request[:3], result.out)
        made = None
        if not request.is_ragged:
            given = tuple(tensors)
            made = cudnn_graph.backward(self._settings, given, rows, grad, deterministic=deterministic)
        if made is None:
            sums = _sequences(request)
            run = _operators().sdpa_bwd
            made = run(grad, *tensors, rows, is_deterministic=deterministic, **self._arguments, **sums)
        query, key, value = _heads_first(request, *made)
        grads = Gradients(query, key, value, sink_gradient(request, result.out, lse, grad_out))
        return zero_unattended_gradients(request, grads) if request.is_ragged else grads


@cached(1024, INSTALLED)
def _bound(is_ragged: bool, numbers: tuple[Any, ...]) -> _Bound:
    return _Bound(is_ragged, numbers)


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


def _settings(request: Request, *, is_ragged: bool) -> cudnn_graph.Settings:
    """Return the arguments that both operators have and that are no tensors."""
    band = band_of(request, is_ragged=is_ragged)
    return cudnn_graph.Settings(
        attn_scale=request.scale,
        is_causal=band.right == 0,
        causal_bottom_right=band.bottom_right,
        window_left=_OPEN if band.left is None else band.left + 1,
        window_right=band.right or _OPEN,
    )


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
