"""The repairs of a decision, done to tensors before and after the kernel runs.

`attnroute.engine.repairs` has the same list on plain data. Each is here once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.executors.prepare.clear import cleared
from attnroute.executors.prepare.masks import (
    BAND_LIMIT_BYTES,
    BANDS_KEPT,
    DENSE,
    as_given,
    dense_of,
    empty_rows_of,
)
from attnroute.executors.prepare.pair import run_pair
from attnroute.executors.prepare.pieces import BATCH, HEADS, pieces
from attnroute.executors.prepare.sink import run_with_sink
from attnroute.executors.protocol import Executor, Inputs, Output, Plan
from attnroute.executors.strides import is_packed
from attnroute.masks.tracing import address, is_tracing
from attnroute.memory import cached
from attnroute.vocabulary import GRID_LIMIT, HEAD_DIM_MULTIPLE, Repair

PER_TENSOR: Final[frozenset[Repair]] = frozenset({"expand_kv", "pad_head_dim", "contiguous"})
"""Repairs of query, key and value, whatever the mask."""


def run_repaired(executor: Executor, inputs: Inputs, plan: Plan) -> Output:
    """Make the repairs of the plan, run, and undo what they did to the shape."""
    if not plan.repairs:
        inputs.attn = as_given(inputs)
        return executor.run(inputs, plan)
    repairs = frozenset(plan.repairs)
    for limit, axis in (("split_batch", BATCH), ("split_heads", HEADS)):
        if limit in repairs:
            rest = replace(plan, repairs=tuple(r for r in plan.repairs if r != limit))
            return _split(executor, inputs, rest, axis)
    if inputs.scale is None and "pad_head_dim" in repairs:
        inputs.scale = inputs.query.shape[-1] ** -0.5
    if "materialize_alibi" in repairs:
        inputs.bias, inputs.alibi_slopes = _alibi(inputs), None
    nothing = inputs.mask.is_full and inputs.bias is None
    inputs.attn = dense_of(inputs, repairs) if repairs & DENSE and not nothing else as_given(inputs)
    head_dim_v = inputs.value.shape[-1]
    prepare_qkv(inputs, repairs)
    sink = inputs.sink if "sink_from_lse" in repairs else None
    if "backward_from_chunked" in repairs:
        out, lse = run_pair(executor, inputs, plan)
    elif sink is not None:
        out, lse = run_with_sink(executor, inputs, plan)
    else:
        out, lse = executor.run(inputs, plan)
    if out.shape[-1] != head_dim_v:
        out = out[..., :head_dim_v]
    if "zero_empty_rows" in repairs and inputs.attn is not None:
        out, lse = _without_empty_rows(out, lse, empty_rows_of(inputs, repairs), sink)
    return out, lse


def _without_empty_rows(out: Tensor, lse: Tensor | None, empty: Tensor, sink: Tensor | None) -> Output:
    """Give rows with no key zeros and the log-sum-exp of nothing, or of the sink alone."""
    out = out.masked_fill(empty, 0.0)
    if lse is None:
        return out, None
    rows = empty.squeeze(-1)
    if sink is None:
        return out, lse.masked_fill(rows, -math.inf)
    return out, torch.where(rows, sink.detach().to(lse.dtype)[:, None], lse)


def _alibi(inputs: Inputs) -> Tensor:
    """Return ``-slope * abs(i + seqlen_kv - seqlen_q - j)`` as a bias in the query's dtype."""
    query, slopes = inputs.query, cast("Tensor", inputs.alibi_slopes)
    sizes = (query.shape[2], inputs.key.shape[2], query.dtype, query.device)
    small = not is_tracing() and sizes[0] * sizes[1] * query.element_size() <= BAND_LIMIT_BYTES
    distances = _distances(*sizes) if small else _distances.__wrapped__(*sizes)
    return slopes.detach().to(query.dtype).view(-1, query.shape[1], 1, 1) * distances


@cached(BANDS_KEPT)
def _distances(seqlen_q: int, seqlen_kv: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return minus the distances to the diagonal at the bottom right, the same for all layers."""
    with torch.inference_mode(mode=False), torch.no_grad():
        queries = torch.arange(seqlen_kv - seqlen_q, seqlen_kv, dtype=dtype, device=device)
        keys = torch.arange(seqlen_kv, dtype=dtype, device=device)
        return (queries[:, None] - keys).abs_().neg_()


def prepare_qkv(inputs: Inputs, repairs: frozenset[str]) -> None:
    """Make the repairs of query, key and value."""
    if "clear_left_out" in repairs and inputs.mask.key_keep is not None:
        inputs.key, inputs.value = cleared(inputs)
    if "expand_kv" in repairs:
        group = inputs.query.shape[1] // inputs.key.shape[1]
        inputs.key = _expand(inputs.key, group)
        inputs.value = _expand(inputs.value, group)
    if "pad_head_dim" in repairs:
        inputs.query, inputs.key, inputs.value = (
            _padded(t) for t in (inputs.query, inputs.key, inputs.value)
        )
    if "contiguous" in repairs:
        pack = _tokens_packed if "to_varlen" in repairs else _packed
        inputs.query, inputs.key, inputs.value = (pack(t) for t in (inputs.query, inputs.key, inputs.value))


def _expand(tensor: Tensor, group: int) -> Tensor:
    """A real copy: key/value heads with stride 0 are a known fault of EFFICIENT."""
    if group == 1:
        return tensor.contiguous()
    return tensor.repeat_interleave(group, dim=1)


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % HEAD_DIM_MULTIPLE
    return pad(tensor, (0, missing)) if missing else tensor


def _packed(tensor: Tensor) -> Tensor:
    return tensor if is_packed(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _tokens_packed(tensor: Tensor) -> Tensor:
    """Sequences take the tokens of all rows as they lie: copied, each token's heads follow each other."""
    tokens = tensor.transpose(1, 2)
    if tokens.is_contiguous() and address(tensor) % 16 == 0:
        return tensor
    return tokens.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _split(executor: Executor, inputs: Inputs, plan: Plan, axis: int) -> Output:
    """Run pieces of at most `GRID_LIMIT` along batch or heads and join them."""
    parts = [run_repaired(executor, piece, plan) for piece in pieces(inputs, axis, GRID_LIMIT)]
    lses = [lse for _, lse in parts if lse is not None]
    return torch.cat([out for out, _ in parts], axis), torch.cat(lses, axis) if lses else None
