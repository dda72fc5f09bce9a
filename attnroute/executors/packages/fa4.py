"""FA4: the kernels of flash-attn-4, which CuTe DSL compiles at the first call of every configuration.

Read in releases 4.0.0b3 to b36 (flash_attn/cute/interface.py): layouts (batch, seqlen, num_heads, head_dim)
and (total, num_heads, head_dim); diagonals end at the bottom right; an open side of a window is None, never
-1, which newer releases take literally; the log-sum-exp is natural, -inf for rows with no key. The functions
below its public ones are called, because those take an output and a log-sum-exp of any origin.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from attnroute.executors.packages.external import External
from attnroute.executors.packages.flash_attn import check_sides, readable
from attnroute.executors.packages.request import Gradients, Launched
from attnroute.executors.prepare.sink import sink_gradient
from attnroute.memory import INSTALLED, cached

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.packages.request import Request


@cached(1, INSTALLED)
def _interface() -> Any:
    return import_module("flash_attn.cute.interface")


@cached(16, INSTALLED)
def _names(function: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(_interface(), function)).parameters)


class _Kernel:
    """Both functions on one request."""

    gives_infinity = False

    def forward(self, request: Request) -> Launched:
        """Launch the forward."""
        splits = {"num_splits": int(request.option("num_splits") or 1)}
        packs = {} if (pack := request.option("pack_gqa")) is None else {"pack_gqa": pack == "True"}
        sink = {} if request.sink is None else {"learnable_sink": _as_sinks(request.sink)}
        extras = {**splits, **packs, **sink}
        out, lse, *_ = _call("_flash_attn_fwd", **_inputs(request), **extras, return_lse=True)
        return Launched(out, lse)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward, which makes its weights from the log-sum-exp and so needs no sink."""
        grads = _call(
            "_flash_attn_bwd",
            **_inputs(request),
            out=readable(result.out),
            dout=readable(grad_out),
            lse=result.lse.contiguous(),
            deterministic=request.deterministic,
        )
        return Gradients(grads[0], grads[1], grads[2], _sink_gradient(request, result, grad_out))


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


def _inputs(request: Request) -> dict[str, Any]:
    """Return the arguments that both functions have; what a request does not have is left out."""
    check_sides(request)
    causal = request.is_causal
    given = {
        "cu_seqlens_q": request.cu_seqlens_q,
        "cu_seqlens_k": request.cu_seqlens_kv,
        "seqused_k": request.used_kv,
        "max_seqlen_q": request.max_seqlen_q if request.is_ragged else None,
        "max_seqlen_k": request.max_seqlen_kv if request.is_ragged else None,
        "window_size_left": None if causal else request.left,
        "window_size_right": None if causal else request.right,
    }
    return {
        "q": request.query,
        "k": request.key,
        "v": request.value,
        "softmax_scale": request.scale,
        "causal": causal,
        "softcap": request.softcap,
        **{name: value for name, value in given.items() if value is not None},
    }


def _call(function: str, **arguments: Any) -> Any:
    """Call a function of the package, everything by name."""
    missing = [name for name in arguments if name not in _names(function)]
    if missing:
        msg = (
            f"backend fa4 requires {function} to take {', '.join(missing)} for this call; got a release of"
            " flash-attn-4 that does not; install another one, or pass another backend."
        )
        raise TypeError(msg)
    return getattr(_interface(), function)(**arguments)


executor = External("fa4", _Kernel()).executor
