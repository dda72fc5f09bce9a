"""FA2: the package flash-attn, releases 2.5 to 2.8, below its autograd functions.

Read in flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of these releases: windows end at
the bottom right, a row with no key has +inf for its log-sum-exp, gradients are written into tensors that are
given. From 2.7 on the functions are custom operators and a window is two arguments. Releases before 2.6 have
no softcap and pad the log-sum-exp of ragged batches.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from attnroute.executors import ragged
from attnroute.executors.packages.external import External
from attnroute.executors.packages.flash_attn import Sides, readable, sides_of
from attnroute.executors.packages.request import Gradients, Launched, Request
from attnroute.masks.lowered import sequences
from attnroute.memory import INSTALLED, cached

_NEUTRAL: dict[str, Any] = {"softcap": 0.0, "seqused_k": None}
"""Values of arguments at which a release without the argument computes the same."""
_UNUSED = ("block_table",)
"""Arguments without a default in some releases, of things that no request has."""


@cached(1, INSTALLED)
def _module() -> Any:
    return import_module("flash_attn.flash_attn_interface")


@cached(16, INSTALLED)
def _parameters(function: str) -> frozenset[str]:
    found = getattr(_module(), function)
    operator = getattr(found, "_opoverload", None)
    if operator is None:
        return frozenset(inspect.signature(found).parameters)
    return frozenset(argument.name for argument in operator._schema.arguments)


class _Kernel:
    """The functions for padded and for ragged batches on one request."""

    def forward(self, request: Request) -> Launched:
        """Launch the forward."""
        if _must_be_ragged(request):
            result = self.forward(_as_sequences(request))
            batch = request.query.shape[0]
            lse = result.lse.unflatten(1, (batch, -1)).transpose(0, 1)
            return result._replace(out=result.out.unflatten(0, (batch, -1)), lse=lse)
        sides = sides_of(request)
        name = "_flash_attn_varlen_forward" if request.is_ragged else "_flash_attn_forward"
        more = {"seqused_k": request.used_kv} if request.is_ragged else {}
        found = _call(name, **_settings(request, sides), return_softmax=False, **more)
        # Four values, or eight with the tensors as the kernel read them between the output and the others.
        out, (lse, _, state) = found[0], found[-3:]
        if request.cu_seqlens_q is not None:
            lse = ragged.per_token(lse, request.cu_seqlens_q, request.query.shape[0])
        shift = _alibi_shift(request, sides)
        lse = lse if shift is None else lse - shift
        return Launched(out, lse, state if request.dropout_p else None)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward."""
        if _must_be_ragged(request):
            return self._backward_of_rows(request, result, grad_out)
        if request.used_kv is not None:
            msg = (
                "fa2's backward requires that every key is in use; got seqused_k, which only its forward"
                " takes; the decision promised inference."
            )
            raise ValueError(msg)
        sides = sides_of(request)
        shift = _alibi_shift(request, sides)
        lse = result.lse if shift is None else result.lse + shift
        grads = Gradients(*(torch.empty_like(t, memory_format=torch.contiguous_format) for t in request[:3]))
        name = "_flash_attn_varlen_backward" if request.is_ragged else "_flash_attn_backward"
        _call(
            name,
            dout=readable(grad_out),
            out=readable(result.out),
            softmax_lse=_as_forward_gives(request, lse),
            dq=grads.query,
            dk=grads.key,
            dv=grads.value,
            deterministic=request.deterministic,
            rng_state=result.state,
            **_settings(request, sides),
        )
        return grads

    def _backward_of_rows(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        result = result._replace(out=result.out.flatten(0, 1), lse=result.lse.transpose(0, 1).flatten(1))
        grads = self.backward(_as_sequences(request), result, grad_out.flatten(0, 1))
        batch = request.query.shape[0]
        return Gradients(*(g.unflatten(0, (batch, -1)) for g in grads[:3]))


def _must_be_ragged(request: Request) -> bool:
    """Return whether the function for padded batches would leave out keys at the right of a window.

    It opens a right side of seqlen_kv or more keys, and ends an open one beside a closed left side after
    seqlen_kv keys. Queries at the top reach further where there are more of them than keys. The function for
    ragged batches goes by an upper bound that is ours to choose. Source: mha_fwd and set_params_fprop.
    """
    if request.is_ragged or request.max_seqlen_q <= request.max_seqlen_kv:
        return False
    sides = sides_of(request)
    return not sides.are_open and not 0 <= sides.right < request.max_seqlen_kv


def _as_sequences(request: Request) -> Request:
    """Return a padded request as a ragged one, every row a sequence."""
    query, key, value = (t.flatten(0, 1) for t in request[:3])
    batch, device = request.query.shape[0], request.query.device
    return request._replace(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=sequences.whole_rows(batch, request.max_seqlen_q, device),
        cu_seqlens_kv=sequences.whole_rows(batch, request.max_seqlen_kv, device),
    )


def _call(name: str, **arguments: Any) -> Any:
    """Call a function of the package, whichever release it is."""
    names = _parameters(name)
    if "window_size" in names:
        arguments["window_size"] = (arguments.pop("window_size_left"), arguments.pop("window_size_right"))
    arguments |= {unused: None for unused in _UNUSED if unused in names}
    missing = [n for n in arguments if n not in names and not _is_neutral(n, arguments[n])]
    if missing:
        msg = (
            f"flash-attn requires {name} to take {', '.join(missing)}; got a release that does not; install"
            " one that the tables name."
        )
        raise TypeError(msg)
    return getattr(_module(), name)(**{n: value for n, value in arguments.items() if n in names})


def _is_neutral(name: str, value: Any) -> bool:
    return name in _NEUTRAL and not isinstance(value, Tensor) and value == _NEUTRAL[name]


def _settings(request: Request, sides: Sides) -> dict[str, Any]:
    """Return the arguments that all four functions have, and those of ragged batches."""
    settings = {
        "q": request.query,
        "k": request.key,
        "v": request.value,
        "dropout_p": request.dropout_p,
        "softmax_scale": request.scale,
        "causal": sides.is_causal,
        "window_size_left": sides.left,
        "window_size_right": sides.right,
        "softcap": request.softcap,
        "alibi_slopes": request.alibi_slopes,
    }
    if not request.is_ragged:
        return settings
    longest_q, longest_kv = _bounds(request, sides)
    return settings | {
        "cu_seqlens_q": request.cu_seqlens_q,
        "cu_seqlens_k": request.cu_seqlens_kv,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_kv,
    }


def _bounds(request: Request, sides: Sides) -> tuple[int, int]:
    """Return upper bounds of queries and keys under which the kernel reads window and sequences rightly."""
    longest_q, longest_kv = request.max_seqlen_q, request.max_seqlen_kv
    if not sides.are_open:
        longest_kv = max(longest_kv, longest_q)
    sums_q = cast("Tensor", request.cu_seqlens_q)
    if longest_q == 1 and request.query.shape[0] != sums_q.shape[0] - 1:
        # With a bound of one the kernel counts on one query in every sequence, empty ones included.
        longest_q = 2
    return longest_q, longest_kv


def _as_forward_gives(request: Request, lse: Tensor) -> Tensor:
    """Return the log-sum-exp in the layout of the release's own forward."""
    sums_q = request.cu_seqlens_q
    if sums_q is None or "softcap" in _parameters("_flash_attn_varlen_backward"):
        return lse.contiguous()
    return ragged.per_sequence(lse, sums_q, _bounds(request, sides_of(request))[0])


def _alibi_shift(request: Request, sides: Sides) -> Tensor | None:
    """Return what the kernel's log-sum-exp has too much with ALiBi, None without.

    Where the mask is causal the kernel adds ``slope * j``, not ``-slope * (i + seqlen_kv - seqlen_q - j)``:
    the softmax is the same, the log-sum-exp is not. Source: csrc/flash_attn/src/alibi.h.
    """
    if request.alibi_slopes is None or not sides.is_causal:
        return None
    diagonal = _diagonal(request)
    if not request.is_ragged:
        return request.alibi_slopes.reshape(-1, request.query.shape[-2], 1) * diagonal
    ids, _ = ragged.places(cast("Tensor", request.cu_seqlens_q), request.query.shape[0])
    slopes = request.alibi_slopes
    return (slopes[:, None] if slopes.dim() == 1 else slopes[ids].T) * diagonal


def _diagonal(request: Request) -> Tensor:
    """Return the key on each query's diagonal: (seqlen_q,), or (total_q,) of a ragged batch."""
    sums_q, sums_kv = request.cu_seqlens_q, request.cu_seqlens_kv
    if sums_q is None or sums_kv is None:
        return torch.arange(request.max_seqlen_q, device=request.query.device) + request.offset
    ids, places = ragged.places(sums_q, request.query.shape[0])
    lengths_kv = sums_kv.diff() if request.used_kv is None else request.used_kv
    return places + (lengths_kv - sums_q.diff())[ids]


executor = External("fa2", _Kernel()).executor
