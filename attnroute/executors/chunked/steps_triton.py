# Triton's language has no types, and its kernels name constants in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
"""The steps of chunked attention beside its matmuls as Triton kernels; `steps_eager` documents them.

A program handles one row of scores, whose statistics lie where the row lies in the call. It reads only the
columns that the band leaves to that row, and writes zeros elsewhere. For reading and writing, the ends of a
row's columns are rounded to multiples of 16, because the compiler moves several elements at once only under a
mask that is constant over them; rows start at such multiples and are padded to them. Importing this module
imports triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.chunked.tile import Tile

MIN_BLOCK = 128
MAX_BLOCK = 8192
"""Columns that a program holds at once. On an H100 rows of 1024 and more that fit move 2.7 to 3.0 TB/s, in 4
or 8 warps."""

DOT_BLOCK = 4096
"""Products that a program of `row_dots` holds at once, of one row or more."""

_VARYING = ["stats_b", "stats_h", "stats_g", "lo", "hi", "keys", "queries", "first_q", "heads", "group"]


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
def _near(columns, first, last):
    """Widen [first, last) to multiples of 16."""
    return (columns >= first // 16 * 16) & (columns < (last + 15) // 16 * 16)


@triton.jit
def _adjusted(
    scores, bias, bias_step, allow, allow_step, slope, distance, columns, first, last, softcap,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Load scores of one row and apply what belongs to the tile; also give the derivative of the softcap."""
    inside = (columns >= first) & (columns < last)
    score = tl.load(scores + columns, mask=_near(columns, first, last), other=0.0)
    derivative = tl.full(score.shape, 1.0, tl.float32)
    if SOFTCAP:
        capped = _tanh(score / softcap)
        derivative = 1.0 - capped * capped
        score = softcap * capped
    if slope is not None:
        score -= slope * tl.abs(distance - columns).to(tl.float32)
    if bias is not None:
        score += tl.load(bias + columns.to(tl.int64) * bias_step, mask=inside, other=0.0).to(tl.float32)
    if allow is not None:
        inside = inside & (tl.load(allow + columns.to(tl.int64) * allow_step, mask=inside, other=0) != 0)
    return tl.where(inside, score, float("-inf")), tl.where(inside, derivative, 0.0)


@triton.jit
def _before(stats, rescale, sink, place):
    """Load maximum and sum of the tiles before, which there are where sums are rescaled, or of a sink."""
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if rescale is not None:
        largest, total = tl.load(stats), tl.load(stats + 1)
    elif sink is not None:
        largest = tl.load(sink + place).to(tl.float32)
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    return largest, total


@triton.jit
def _kept(keep, columns, first, last):
    inside = (columns >= first) & (columns < last)
    return tl.load(keep + columns, mask=inside, other=0) != 0


