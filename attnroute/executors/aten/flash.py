"""FLASH: torch's built-in FlashAttention-2 on CUDA, and torch's flash kernel on the CPU.

Seen on an H100 with torch 2.11 (benchmarks/results/h100-torch2.11-kernel-facts.json): the CUDA kernel aligns
causal masks at the bottom right, takes windows and ragged batches, gives zeros for rows with no key and
+inf as their log-sum-exp.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnroute.executors.aten import flash_backward
from attnroute.executors.aten.handover import Launch, pair_of, short_way
from attnroute.executors.aten.operators import attn_of, is_causal, operator_of, scaled
from attnroute.executors.protocol import (
    Executor,
    ForwardResult,
    Grads,
    Inputs,
    Output,
    Plan,
    Wanted,
)
from attnroute.executors.ragged import (
    Ragged,
    per_token,
    rows_of,
    tokens_like,
    tokens_of,
    whole_rows,
    window_sizes,
)
from attnroute.executors.strides import fitted, watch
from attnroute.masks.lowered.dense import empty_rows
from attnroute.masks.lowered.form import as_4d
from attnroute.masks.lowered.sequences import Rows
from attnroute.masks.tracing import is_traced


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the operator that fits the device and the mask."""
    if plan.device_type == "cpu":
        return _cpu(inputs, return_lse=plan.return_lse)
    out, lse, *_ = _cuda(inputs, plan)
    watch(out, plan)
    if not plan.return_lse:
        return out, None
    return out, lse if _leaves_no_row_out(inputs, plan) else _minus_infinity(lse)


def forward(inputs: Inputs, plan: Plan) -> ForwardResult:
    """Run what `run` runs, and keep what `backward` takes beside output and log-sum-exp."""
    if plan.device_type == "cpu":
        out, lse = _cpu(inputs, return_lse=True)
        return ForwardResult(out, cast("Tensor", lse))
    out, lse, *rest = _cuda(inputs, plan)
    return ForwardResult(out, lse if _leaves_no_row_out(inputs, plan) else _minus_infinity(lse), tuple(rest))


def backward(inputs: Inputs, plan: Plan, result: ForwardResult, grad_out: Tensor, _: Wanted) -> Grads:
    """Run the backward of the operator that `forward` ran; it makes all gradients but the mask's."""
    if plan.device_type == "cpu":
        return flash_backward.cpu(inputs, result, grad_out)
    grad_out = fitted(grad_out, result.out)
    if _is_plain(inputs) and "to_varlen" not in plan.repairs:
        return flash_backward.plain(inputs, result, grad_out)
    if "to_varlen" in plan.repairs or _misses_keys(inputs):
        return flash_backward.ragged(inputs, result, grad_out)
    return flash_backward.window(inputs, result, grad_out)


def _cuda(inputs: Inputs, plan: Plan) -> tuple[Any, ...]:
    """Return output and log-sum-exp in the shapes of the inputs, then what the operator's backward takes."""
    if "to_varlen" in plan.repairs:
        ragged = rows_of(inputs, training=plan.training, in_place=True)
        return _sequences(inputs, ragged, reads_lse=_reads_lse(plan))
    if _is_plain(inputs):
        causal = inputs.mask.band_hi is not None
        operator = operator_of("_scaled_dot_product_flash_attention", inputs.query)
        return operator(  # type: ignore[no-any-return]
            inputs.query, inputs.key, inputs.value, inputs.dropout_p, causal, False, scale=inputs.scale
        )
    if _misses_keys(inputs):
        return _sequences(inputs, whole_rows(inputs), reads_lse=_reads_lse(plan))
    return _window_of(inputs)(inputs.query, inputs.key, inputs.value, None, whole=True)  # type: ignore[no-any-return]


def _reads_lse(plan: Plan) -> bool:
    return plan.training or plan.return_lse or "sink_from_lse" in plan.repairs


def _leaves_no_row_out(inputs: Inputs, plan: Plan) -> bool:
    """Return whether every row has a key, as lengths and band say: two launches are spared then."""
    if "to_varlen" in plan.repairs or not _is_plain(inputs) or is_traced(inputs.query):
        return False
    return inputs.key.shape[2] >= (1 if inputs.mask.band_hi is None else inputs.query.shape[2])


