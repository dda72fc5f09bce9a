"""FA4: the kernels of flash-attn-4, which CuTe DSL compiles at the first call of every configuration.

Read in releases 4.0.0b3 to b36 (flash_attn/cute/interface.py): layouts (batch, seqlen, num_heads, head_dim)
and (total, num_heads, head_dim); diagonals end at the bottom right; an open side of a window is None, never
-1, which newer releases take literally; the log-sum-exp is natural, -inf for rows with no key. The functions
below its public ones are called, because those take an output and a log-sum-exp of any origin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from attnroute.executors.packages.external import External
from attnroute.executors.packages.flash_attn import check_sides, readable
from attnroute.executors.packages.request import TENSORS, Gradients, Launched, Request
from attnroute.executors.prepare.sink import sink_gradient
from attnroute.memory import INSTALLED, cached

if TYPE_CHECKING:
    from torch import Tensor

_FORWARD, _BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"


@cached(1, INSTALLED)
def _interface() -> Any:
    return import_module("flash_attn.cute.interface")


@cached(16, INSTALLED)
def _names(function: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(_interface(), function)).parameters)


class _Kernel:
    """Both functions on one request."""

    gives_infinity = False
    in_place = True

    def forward(self, request: Request) -> Launched:
        """Launch the forward."""
        return self.bound(request).forward(request)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward, which makes its weights from the log-sum-exp and so needs no sink."""
        return self.bound(request).backward(request, result, grad_out)

    def bound(self, request: Request) -> _Bound:
        """Return both functions with all arguments but tensors."""
        return _bound(request.is_ragged, request.numbers)


class _Bound:
    """`_Kernel` for requests with these numbers."""

    def __init__(self, is_ragged: bool, numbers: tuple[Any, ...]) -> None:
        self._given = (is_ragged, numbers)
        self._forward = _function(_FORWARD, *self._given)
        self._backward: Callable[..., Any] | None = None

    def forward(self, request: Request) -> Launched:
        given = _sequences(request)
        if request.sink is not None:
            given["learnable_sink"] = _as_sinks(request.sink)
        out, lse, *_ = self._forward(q=request.query, k=request.key, v=request.value, **given)
        return Launched(out, lse)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        run = self._backward
        if run is None:
            # Inference does without it.
            run = self._backward = _function(_BACKWARD, *self._given)
        query, key, value, *_ = run(
            q=request.query,
            k=request.key,
            v=request.value,
            out=readable(result.out),
            dout=readable(grad_out),
            lse=result.lse.contiguous(),
            **_sequences(request),
        )
        return Gradients(query, key, value, _sink_gradient(request, result, grad_out))


@cached(1024, INSTALLED)
def _bound(is_ragged: bool, numbers: tuple[Any, ...]) -> _Bound:
    return _Bound(is_ragged, numbers)


def _as_sinks(sink: Tensor) -> Tensor:
    """Return sinks as releases with a gradient for them take them: 16 bits wide or float32."""
    sink = sink.detach()
    return sink if sink.dtype in (torch.float16, torch.bfloat16) else sink.float()


def _sink_gradient(request: Request, result: Launched, grad_out: Tensor) -> Tensor | None:
    """Return what the sink took from all rows, from the log-sum-exp: that is the same in every release."""
    if request.sink is None:
        return None
    # A sink of -inf is nothing, in a row with no key as well, where the difference would be NaN.
    lse = result.lse.masked_fill(result.lse == -torch.inf, torch.inf)
    grad, out = (t.transpose(-3, -2) for t in (grad_out, result.out))
    if request.is_ragged:
        grad, out, lse = grad[None], out[None], lse[None]
    return sink_gradient(grad, out, lse, request.sink.float())


def _sequences(request: Request) -> dict[str, Any]:
    """Return the tensors of a ragged batch; what a request does not have is left out."""
    if request.cu_seqlens_q is None:
        return {}
    given = {"cu_seqlens_q": request.cu_seqlens_q, "cu_seqlens_k": request.cu_seqlens_kv}
    return given if request.used_kv is None else {**given, "seqused_k": request.used_kv}


def _function(function: str, is_ragged: bool, numbers: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function of the package with all arguments but tensors."""
    request = Request(*[None] * TENSORS, *numbers)  # type: ignore[arg-type]
    settings = _settings(request, is_ragged=is_ragged)
    if function == _FORWARD:
        settings |= {"num_splits": int(request.option("num_splits") or 1), "return_lse": True}
        if (pack := request.option("pack_gqa")) is not None:
            settings["pack_gqa"] = pack == "True"
    else:
        settings["deterministic"] = request.deterministic
    missing = [name for name in settings if name not in _names(function)]
    if missing:
        msg = (
            f"backend fa4 requires {function} to take {', '.join(missing)} for this call; got a release of"
            " flash-attn-4 that does not; install another one, or pass another backend."
        )
        raise TypeError(msg)
    return partial(getattr(_interface(), function), **settings)


def _settings(request: Request, *, is_ragged: bool) -> dict[str, Any]:
    """Return the arguments that both functions have and that are no tensors; an open side is left out."""
    check_sides(request)
    causal = request.is_causal
    given = {
        "max_seqlen_q": request.max_seqlen_q if is_ragged else None,
        "max_seqlen_k": request.max_seqlen_kv if is_ragged else None,
        "window_size_left": None if causal else request.left,
        "window_size_right": None if causal else request.right,
    }
    return {
        "softmax_scale": request.scale,
        "causal": causal,
        "softcap": request.softcap,
        **{name: value for name, value in given.items() if value is not None},
    }


executor = External("fa4", _Kernel()).executor
