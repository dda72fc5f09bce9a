"""chunked as the other half of a kernel: the backward pass, from an output and a log-sum-exp that it made.

Whatever kernel ran forward, its weights are exp(scores - lse). chunked makes the scores again block by block,
so it needs of the forward nothing but those two tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnroute.executors.aten import flash_ragged
from attnroute.executors.chunked import backward as chunked_backward
from attnroute.executors.chunked import operator as chunked_op
from attnroute.executors.chunked.call import Call, Saved, plain
from attnroute.executors.chunked.forward import run_forward
from attnroute.executors.chunked.run import limits_of, program_of
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.executors.packages.request import swapped
from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import LoweredMask
from attnroute.masks.lowered.sequences import Tokens, diagonal
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from attnroute.executors.packages.external import Gradients, Launched
    from attnroute.executors.packages.request import Request
    from attnroute.executors.protocol import Wanted


def forward(request: Request) -> tuple[Tensor, Tensor]:
    """Run a request that its own kernel refused; without dropout.

    Returns:
        Output and log-sum-exp in the layout of the request.
    """
    inputs = inputs_of(request)
    call, context = _call(inputs)
    with context:
        saved = run_forward(call)
    return _rows(request, saved.out), saved.lse[0] if request.is_ragged else saved.lse


def backward(request: Request, ran: Launched, grad_out: Tensor) -> Gradients:
    """Return the gradients of a request, whatever kernel ran forward; without dropout."""
    from attnroute.executors.packages.external import Gradients

    lse = ran.lse[None] if request.is_ragged else ran.lse
    out, grad = (_heads_first(request, t) for t in (ran.out, grad_out))
    wanted = (True, True, True, request.sink is not None)
    query, key, value, sink = gradients(inputs_of(request), out, lse, grad, wanted)
    made = [_rows(request, t) for t in (query, key, value) if t is not None]
    return Gradients(made[0], made[1], made[2], None if sink is None else sink.float())


def gradients(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Wanted
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and sink, None where none is wanted.

    Args:
        inputs: What the forward got, without dropout; its mask and scores hold no functions that train.
        out: (batch, num_heads_q, seqlen_q, head_dim_v), with the sink where there is one.
        lse: (batch, num_heads_q, seqlen_q), natural, with the sink; -inf or +inf in rows with no key.
        grad_out: As out.
        wanted: Which gradients to compute.
    """
    asked = chunked_backward.Wanted(*wanted[:3], bias=False, slopes=False, sink=wanted[3])
    row_max = lse.float().masked_fill(lse == torch.inf, -torch.inf)
    row_sum = torch.ones_like(row_max)
    if is_traced(inputs.query):
        arguments = chunked_op.arguments_of(*_described(inputs), seed=None)
        grad_lse = torch.zeros_like(row_max)
        found = iter(chunked_op.backward(*arguments, out, row_max, row_sum, grad_out, grad_lse, list(asked)))
        made = [next(found) if wants else None for wants in asked]
        return *made[:3], made[5]
    call, context = _call(inputs)
    with context:
        grads = chunked_backward.run_backward(call, Saved(out, row_max, row_sum), grad_out, None, asked)
    return grads.query, grads.key, grads.value, grads.sink


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
        places = torch.arange(request.key.shape[0], device=used.device) - sums_kv[keys.ids[0]]
        # Keys before the first sequence, as padding at the left leaves them, are counted from its start too.
        keep, lengths_kv = ((places >= 0) & (places < used[keys.ids[0]]))[None], used
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
    ids, _ = flash_ragged.places(sums, total)
    return Tokens(sums, ids[None])


def _described(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Extras, Spec]:
    mask = inputs.mask
    spec = Spec(
        scale=inputs.query.shape[3] ** -0.5 if inputs.scale is None else float(inputs.scale),
        softcap=inputs.softcap,
        dropout_p=0.0,
        seed=0,
        limits=limits_of(mask),
        block_q=None,
        program=program_of(mask),
    )
    extras = Extras(
        slopes=inputs.alibi_slopes,
        sink=inputs.sink,
        key_keep=mask.key_keep,
        ids_q=mask.document_ids_q,
        ids_kv=mask.document_ids_kv,
        dense=mask.dense,
    )
    return inputs.query, inputs.key, inputs.value, extras, spec


def _call(inputs: Inputs) -> tuple[Call, Any]:
    query, key, value, extras, spec = _described(inputs)
    return Call.build(query, key, value, extras, spec), plain(query)


def _heads_first(request: Request, tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None] if request.is_ragged else swapped(request, tensor)


def _rows(request: Request, tensor: Tensor) -> Tensor:
    """Undo `_heads_first`."""
    return tensor[0].transpose(0, 1) if request.is_ragged else swapped(request, tensor)
