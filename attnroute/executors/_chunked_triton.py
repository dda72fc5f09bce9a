# Triton's language has no types, and its kernels name constants in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
"""The elementwise steps of chunked attention, one Triton kernel each; `_chunked_eager` says what they do.

A program handles one row of scores. It reads only the columns that the band leaves to that row and writes
zeros elsewhere. Importing this module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnroute.executors._chunked_tile import Tile
    from torch import Tensor

MAX_BLOCK = 4096
"""Columns that a program holds at once, in 8 warps; measured best of 1024, 2048 and 4096 on an H100."""

_UNSPECIALIZED = ["lo", "hi", "keys", "queries", "first_q", "heads", "group"]


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _place(row, queries, group, heads):
    """Split a row number into batch row, key head, member of the group and query."""
    query = row % queries
    rest = row // queries
    member = rest % group
    rest = rest // group
    return rest // heads, rest % heads, member, query


@triton.jit
def _adjusted(
    scores,
    bias,
    bias_step,
    allow,
    allow_step,
    slope,
    distance,
    columns,
    inside,
    softcap,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    ALLOW: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Load scores of one row and apply what the tile says; also give the derivative of the softcap."""
    score = tl.load(scores + columns, mask=inside, other=0.0)
    derivative = tl.full(score.shape, 1.0, tl.float32)
    if SOFTCAP:
        capped = _tanh(score / softcap)
        derivative = 1.0 - capped * capped
        score = softcap * capped
    if SLOPES:
        score -= slope * tl.abs(distance - columns).to(tl.float32)
    if BIAS:
        score += tl.load(bias + columns * bias_step, mask=inside, other=0.0).to(tl.float32)
    if ALLOW:
        inside = inside & (tl.load(allow + columns * allow_step, mask=inside, other=0) != 0)
    return tl.where(inside, score, float("-inf")), derivative


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _softmax_kernel(
    scores, probs, row_max, row_sum, rescale, keep,
    bias, bias_b, bias_h, bias_g, bias_q, bias_k,
    allow, allow_b, allow_h, allow_g, allow_q, allow_k,
    slopes, slopes_b, slopes_h, slopes_g,
    stride, lo, hi, keys, queries, first_q, heads, group, softcap,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALLOW: tl.constexpr, SLOPES: tl.constexpr,
    KEEP: tl.constexpr, RESCALE: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h, g, q = _place(row, queries, group, heads)
    scores += row * stride
    probs += row * stride
    bias += b * bias_b + h * bias_h + g * bias_g + q * bias_q
    allow += b * allow_b + h * allow_h + g * allow_g + q * allow_q
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h + g * slopes_g)
    first = tl.maximum(lo + q, 0).to(tl.int32)
    last = tl.minimum(hi + q + 1, keys).to(tl.int32)
    distance = (first_q + q).to(tl.int32)
    old_max = tl.load(row_max + row)
    new_max = old_max
    total = tl.load(row_sum + row)
    lanes = tl.arange(0, BLOCK)
    if SINGLE:
        inside = (lanes >= first) & (lanes < last)
        score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, lanes, inside, softcap,
                             SOFTCAP, BIAS, ALLOW, SLOPES)  # fmt: skip
        new_max = tl.maximum(old_max, tl.max(score, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        prob = tl.exp(score - shift)
        factor = tl.exp(old_max - shift)
        total = total * factor + tl.sum(prob, 0)
        if KEEP:
            prob = tl.where(tl.load(keep + row * keys + lanes, mask=inside, other=0) != 0, prob, 0.0)
        tl.store(probs + lanes, prob.to(probs.dtype.element_ty), mask=lanes < keys)
    else:
        for start in range((first // BLOCK) * BLOCK, last, BLOCK):
            columns = start + lanes
            inside = (columns >= first) & (columns < last)
            score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, columns, inside,
                                 softcap, SOFTCAP, BIAS, ALLOW, SLOPES)  # fmt: skip
            next_max = tl.maximum(new_max, tl.max(score, 0))
            shift = tl.where(next_max == float("-inf"), 0.0, next_max)
            total = total * tl.exp(new_max - shift) + tl.sum(tl.exp(score - shift), 0)
            new_max = next_max
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        factor = tl.exp(old_max - shift)
        for start in range(0, keys, BLOCK):
            columns = start + lanes
            inside = (columns >= first) & (columns < last)
            score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, columns, inside,
                                 softcap, SOFTCAP, BIAS, ALLOW, SLOPES)  # fmt: skip
            prob = tl.exp(score - shift)
            if KEEP:
                prob = tl.where(tl.load(keep + row * keys + columns, mask=inside, other=0) != 0, prob, 0.0)
            tl.store(probs + columns, prob.to(probs.dtype.element_ty), mask=columns < keys)
    tl.store(row_max + row, new_max)
    tl.store(row_sum + row, total)
    if RESCALE:
        tl.store(rescale + row, factor)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _grad_kernel(
    scores, grad_probs, probs, grad_scores, shift, log_sum, delta, keep,
    bias, bias_b, bias_h, bias_g, bias_q, bias_k,
    allow, allow_b, allow_h, allow_g, allow_q, allow_k,
    slopes, slopes_b, slopes_h, slopes_g,
    stride, lo, hi, keys, queries, first_q, heads, group, softcap, keep_scale,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALLOW: tl.constexpr, SLOPES: tl.constexpr,
    KEEP: tl.constexpr, BIAS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h, g, q = _place(row, queries, group, heads)
    scores += row * stride
    grad_probs += row * stride
    probs += row * stride
    grad_scores += row * stride
    bias += b * bias_b + h * bias_h + g * bias_g + q * bias_q
    allow += b * allow_b + h * allow_h + g * allow_g + q * allow_q
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h + g * slopes_g)
    first = tl.maximum(lo + q, 0).to(tl.int32)
    last = tl.minimum(hi + q + 1, keys).to(tl.int32)
    distance = (first_q + q).to(tl.int32)
    row_shift = tl.load(shift + row)
    row_log_sum = tl.load(log_sum + row)
    row_delta = tl.load(delta + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, keys, BLOCK):
        columns = start + lanes
        inside = (columns >= first) & (columns < last)
        score, derivative = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, columns, inside,
                                      softcap, SOFTCAP, BIAS, ALLOW, SLOPES)  # fmt: skip
        prob = tl.exp(score - row_shift - row_log_sum)
        grad = tl.load(grad_probs + columns, mask=inside, other=0.0)
        kept = prob
        if KEEP:
            stays = tl.load(keep + row * keys + columns, mask=inside, other=0) != 0
            kept = tl.where(stays, prob, 0.0)
            grad = tl.where(stays, grad * keep_scale, 0.0)
        grad = prob * (grad - row_delta)
        within = columns < keys
        tl.store(probs + columns, kept.to(probs.dtype.element_ty), mask=within)
        if BIAS_GRAD:
            tl.store(grad_probs + columns, grad, mask=within)
        tl.store(grad_scores + columns, (grad * derivative).to(grad_scores.dtype.element_ty), mask=within)


def softmax_tile(
    tile: Tile, scores: Tensor, probs: Tensor, row_max: Tensor, row_sum: Tensor, rescale: Tensor | None
) -> None:
    """Take one tile into the running softmax of its rows: `_chunked_eager.softmax_tile` in one kernel."""
    keys = scores.shape[2]
    block, warps = _block(keys)
    keep = scores if tile.keep is None else tile.keep
    _softmax_kernel[(row_max.numel(),)](
        scores, probs, row_max, row_sum, row_max if rescale is None else rescale, keep,
        *_shared(tile, scores), tile.softcap,
        *_flags(tile), tile.keep is not None, rescale is not None, block, keys <= block, num_warps=warps,
    )  # fmt: skip


def grad_tile(
    tile: Tile,
    scores: Tensor,
    grad_probs: Tensor,
    probs: Tensor,
    grad_scores: Tensor,
    shift: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    keep_bias_grad: bool,
) -> None:
    """Compute probabilities and score gradients of one tile: `_chunked_eager.grad_tile` in one kernel."""
    block, warps = _block(scores.shape[2])
    keep = scores if tile.keep is None else tile.keep
    _grad_kernel[(shift.numel(),)](
        scores, grad_probs, probs, grad_scores, shift, log_sum, delta, keep,
        *_shared(tile, scores), tile.softcap, tile.keep_scale,
        *_flags(tile), tile.keep is not None, keep_bias_grad, block, num_warps=warps,
    )  # fmt: skip


def _block(keys: int) -> tuple[int, int]:
    """Return columns per program and warps; few distinct values, since each is compiled apart."""
    if keys <= 1024:
        return 1024, 4
    return min(4096, MAX_BLOCK), 8


def _shared(tile: Tile, scores: Tensor) -> tuple[object, ...]:
    """Return the arguments from `bias` to `group` that both kernels take."""
    _, heads, group, queries, keys = tile.shape
    ahead = tile.j0 - tile.i0
    lo, hi = tile.limits.band_lo, tile.limits.band_hi
    return (
        *_with_strides(tile.bias, tile.shape, scores),
        *_with_strides(tile.allow, tile.shape, scores),
        *_with_strides(tile.slopes, tile.shape, scores)[:4],
        scores.stride(1),
        -queries if lo is None else min(max(lo - ahead, -queries), keys),
        keys if hi is None else min(max(hi - ahead, -queries), keys),
        keys,
        queries,
        tile.i0 + tile.diagonal - tile.j0,
        heads,
        group,
    )


def _with_strides(tensor: Tensor | None, shape: tuple[int, ...], filler: Tensor) -> tuple[object, ...]:
    if tensor is None:
        return (filler, 0, 0, 0, 0, 0)
    return (tensor, *tensor.expand(shape).stride())


def _flags(tile: Tile) -> tuple[bool, bool, bool, bool]:
    return bool(tile.softcap), tile.bias is not None, tile.allow is not None, tile.slopes is not None
