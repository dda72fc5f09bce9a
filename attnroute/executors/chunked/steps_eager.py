"""The elementwise steps of chunked attention in plain torch, for every device and dtype.

`steps_triton` has the same steps as single kernels; they write their results into the buffers they are given,
which may be the buffer of the scores itself where the dtypes agree.

The statistics of a tile's rows are (batch rows, key heads, group, queries, 2), part of a contiguous tensor
(batch, num_heads_q, seqlen_q, 2): the largest score so far, -inf without a key, and the sum of
exp(score - that) so far. The sum is at least 1 in a row with a key, whose largest score adds 1, and set to
0.5 in a row without, so that it can divide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnroute.executors.chunked.tile import Tile

NEG_INF: Final = float("-inf")
DOT_ELEMENTS: Final = 2**24
"""Most products that `row_dots` holds at once."""


def start_rows(stats: Tensor, sink: Tensor | None) -> None:
    """Set the statistics of rows before any key: those of the sink, (1, key heads, group, 1, 1)."""
    row_max, row_sum = stats.unbind(-1)
    if sink is None:
        row_max.fill_(NEG_INF)
        row_sum.fill_(0.0)
    else:
        row_max.copy_(sink[..., 0])
        row_sum.copy_(row_max > NEG_INF)


def softmax_tile(
    tile: Tile, scores: Tensor, probs: Tensor, stats: Tensor, rescale: Tensor | None, divide: bool
) -> None:
    """Take one tile into the running softmax of its rows.

    Args:
        tile: What applies to the scores.
        scores: (units, rows, keys), scaled QK^T; destroyed.
        probs: Same shape, in the matmul's dtype; receives exp(score - new row maximum), zero where
            dropout drops it. May be `scores`.
        stats: Statistics of the rows, updated; of no meaning yet at a first tile.
        rescale: (units, rows), receives what earlier sums must be multiplied with; None for a first tile.
        divide: Whether the tile is the only one, whose probabilities are to be divided by the sum.
    """
    adjust_scores(tile, scores)
    if rescale is None:
        start_rows(stats, tile.sink)
    row_max, row_sum = stats.unbind(-1)
    view = scores.view(tile.shape)
    new_max = torch.maximum(row_max, view.amax(-1))
    shift = finite_shift(new_max)
    view.sub_(shift[..., None]).exp_()
    factor = torch.exp(row_max - shift)
    row_sum.mul_(factor).add_(view.sum(-1)).clamp_(min=0.5)
    row_max.copy_(new_max)
    if rescale is not None:
        rescale.view(tile.shape[:4]).copy_(factor)
    if divide:
        view.div_(row_sum[..., None])
    if tile.keep is not None:
        view.mul_(tile.keep)
    if probs is not scores:
        probs.copy_(scores)


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
    """Turn the scores of one tile and the gradient of its probabilities into what the matmuls need.

    Args:
        tile: What applies to the scores.
        scores: (units, rows, keys), scaled QK^T; destroyed.
        grad_probs: Same shape and dtype, dO V^T; destroyed, or with `keep_bias_grad` left holding the
            gradient of the scores as they were after softcap, which is that of a bias.
        probs: Same shape, in the matmul's dtype; receives the probabilities, dropped ones zero (and the
            others not yet scaled for dropout). May be `scores`.
        grad_scores: Same shape, in the matmul's dtype; receives the gradient of the scaled QK^T. May be
            `grad_probs` unless a softcap meets `keep_bias_grad`.
        stats: Statistics of the whole rows.
        delta: (batch rows, key heads, group, queries) of a contiguous tensor: the rows' sum of dO * O, less
            the gradient of their log-sum-exp; any number in rows without a key.
        keep_bias_grad: Whether the caller reads the bias gradient; here `grad_probs` always has it.
    """
    del keep_bias_grad
    slope = adjust_scores(tile, scores, want_slope=True)
    row_max, row_sum = stats.unbind(-1)
    empty = row_max == NEG_INF
    log_sum = row_sum.log().masked_fill_(empty, float("inf"))
    view, grad = scores.view(tile.shape), grad_probs.view(tile.shape)
    view.sub_(finite_shift(row_max)[..., None]).sub_(log_sum[..., None]).exp_()
    if tile.keep is not None:
        grad.mul_(tile.keep).mul_(tile.keep_scale)
    grad.sub_(delta.masked_fill(empty, 0.0)[..., None]).mul_(view)
    if tile.keep is not None:
        view.mul_(tile.keep)
    if slope is not None:
        torch.mul(grad_probs, slope, out=grad_scores)
    elif grad_scores is not grad_probs:
        grad_scores.copy_(grad_probs)
    if probs is not scores:
        probs.copy_(scores)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a * b`` over the last of four dimensions, in float32 or float64."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    dots = a.new_empty(a.shape[:3], dtype=wide)
    step = max(DOT_ELEMENTS // max(a.shape[0] * a.shape[1] * a.shape[3], 1), 1)
    for i in range(0, a.shape[2], step):
        part = slice(i, i + step)
        torch.sum(a[:, :, part].to(wide) * b[:, :, part], -1, out=dots[:, :, part])
    return dots


def finite_shift(row_max: Tensor) -> Tensor:
    """Return the row maxima with 0 for rows that have no key, so that exp(-inf - shift) is 0 and not NaN."""
    return row_max.masked_fill(row_max == NEG_INF, 0.0)


def adjust_scores(tile: Tile, scores: Tensor, *, want_slope: bool = False) -> Tensor | None:
    """Apply softcap, ALiBi, bias and masks to scaled scores in place.

    Returns:
        With `want_slope` and a softcap the derivative of the capped score by the score, else None.
    """
    slope = None
    if tile.softcap:
        scores.div_(tile.softcap).tanh_()
        slope = scores.square().neg_().add_(1.0) if want_slope else None
        scores.mul_(tile.softcap)
    view = scores.view(tile.shape)
    if tile.slopes is not None:
        view.addcmul_(tile.slopes, tile.distance(scores))
    if tile.bias is not None:
        view.add_(tile.bias)
    _mask_band(tile, scores)
    if tile.allow is not None:
        view.masked_fill_(~tile.allow, NEG_INF)
    return slope


def _mask_band(tile: Tile, scores: Tensor) -> None:
    """Mask outside the band, touching only the columns that some row of the tile may not see."""
    queries, keys = tile.shape[3:]
    view = scores.view(-1, queries, keys)
    ahead = tile.j0 - tile.i0
    lo, hi = tile.limits.band_lo, tile.limits.band_hi
    if lo is not None and (columns := min(queries - 1 + lo - ahead, keys)) > 0:
        outside = _offsets(scores, queries, 0, columns) < lo - ahead
        view[..., :columns].masked_fill_(outside, NEG_INF)
    if hi is not None and (first := max(hi + 1 - ahead, 0)) < keys:
        outside = _offsets(scores, queries, first, keys) > hi - ahead
        view[..., first:].masked_fill_(outside, NEG_INF)


def _offsets(scores: Tensor, queries: int, first: int, last: int) -> Tensor:
    """Return column - row for columns [first, last) of a tile as (queries, columns)."""
    columns = torch.arange(first, last, device=scores.device)
    return columns - torch.arange(queries, device=scores.device)[:, None]
