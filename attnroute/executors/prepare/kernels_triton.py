# Triton's language has no types, and its kernels name constants in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0124
"""Preparations as Triton kernels: `sink` and `clear` have the same in operators of torch, and say why.

A program handles some rows at once, of head_dim elements each. Strides and head_dim of what it reads and
writes in rows count in units of so many elements as it may move at once. Importing this module imports
triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STRIDES = ["out_b", "out_h", "out_s", "lse_b", "lse_h", "lse_s", "sink_h"]
_SIZES = ["heads", "queries", "rows", "dim", "steps"]


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES])
def shrink_kernel(
    out, lse, sink, out_b, out_h, out_s, lse_b, lse_h, lse_s, sink_h, heads, queries, rows, dim,
    TRAINS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the share that keys keep beside a sink; in training the log-sum-exp gets the sink."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    s = row % queries
    h = row // queries % heads
    b = row // queries // heads
    place = lse + b * lse_b + h * lse_h + s * lse_s
    score = tl.load(place, mask=inside, other=0.0)
    logit = tl.load(sink + h * sink_h, mask=inside, other=0.0).to(tl.float32)
    surplus = score - logit
    # NaN: a row with no key beside a sink of -inf.
    share = tl.where(surplus == surplus, 1.0 / (1.0 + tl.exp(-surplus)), 0.0)
    lanes = tl.arange(0, BLOCK)
    first = b * out_b * UNIT + h * out_h * UNIT + s * out_s * UNIT
    elements = out + first[:, None] + lanes[None]
    there = inside[:, None] & (lanes < dim * UNIT)[None]
    value = tl.load(elements, mask=there, other=0.0).to(tl.float32)
    if TRAINS:
        top = tl.maximum(score, logit)
        both = top + tl.log(1.0 + tl.exp(-tl.abs(surplus)))
        # Infinite where there is nothing: what weighs nothing then is exp(-inf - inf).
        both = tl.where(tl.abs(top) == float("inf"), float("inf"), both)
        # Threads of a program may read the same log-sum-exp.
        tl.debug_barrier()
        tl.store(place, both, mask=inside)
    tl.store(elements, (value * share[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=[*_STRIDES, *_SIZES, "grad_b", "grad_h", "grad_s", "grad_d"])
def sink_gradient_kernel(
    grad, out, lse, sink, into, grad_b, grad_h, grad_s, grad_d,
    out_b, out_h, out_s, lse_b, lse_h, lse_s, sink_h, heads, queries, rows, dim, steps,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one head's sink over some rows; output and log-sum-exp have the sink in them."""
    h = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    logit = tl.load(sink + h * sink_h).to(tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(1) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        s = row % queries
        b = row // queries
        score = tl.load(lse + b * lse_b + h * lse_h + s * lse_s, mask=inside, other=float("inf"))
        there = inside[:, None] & (lanes < dim * UNIT)[None]
        first = b * out_b * UNIT + h * out_h * UNIT + s * out_s * UNIT
        value = tl.load(out + first[:, None] + lanes[None], mask=there, other=0.0).to(tl.float32)
        first = b * grad_b + h * grad_h + s * grad_s
        value *= tl.load(grad + first[:, None] + (lanes * grad_d)[None], mask=there, other=0.0).to(tl.float32)
        total += tl.where(inside, tl.sum(value, 1) * tl.exp(logit - score), 0.0)
    place = into + tl.program_id(1) * heads + h
    tl.store(place, (0.0 - tl.sum(total, 0)).to(into.dtype.element_ty))


@triton.jit
def _clear_rows(
    source, made, keep, source_b, source_h, source_s, made_b, made_h, made_s, keep_b, keep_s,
    heads, keys, rows, dim, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    s = row % keys
    h = row // keys % heads
    b = row // keys // heads
    stays = tl.load(keep + b * keep_b + s * keep_s, mask=inside, other=0) != 0
    lanes = tl.arange(0, BLOCK)
    there = inside[:, None] & (lanes < dim * UNIT)[None]
    first = b * source_b * UNIT + h * source_h * UNIT + s * source_s * UNIT
    value = tl.load(source + first[:, None] + lanes[None], mask=there, other=0.0)
    value = tl.where(stays[:, None], value, 0.0).to(made.dtype.element_ty)
    first = b * made_b * UNIT + h * made_h * UNIT + s * made_s * UNIT
    tl.store(made + first[:, None] + lanes[None], value, mask=there)


_OF_CLEAR = [f"{t}_{d}" for t in ("key", "value", "made_key", "made_value") for d in "bhs"]


@triton.jit(
    do_not_specialize=[*_OF_CLEAR, "keep_b", "keep_s", "heads", "keys", "rows", "dim_key", "dim_value"]
)
def clear_kernel(
    key, value, made_key, made_value, keep, key_b, key_h, key_s, value_b, value_h, value_s,
    made_key_b, made_key_h, made_key_s, made_value_b, made_value_h, made_value_s, keep_b, keep_s,
    heads, keys, rows, dim_key, dim_value,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy keys and values, with zeros where no query attends."""
    if tl.program_id(1) == 0:
        _clear_rows(key, made_key, keep, key_b, key_h, key_s, made_key_b, made_key_h, made_key_s,
                    keep_b, keep_s, heads, keys, rows, dim_key, UNIT, ROWS, BLOCK)  # fmt: skip
    else:
        _clear_rows(value, made_value, keep, value_b, value_h, value_s, made_value_b, made_value_h,
                    made_value_s, keep_b, keep_s, heads, keys, rows, dim_value,
                    UNIT, ROWS, BLOCK)  # fmt: skip