@triton.jit(do_not_specialize=_VARYING)
def _softmax_kernel(
    scores, probs, stats, rescale, keep, sink, sink_h, sink_g, stats_b, stats_h, stats_g,
    bias, bias_b, bias_h, bias_g, bias_q, bias_k,
    allow, allow_b, allow_h, allow_g, allow_q, allow_k,
    slopes, slopes_b, slopes_h, slopes_g,
    stride, lo, hi, keys, queries, first_q, heads, group, softcap,
    SOFTCAP: tl.constexpr, DIVIDE: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h, g, q = _place(row, queries, group, heads)
    scores, probs = scores + row * stride, probs + row * stride
    slope = None
    if bias is not None:
        bias += b * bias_b + h * bias_h + g * bias_g + q * bias_q
    if allow is not None:
        allow += b * allow_b + h * allow_h + g * allow_g + q * allow_q
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h + g * slopes_g)
    if keep is not None:
        keep += row * keys
    first = tl.maximum(lo + q, 0).to(tl.int32)
    last = tl.minimum(hi + q + 1, keys).to(tl.int32)
    distance = (first_q + q).to(tl.int32)
    stats += 2 * (b * stats_b + h * stats_h + g * stats_g + q)
    old_max, total = _before(stats, rescale, sink, h * sink_h + g * sink_g)
    lanes = tl.arange(0, BLOCK)
    if SINGLE:
        score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, lanes, first, last,
                             softcap, SOFTCAP)  # fmt: skip
        new_max = tl.maximum(old_max, tl.max(score, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        prob = tl.exp(score - shift)
        factor = tl.exp(old_max - shift)
        total = tl.maximum(total * factor + tl.sum(prob, 0), 0.5)
        prob *= (1.0 / total) if DIVIDE else 1.0
        if keep is not None:
            prob = tl.where(_kept(keep, lanes, first, last), prob, 0.0)
        tl.store(probs + lanes, prob.to(probs.dtype.element_ty), mask=lanes < stride)
    else:
        new_max = old_max
        for start in range(first // BLOCK * BLOCK, last, BLOCK):
            score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, start + lanes, first,
                                 last, softcap, SOFTCAP)  # fmt: skip
            next_max = tl.maximum(new_max, tl.max(score, 0))
            shift = tl.where(next_max == float("-inf"), 0.0, next_max)
            total = total * tl.exp(new_max - shift) + tl.sum(tl.exp(score - shift), 0)
            new_max = next_max
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        factor = tl.exp(old_max - shift)
        total = tl.maximum(total, 0.5)
        for start in range(0, keys, BLOCK):
            columns = start + lanes
            score, _ = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, columns, first, last,
                                 softcap, SOFTCAP)  # fmt: skip
            prob = tl.exp(score - shift)
            prob *= (1.0 / total) if DIVIDE else 1.0
            if keep is not None:
                prob = tl.where(_kept(keep, columns, first, last), prob, 0.0)
            tl.store(probs + columns, prob.to(probs.dtype.element_ty), mask=columns < stride)
    tl.store(stats, new_max)
    tl.store(stats + 1, total)
    if rescale is not None:
        tl.store(rescale + row, factor)


@triton.jit(do_not_specialize=_VARYING)
def _grad_kernel(
    scores, grad_probs, probs, grad_scores, stats, delta, keep, stats_b, stats_h, stats_g,
    bias, bias_b, bias_h, bias_g, bias_q, bias_k,
    allow, allow_b, allow_h, allow_g, allow_q, allow_k,
    slopes, slopes_b, slopes_h, slopes_g,
    stride, lo, hi, keys, queries, first_q, heads, group, softcap, keep_scale,
    SOFTCAP: tl.constexpr, BIAS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h, g, q = _place(row, queries, group, heads)
    scores += row * stride
    grad_probs += row * stride
    probs += row * stride
    grad_scores += row * stride
    slope = None
    if bias is not None:
        bias += b * bias_b + h * bias_h + g * bias_g + q * bias_q
    if allow is not None:
        allow += b * allow_b + h * allow_h + g * allow_g + q * allow_q
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h + g * slopes_g)
    if keep is not None:
        keep += row * keys
    first = tl.maximum(lo + q, 0).to(tl.int32)
    last = tl.minimum(hi + q + 1, keys).to(tl.int32)
    distance = (first_q + q).to(tl.int32)
    place = b * stats_b + h * stats_h + g * stats_g + q
    row_max = tl.load(stats + 2 * place)
    has_key = row_max > float("-inf")
    row_shift = tl.where(has_key, row_max, 0.0)
    row_log_sum = tl.where(has_key, tl.log(tl.load(stats + 2 * place + 1)), float("inf"))
    row_delta = tl.where(has_key, tl.load(delta + place), 0.0)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, keys, BLOCK):
        columns = start + lanes
        score, derivative = _adjusted(scores, bias, bias_k, allow, allow_k, slope, distance, columns, first,
                                      last, softcap, SOFTCAP)  # fmt: skip
        prob = tl.exp(score - row_shift - row_log_sum)
        grad = tl.load(grad_probs + columns, mask=_near(columns, first, last), other=0.0)
        kept = prob
        if keep is not None:
            stays = _kept(keep, columns, first, last)
            kept = tl.where(stays, prob, 0.0)
            grad = tl.where(stays, grad * keep_scale, 0.0)
        # What lies beside the keys of a row was never written, and may be NaN, which a product would keep.
        grad = tl.where((columns >= first) & (columns < last), prob * (grad - row_delta), 0.0)
        within = columns < stride
        tl.store(probs + columns, kept.to(probs.dtype.element_ty), mask=within)
        if BIAS_GRAD:
            tl.store(grad_probs + columns, grad, mask=within)
        tl.store(grad_scores + columns, (grad * derivative).to(grad_scores.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["heads", "queries", "rows"])
def _dots_kernel(
    a, a_b, a_h, a_q, a_d, c, c_b, c_h, c_q, c_d, dots, heads, queries, rows, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h, q = row // queries // heads, row // queries % heads, row % queries
    lanes = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (lanes < dim)[None]
    left = a + (b * a_b + h * a_h + q * a_q)[:, None] + (lanes * a_d)[None]
    right = c + (b * c_b + h * c_h + q * c_q)[:, None] + (lanes * c_d)[None]
    products = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    products *= tl.load(right, mask=inside, other=0.0).to(tl.float32)
    tl.store(dots + row, tl.sum(products, 1), mask=row < rows)


def softmax_tile(
    tile: Tile, scores: Tensor, probs: Tensor, stats: Tensor, rescale: Tensor | None, divide: bool
) -> None:
    """Take one tile into the running softmax of its rows: `steps_eager.softmax_tile` in one kernel."""
    block, warps = _block(tile.shape[4])
    sink = (None, 0, 0) if tile.sink is None else (tile.sink, tile.sink.stride(1), tile.sink.stride(2))
    _softmax_kernel[(scores.shape[0] * scores.shape[1],)](
        scores, probs, stats, rescale, tile.keep, *sink, *_shared(tile, stats, scores.stride(1)),
        tile.softcap, tile.softcap != 0.0, divide, tile.shape[4] <= block, block, num_warps=warps,
    )  # fmt: skip


def grad_tile(
    tile: Tile,
    scores: Tensor,
    grad_probs: Tensor,
    probs: Tensor,
    grad_scores: Tensor,
    stats: Tensor,
    delta: Tensor,
    keep_bias_grad: bool,
) -> None:
    """Compute probabilities and score gradients of one tile: `steps_eager.grad_tile` in one kernel."""
    block, warps = _block(tile.shape[4])
    _grad_kernel[(scores.shape[0] * scores.shape[1],)](
        scores, grad_probs, probs, grad_scores, stats, delta, tile.keep,
        *_shared(tile, stats, scores.stride(1)), tile.softcap, tile.keep_scale,
        tile.softcap != 0.0, keep_bias_grad, block, num_warps=warps,
    )  # fmt: skip


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a * b`` over the last dimension: `steps_eager.row_dots` in one kernel."""
    batch, heads, queries, dim = a.shape
    dots = torch.empty((batch, heads, queries), dtype=torch.float32, device=a.device)
    block = triton.next_power_of_2(dim)
    rows_at_once = max(DOT_BLOCK // block, 1)
    _dots_kernel[(triton.cdiv(dots.numel(), rows_at_once),)](
        a, *a.stride(), b, *b.stride(), dots, heads, queries, dots.numel(), dim, rows_at_once, block,
        num_warps=4,
    )  # fmt: skip
    return dots


def _block(keys: int) -> tuple[int, int]:
    """Return the columns and warps of a program: a few distinct values, since each is compiled apart."""
    block = min(max(triton.next_power_of_2(keys), MIN_BLOCK), MAX_BLOCK)
    return block, 8 if block >= 8192 else min(max(block // 256, 1), 4)


def _shared(tile: Tile, stats: Tensor, stride: int) -> tuple[object, ...]:
    """Return the arguments from `stats_b` to `group`, which both kernels take."""
    _, heads, group, queries, keys = tile.shape
    ahead = tile.j0 - tile.i0
    lo, hi = tile.limits.band_lo, tile.limits.band_hi
    return (
        *(step // 2 for step in stats.stride()[:3]),
        *_with_strides(tile.bias, tile.shape),
        *_with_strides(tile.allow, tile.shape),
        *_with_strides(tile.slopes, tile.shape)[:4],
        stride,
        -queries if lo is None else min(max(lo - ahead, -queries), keys),
        keys if hi is None else min(max(hi - ahead, -queries), keys),
        keys,
        queries,
        tile.i0 + tile.diagonal - tile.j0,
        heads,
        group,
    )


def _with_strides(tensor: Tensor | None, shape: tuple[int, ...]) -> tuple[object, ...]:
    if tensor is None:
        return (None, 0, 0, 0, 0, 0)
    return (tensor, *tensor.expand(shape).stride())
