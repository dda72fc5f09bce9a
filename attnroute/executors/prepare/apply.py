"""The repairs of a decision, done to tensors before and after the kernel runs.

`attnroute.engine.repairs` has the same list on plain data. Each is here once.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnroute.errors import KernelRefusedError
from attnroute.executors.prepare.clear import cleared, with_cleared
from attnroute.executors.prepare.pair import run_pair
from attnroute.executors.prepare.pieces import BATCH, HEADS, pieces
from attnroute.executors.prepare.sink import bind_with_sink, run_with_sink
from attnroute.executors.protocol import Bound, Executor, Inputs, Output, Plan, Run
from attnroute.executors.strides import is_packed
from attnroute.masks.kept import Keeper
from attnroute.masks.lowered.dense import additive, build, empty_rows
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask
from attnroute.masks.tracing import address, is_tracing
from attnroute.memory import cached
from attnroute.vocabulary import GRID_LIMIT, HEAD_DIM_MULTIPLE, Repair

PREPARED_LIMIT_BYTES: Final = 2**30
"""A prepared mask larger than this is made anew each call instead of being kept with its owner."""

BANDS_KEPT: Final = 4
"""Causal and window masks that are kept: a model has one or two kinds of layers."""
BAND_LIMIT_BYTES: Final = 64 * 2**20
"""A causal or window mask larger than this is made anew each call."""

_DENSE = frozenset({"materialize_mask", "cast_mask", "cast_bias", "align_bias"})
_ADDITIVE = frozenset({"cast_mask", "cast_bias", "align_bias"})
_OF_MASKS = frozenset(
    {"materialize_mask", "cast_mask", "zero_empty_rows", "clear_left_out", "to_varlen", "from_varlen"}
)
"""Repairs that need nothing but what is made once for each mask."""
_WITH_SINK = _OF_MASKS | {"sink_from_lse"}
PER_TENSOR: Final[frozenset[Repair]] = frozenset({"expand_kv", "pad_head_dim", "contiguous"})
"""Repairs of query, key and value, whatever the mask."""


def run_repaired(executor: Executor, inputs: Inputs, plan: Plan) -> Output:
    """Make the repairs of the plan, run, and undo what they did to the shape."""
    if not plan.repairs:
        inputs.attn = _as_given(inputs)
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
    inputs.attn = _dense(inputs, repairs) if repairs & _DENSE and not nothing else _as_given(inputs)
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
        out, lse = _without_empty_rows(out, lse, _empty_rows(inputs, repairs), sink)
    return out, lse


def bind(executor: Executor, inputs: Inputs, plan: Plan, given: object) -> Bound | None:
    """Return what runs calls that differ from this one in values alone, None where only `run_repaired` can.

    Args:
        executor: The backend's.
        inputs: The call.
        plan: How it runs.
        given: The mask or bias that the user gave, which what is returned is called with.

    Returns:
        A function that keeps no mask alive: what was prepared of one is kept with that.
    """
    repairs = frozenset(plan.repairs)
    spared, sinks = repairs & executor.spared, "sink_from_lse" in repairs
    if spared and (sinks or ("align_bias" in spared and not _is_only_bias(inputs))):
        return None
    repairs -= spared
    if plan.return_lse or not repairs <= _WITH_SINK:
        return None
    prepares = bool(repairs & _DENSE) and not (inputs.mask.is_full and inputs.bias is None)
    if prepares and not _is_kept(inputs):
        return None
    attn = _dense(inputs, repairs) if prepares else _as_given(inputs)
    if attn is not None and not (prepares or isinstance(given, Tensor)):
        return None
    uncleared = inputs
    if repairs or attn is not None:
        inputs = replace(inputs, attn=attn)
        prepare_qkv(inputs, repairs)
    run = _of_kernel(executor, inputs, plan, sinks=sinks)
    if run is None and not spared:
        run = _in_general(executor, inputs, plan, sinks=sinks)
    if run is None:
        return None
    if "clear_left_out" in repairs and inputs.mask.key_keep is not None:
        run = with_cleared(run, uncleared)
    if attn is not None and "zero_empty_rows" in repairs:
        run = _with_zeros(run, weakref.ref(_empty_rows(inputs, repairs)), trains=plan.training)
    if attn is not None and prepares:
        return _with(run, weakref.ref(attn))
    return run if attn is not None or given is None else _without(run)


def _of_kernel(executor: Executor, inputs: Inputs, plan: Plan, *, sinks: bool) -> Bound | None:
    """Return the kernel's own shorter way for calls like one, None where it has none."""
    if sinks:
        return bind_with_sink(executor, inputs, plan)
    return None if executor.bind is None else executor.bind(inputs, plan)


def _is_only_bias(inputs: Inputs) -> bool:
    """Return whether a bias stands without a mask, and starts where kernels can read it."""
    return inputs.bias is not None and inputs.mask.is_full and address(inputs.bias) % 16 == 0


