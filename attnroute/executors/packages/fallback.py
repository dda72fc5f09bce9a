"""Runs a request on the chunked backend where the package refused to launch its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnroute.executors.chunked import from_lse
from attnroute.executors.packages.request import Gradients, to_bhsd
from attnroute.executors.protocol import Inputs
from attnroute.executors.ragged import places
from attnroute.masks.lowered.form import LoweredMask
from attnroute.masks.lowered.sequences import Tokens, diagonal

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.packages.request import Launched, Request


def forward(request: Request) -> tuple[Tensor, Tensor]:
    """Run a request that its own kernel refused; without dropout.

    Returns:
        Output and log-sum-exp in the layout of the request.
    """
    out, lse = from_lse.forward(inputs_of(request))
    return _rows(request, out), lse[0] if request.is_ragged else lse


def backward(request: Request, result: Launched, grad_out: Tensor) -> Gradients:
    """Return the gradients of a request, whatever kernel ran forward; without dropout."""
    lse = result.lse[None] if request.is_ragged else result.lse
    out, grad = (_heads_first(request, t) for t in (result.out, grad_out))
    wanted = (True, True, True, request.sink is not None)
    query, key, value, sink = from_lse.gradients(inputs_of(request), out, lse, grad, wanted)
    made = [_rows(request, t) for t in (query, key, value) if t is not None]
    return Gradients(made[0], made[1], made[2], None if sink is None else sink.float())


def inputs_of(request: Request) -> Inputs:
    """Return a request as the inputs of an executor, layout bhsd; a ragged batch is one row of sequences."""
    query, key, value = (_heads_first(request, t) for t in (request.query, request.key, request.value))
    return Inputs(
        query,
        key,
        value,
        _ragged_mask(request) if request.is_ragged else _band(request, request.offset),
        scale=request.scale,
        softcap=request.softcap,
        sink=request.sink,
        alibi_slopes=request.alibi_slopes,
    )


def _band(request: Request, offset: int) -> LoweredMask:
    left, right = request.left, request.right
    low, high = None if left is None else offset - left, None if right is None else right + offset
    return LoweredMask(band_lo=low, band_hi=high)


def _ragged_mask(request: Request) -> LoweredMask:
    sums_q, sums_kv, used = request.cu_seqlens_q, request.cu_seqlens_kv, request.used_kv
    assert sums_q is not None
    assert sums_kv is not None
    queries = _tokens(sums_q, request.query.shape[0])
    keys = _tokens(sums_kv, request.key.shape[0])
    keep = None
    lengths_kv = sums_kv.diff()
    if used is not None:
        at = torch.arange(request.key.shape[0], device=used.device) - sums_kv[keys.ids[0]]
        # Keys before the first sequence, as padding at the left leaves them, are counted from its start too.
        keep, lengths_kv = ((at >= 0) & (at < used[keys.ids[0]]))[None], used
    band = _band(request, 0)
    ends = None
    if not band.is_full:
        # A sequence's diagonal ends with its last query and its last key in use.
        last = sums_kv[:-1] + lengths_kv
        ends = diagonal(queries, Tokens(torch.cat([last[:1], last]), keys.ids), "bottom_right")
    return LoweredMask(
        band_lo=band.band_lo,
        band_hi=band.band_hi,
        key_keep=keep,
        document_ids_q=queries.ids,
        document_ids_kv=keys.ids,
        diagonal=ends,
    )


def _tokens(sums: Tensor, total: int) -> Tokens:
    ids, _ = places(sums, total)
    return Tokens(sums, ids[None])


def _heads_first(request: Request, tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None] if request.is_ragged else to_bhsd(request, tensor)


def _rows(request: Request, tensor: Tensor) -> Tensor:
    """Undo `_heads_first`."""
    return tensor[0].transpose(0, 1) if request.is_ragged else to_bhsd(request, tensor)
