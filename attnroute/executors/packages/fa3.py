"""FA3: the operators `flash_attn_3::fwd` and `::bwd` of flash-attn-3, which xformers has prebuilt as well.

Read in hopper/flash_api.cpp from May 2025, when its functions became operators, to release 3.0.0: windows end
at the bottom right, the log-sum-exp is natural and per token in ragged batches, gradients are written into
tensors that are given. Builds differ in which arguments have a default and in what the backward returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnroute.executors.packages.external import External
from attnroute.executors.packages.flash_attn import readable, sides_of
from attnroute.executors.packages.request import TENSORS, Gradients, Launched, Request
from attnroute.memory import INSTALLED, cached

_LIBRARIES = ("flash_attn_3._C", "xformers.flash_attn_3._C")
"""Modules that register the operators when they are imported."""

_TENSORS = {
    "fwd": ("q", "k", "v"),
    "bwd": ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
}
"""The first arguments of each operator, in their order in every build."""
_WITHOUT_GRADIENTS = 5
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@cached(1, INSTALLED)
def _operators() -> Any:
    """Return the namespace of the operators.

    They are registered at most once: a second library with the same operators ends the process.

    Raises:
        ImportError: No library has them.
    """
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        return torch.ops.flash_attn_3
    found = []
    for library in _LIBRARIES:
        try:
            import_module(library)
        except (ImportError, OSError) as error:
            found.append(f"{library}: {error}")
        else:
            return torch.ops.flash_attn_3
    msg = (
        f"fa3 requires flash-attn-3 or an xformers that has it; got {'; '.join(found)}; install one of them."
    )
    raise ImportError(msg)


@cached(16, INSTALLED)
def _arguments(operator: str) -> dict[str, bool]:
    """Return which arguments an operator has, and which of them must be given."""
    schema = getattr(_operators(), operator).default._schema
    return {a.name: not a.has_default_value() for a in schema.arguments}


@cached(1, INSTALLED)
def _makes_gradients() -> bool:
    """Return whether the backward makes gradients in the memory layout of the inputs, and returns them first.

    Builds whose backward returns five tensors do not return those that it was given.
    """
    return len(_operators().bwd.default._schema.returns) > _WITHOUT_GRADIENTS


class _Kernel:
    """Both operators on one request. A row with no key has -inf for its log-sum-exp."""

    gives_infinity = False
    in_place = True

    def forward(self, request: Request) -> Launched:
        """Launch the forward, over several splits of the keys only where nothing has to come out twice."""
        return self.bound(request).forward(request)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward, which writes no gradient of keys that are not in use."""
        return self.bound(request).backward(request, result, grad_out)

    def bound(self, request: Request) -> _Bound:
        """Return both operators with all arguments but tensors."""
        return _bound(request.is_ragged, request.numbers)


class _Bound:
    """`_Kernel` for requests with these numbers."""

    def __init__(self, is_ragged: bool, numbers: tuple[Any, ...]) -> None:
        self._given = (is_ragged, numbers)
        self._forward = _operator("fwd", *self._given)
        self._backward: Callable[..., Any] | None = None

    def forward(self, request: Request) -> Launched:
        out, lse, *_ = self._forward(*request[:3], **_sequences(request))
        return Launched(out, lse)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        run = self._backward
        if run is None:
            # Inference does without it.
            run = self._backward = _operator("bwd", *self._given)
        query, key, value, *_ = request
        given = (readable(grad_out), query, key, value, readable(result.out), result.lse.contiguous())
        if _makes_gradients() and query.is_contiguous() and key.is_contiguous() and value.is_contiguous():
            made = run(*given, **_sequences(request))
            return Gradients(made[0], made[1], made[2])
        make = torch.empty_like if request.used_kv is None else torch.zeros_like
        grads = Gradients(*[make(t, memory_format=torch.contiguous_format) for t in request[:3]])
        run(*given, *grads[:3], **_sequences(request))
        return grads


@cached(1024, INSTALLED)
def _bound(is_ragged: bool, numbers: tuple[Any, ...]) -> _Bound:
    return _Bound(is_ragged, numbers)


def _sequences(request: Request) -> dict[str, Tensor | None]:
    if request.cu_seqlens_q is None:
        return {}
    return {
        "cu_seqlens_q": request.cu_seqlens_q,
        "cu_seqlens_k": request.cu_seqlens_kv,
        "seqused_k": request.used_kv,
    }


def _operator(operator: str, is_ragged: bool, numbers: tuple[Any, ...]) -> Callable[..., Any]:
    """Return an operator with all arguments but tensors, whichever build it is from.

    What it must be given and no request has is None.
    """
    request = Request(*[None] * TENSORS, *numbers)  # type: ignore[arg-type]
    settings, names = _settings(request, is_ragged=is_ragged), _arguments(operator)
    if operator == "fwd":
        settings["num_splits"] = _splits(request)
    else:
        settings["deterministic"] = request.deterministic
    given = (*_TENSORS[operator], *settings, *_SEQUENCES)
    missing = [name for name in given if name not in names]
    if missing:
        msg = (
            f"flash-attn-3 requires its operator {operator} to take {', '.join(missing)}; got a build that"
            " does not; install release 3.0.0 or newer."
        )
        raise TypeError(msg)
    taken = _TENSORS[operator] + (_SEQUENCES if is_ragged else ())
    required = [name for name, is_required in names.items() if is_required and name not in taken]
    return partial(getattr(_operators(), operator), **(dict.fromkeys(required) | settings))


def _settings(request: Request, *, is_ragged: bool) -> dict[str, Any]:
    """Return the arguments that both operators have and that are no tensors."""
    sides = sides_of(request)
    lengths = {"max_seqlen_q": request.max_seqlen_q, "max_seqlen_k": request.max_seqlen_kv}
    return {
        **(lengths if is_ragged else {}),
        "softmax_scale": request.scale,
        "is_causal": sides.is_causal,
        "window_size_left": sides.left,
        "window_size_right": sides.right,
        "softcap": request.softcap,
    }


def _splits(request: Request) -> int:
    """Return over how many parts of the keys the forward is split; 0 lets the kernel choose."""
    if request.training or request.deterministic:
        return 1
    return int(request.option("num_splits") or 1)


executor = External("fa3", _Kernel()).executor