def _in_general(executor: Executor, inputs: Inputs, plan: Plan, *, sinks: bool) -> Bound | None:
    """Return what runs an executor itself on prepared tensors; None where it would keep a mask alive."""
    mask, attn = inputs.mask, inputs.attn
    if inputs.alibi_slopes is not None or not (sinks or attn is None):
        return None
    if attn is not None:
        # Kernels that need the log-sum-exp for a sink read the tensor alone.
        mask = FULL
    elif not mask.is_band_only:
        return None
    scale, softcap, dropout_p = inputs.scale, inputs.softcap, inputs.dropout_p
    runs: Run = partial(run_with_sink, executor) if sinks else executor.run

    def run(
        query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, sink: Tensor | None = None
    ) -> Tensor | None:
        made = Inputs(query, key, value, mask, None, None, attn, scale, softcap, sink, None, dropout_p, None)
        try:
            return runs(made, plan)[0]
        except KernelRefusedError:
            # Run as any other it is refused again, and another backend takes it.
            return None

    return run


def _with(run: Bound, kept: weakref.ref[Tensor]) -> Bound:
    """Give a kernel the mask that was prepared for it, for as long as that is kept."""

    def with_kept(query: Tensor, key: Tensor, value: Tensor, _: object, *sink: Tensor) -> Tensor | None:
        attn = kept()
        return None if attn is None else run(query, key, value, attn, *sink)

    return with_kept


def _without(run: Bound) -> Bound:
    """Give a kernel no mask, where that was recognized as one that it has an argument for."""
    return lambda query, key, value, _, *sink: run(query, key, value, None, *sink)


def _with_zeros(run: Bound, kept: weakref.ref[Tensor], *, trains: bool) -> Bound:
    """Give rows with no key zeros, for as long as it is kept which they are; in place where none trains."""

    def with_zeros(*tensors: Tensor | None) -> Tensor | None:
        empty = kept()
        out = None if empty is None else run(*tensors)
        if out is None or empty is None:
            return None
        return out.masked_fill(empty, 0.0) if trains else out.masked_fill_(empty, 0.0)

    return with_zeros


def _empty_rows(inputs: Inputs, repairs: frozenset[str]) -> Tensor:
    """Return which rows have no key, (batch or 1, heads or 1, seqlen_q or 1, 1), made once for each mask."""
    attn = cast("Tensor", inputs.attn)
    if inputs.bias is not None or inputs.keeper is None:
        return empty_rows(attn).unsqueeze(-1)
    what = ("empty rows", *_of_mask(inputs, repairs))
    return inputs.keeper.keep(what, lambda: empty_rows(attn).unsqueeze(-1))


def _of_mask(inputs: Inputs, repairs: frozenset[str]) -> tuple[object, ...]:
    """Return what a mask that is prepared for a kernel depends on, the mask itself aside."""
    query, mask = inputs.query, inputs.mask
    sizes = (*query.shape[:3], inputs.key.shape[2], query.device)
    return (bool(repairs & _ADDITIVE), query.dtype, sizes, mask.band_lo, mask.band_hi)


def _without_empty_rows(out: Tensor, lse: Tensor | None, empty: Tensor, sink: Tensor | None) -> Output:
    """Give rows with no key zeros and the log-sum-exp of nothing, or of the sink alone."""
    out = out.masked_fill(empty, 0.0)
    if lse is None:
        return out, None
    rows = empty.squeeze(-1)
    if sink is None:
        return out, lse.masked_fill(rows, -math.inf)
    return out, torch.where(rows, sink.detach().to(lse.dtype)[:, None], lse)


def _as_given(inputs: Inputs) -> Tensor | None:
    """The dense mask or bias as the caller gave it, for operators that take it so."""
    return inputs.mask.dense if inputs.bias is None else inputs.bias


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


def _dense(inputs: Inputs, repairs: frozenset[str]) -> Tensor:
    query, key = inputs.query, inputs.key
    extent = Extent(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    as_bias = bool(repairs & _ADDITIVE) or inputs.bias is not None

    def make() -> Tensor:
        allowed = None if inputs.mask.is_full else build(inputs.mask, extent)
        if not as_bias and allowed is not None:
            return allowed
        return additive(allowed, inputs.bias, query.dtype)

    if is_tracing() or not _is_kept(inputs):
        return make()
    if _is_small_band(inputs):
        return _band(inputs.mask, extent, query.dtype if as_bias else torch.bool)
    return cast("Keeper", inputs.keeper).keep(("dense", *_of_mask(inputs, repairs)), make)


def _is_kept(inputs: Inputs) -> bool:
    """Return whether what is prepared from the mask is kept: not with a bias, and not where it is large."""
    if inputs.bias is not None:
        return False
    rows = inputs.mask.dense.shape[0] if inputs.mask.dense is not None else 1
    is_small = _bytes(inputs) * rows <= PREPARED_LIMIT_BYTES
    return _is_small_band(inputs) or (inputs.keeper is not None and is_small)


def _is_small_band(inputs: Inputs) -> bool:
    return inputs.mask.is_band_only and _bytes(inputs) <= BAND_LIMIT_BYTES


def _bytes(inputs: Inputs) -> int:
    """Return what a mask of one batch row and head takes."""
    return inputs.query.shape[2] * inputs.key.shape[2] * inputs.query.element_size()


@cached(BANDS_KEPT)
def _band(mask: LoweredMask, extent: Extent, dtype: torch.dtype) -> Tensor:
    """Causal and window masks are the same for all layers, and no object lives as long as they are needed."""
    with torch.inference_mode(mode=False), torch.no_grad():
        allowed = build(mask, extent)
        return allowed if dtype == torch.bool else additive(allowed, None, dtype)


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