def _minus_infinity(lse: Tensor) -> Tensor:
    """Return the log-sum-exp with -inf in rows with no key."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def _cpu(inputs: Inputs, *, return_lse: bool) -> Output:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[attr-defined]
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.dropout_p,
        is_causal(inputs),
        attn_mask=attn_of(inputs),
        scale=inputs.scale,
    )
    if not return_lse:
        return out, None
    # The CPU kernel gives 0 for rows with no key.
    return out, lse if inputs.attn is None else lse.masked_fill(empty_rows(inputs.attn), -math.inf)


def _is_plain(inputs: Inputs) -> bool:
    """Return whether the operator of scaled_dot_product_attention takes the band: none, or causal."""
    offset = inputs.key.shape[2] - inputs.query.shape[2]
    return inputs.mask.band_lo is None and inputs.mask.band_hi in (None, offset)


def _window_of(inputs: Inputs) -> Launch:
    """Return what calls the operator below, which takes a window, on whole rows."""
    operator = torch.ops.aten._flash_attention_forward.default
    lengths, (left, right) = (inputs.query.shape[2], inputs.key.shape[2]), window_sizes(inputs)
    scale, dropout_p = inputs.scale, inputs.dropout_p

    def launch(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, *, whole: bool = False) -> Any:
        out, *rest = operator(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            None,
            *lengths,
            dropout_p,
            False,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        out = out.transpose(1, 2)
        return (out, *rest) if whole else out

    return launch


def _misses_keys(inputs: Inputs) -> bool:
    """Return whether the operator, given whole rows, would read the right side of a window wrongly.

    It opens a right side of seqlen_kv or more keys, and reads an open one beside a closed left side as
    seqlen_kv. Both are right only where there are no more queries than keys. Source: flash_api.cpp of torch
    2.13, mha_fwd and set_params_fprop. Ragged batches go by an upper bound that `_sequences` can choose.
    """
    seqlen_q, seqlen_kv = inputs.query.shape[2], inputs.key.shape[2]
    _, right = window_sizes(inputs)
    return seqlen_q > seqlen_kv and (right is None or right >= seqlen_kv)


class _Bounds(NamedTuple):
    """What the kernel is told of sequences beside their sums: at most so many tokens, and a window."""

    longest_q: int
    longest_kv: int
    left: int | None
    right: int | None


def _bounds(inputs: Inputs, ragged: Ragged, *, reads_lse: bool) -> _Bounds:
    """Return bounds under which the kernel reads sequences and window rightly.

    Args:
        inputs: The call.
        ragged: Its sequences.
        reads_lse: The log-sum-exp is read: by the caller, a sink or a backward.
    """
    tokens = inputs.query.shape[0] * inputs.query.shape[2]
    rows, longest_q, longest_kv, _ = ragged
    left, right = window_sizes(inputs)
    if longest_q == 1:
        # The only query of a sequence is its last, and no key comes after the diagonal.
        right = None
    if left is not None or right:
        longest_kv = max(longest_kv, longest_q, 1 if right is None else right + 1)
    if longest_q == 1 and (reads_lse or tokens != rows.sums_q.shape[0] - 1):
        # With a bound of one the kernel counts on one query in every sequence, empty ones included, and takes
        # the query heads of a key head for queries. Where it then splits the keys, or a row has none, it
        # writes the log-sum-exp into the places of others (Dao-AILab/flash-attention#2573).
        longest_q = 2
    return _Bounds(longest_q, longest_kv, left, right)


def _launch(tokens: tuple[Tensor, ...], rows: Rows, bounds: _Bounds, numbers: tuple[Any, ...]) -> Any:
    """Run the kernel on the tokens of sequences; `numbers` are dropout and scale."""
    longest_q, longest_kv, left, right = bounds
    dropout_p, scale = numbers
    used = {} if rows.used_kv is None else {"seqused_k": rows.used_kv}
    return torch.ops.aten._flash_attention_forward.default(
        *tokens,
        rows.sums_q,
        rows.sums_kv,
        longest_q,
        longest_kv,
        dropout_p,
        False,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        **used,
    )


def _sequences(inputs: Inputs, ragged: Ragged, *, reads_lse: bool) -> tuple[Any, ...]:
    """Run the kernel on sequences.

    Returns:
        Output and log-sum-exp in the shapes of the inputs, then what the backward takes: its state of
        dropout (two tensors), prefix sums and upper bounds of queries and of keys, and whether its own
        log-sum-exp is padded.
    """
    batch, _, seqlen, _ = inputs.query.shape
    bounds, sums = _bounds(inputs, ragged, reads_lse=reads_lse), ragged.rows[:2]
    tokens = _tokens(inputs, ragged)
    out, lse, seed, offset, *_ = _launch(tokens, ragged.rows, bounds, (inputs.dropout_p, inputs.scale))
    rest = (seed, offset, *sums, *bounds[:2], lse.dim() != 2)
    lse = per_token(lse, sums[0], batch * seqlen).unflatten(1, (batch, seqlen))
    return out.unflatten(0, (batch, seqlen)).transpose(1, 2), lse.transpose(0, 1), *rest


def _tokens(inputs: Inputs, ragged: Ragged) -> tuple[Tensor, ...]:
    """Return the tokens of sequences: query, key and value."""
    step = ragged.step
    return tokens_of(inputs.query), tokens_of(inputs.key, step), tokens_of(inputs.value, step)


def _sequences_of(inputs: Inputs, plan: Plan) -> Launch:
    """Return what calls the operator on sequences, for as long as these are kept with their mask."""
    ragged = rows_of(inputs, training=plan.training, in_place=True)
    bounds, numbers = _bounds(inputs, ragged, reads_lse=_reads_lse(plan)), (inputs.dropout_p, inputs.scale)
    batch, _, seqlen, _ = inputs.query.shape
    given = (inputs.query, inputs.key, inputs.value)
    strides = tuple(t.stride() for t in given)
    views: tuple[Callable[[Tensor], Tensor], ...] = (tokens_of,) * len(given)
    if not plan.training:
        views = tuple(map(tokens_like, given, _tokens(inputs, ragged)))
    of_query, of_key, of_value = views
    kept = [t if t is None else weakref.ref(t) for t in ragged.rows]
    del inputs, ragged, given

    def launch(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor | None:
        found: list[Any] = [ref if ref is None else ref() for ref in kept]
        if found.count(None) != kept.count(None):
            return None
        if strides != (query.stride(), key.stride(), value.stride()):
            return None
        tokens = (of_query(query), of_key(key), of_value(value))
        out: Tensor = _launch(tokens, Rows(*found), bounds, numbers)[0]
        return out.view(batch, seqlen, *out.shape[1:]).transpose(1, 2)

    return launch


def _launch_of(inputs: Inputs, plan: Plan) -> Launch | None:
    """Return what calls the operator that fits the device and the mask."""
    causal, dropout_p = is_causal(inputs), inputs.dropout_p
    if plan.device_type == "cpu":
        on_cpu = scaled(torch._scaled_dot_product_flash_attention_for_cpu, inputs.scale)  # type: ignore[attr-defined]

        def launch_on_cpu(
            query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, *, whole: bool = False
        ) -> Any:
            attn = None if attn is None else as_4d(attn)
            made = on_cpu(query, key, value, dropout_p, causal, attn_mask=attn)
            return made if whole else made[0]

        return launch_on_cpu
    if "pad_head_dim" in plan.repairs:
        return None
    if "to_varlen" in plan.repairs:
        return _sequences_of(inputs, plan)
    if not _is_plain(inputs):
        return None if _misses_keys(inputs) else _window_of(inputs)
    operator = scaled(operator_of("_scaled_dot_product_flash_attention", inputs.query), inputs.scale)

    def launch(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, *, whole: bool = False) -> Any:
        made = operator(query, key, value, dropout_p, causal, False)
        return made if whole else made[0]

    return launch


executor = Executor(
    run,
    pair_of(forward, backward, _launch_of),
    bind=short_way(SDPBackend.FLASH_ATTENTION, _launch_of),
    # `pad_last_dim` of torch's attention.cpp.
    spared=frozenset({"pad_head_dim"}),
)
