"""Bands as cuDNN's attention graph counts them, and which tokens a band leaves alone.

The graph counts from either corner, and each side has at least its diagonal: no side is negative. A request
counts from the bottom right, where a band that the caller counts from the top left may have a negative side.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from attnroute.executors.packages.request import to_bhsd
from attnroute.executors.prepare.sink import sink_gradient as sum_of_sink
from attnroute.executors.ragged import places
from attnroute.memory import cached

if TYPE_CHECKING:
    from attnroute.executors.packages.request import Gradients, Launched, Request


class Band(NamedTuple):
    """How many keys beside the diagonal a query sees.

    Attributes:
        left: Before it; None = all.
        right: After it; None = all, 0 = causal.
        bottom_right: The diagonal ends with the last query and key; it starts with the first ones otherwise.
    """

    left: int | None
    right: int | None
    bottom_right: bool


def band_of(request: Request, *, is_ragged: bool) -> Band:
    """Return the band of a request, counted from a corner where no side is negative.

    Where both corners serve, a causal side comes first and then the top left: cuDNN has had these longest.

    Raises:
        ValueError: A side is negative from either corner.
    """
    offset = None if is_ragged else request.offset
    return _band(request.left, request.right, offset, single=request.max_seqlen_q == 1)


@cached(1024)
def _band(left: int | None, right: int | None, offset: int | None, *, single: bool) -> Band:
    """Return the band of one request; `offset` is None where each sequence has its own."""
    if single and right is not None and right >= 0:
        # The only query of a sequence is its last, and no key comes after the diagonal.
        right = None
    if left is None and right is None:
        return Band(None, None, bottom_right=False)
    corners = [Band(left, right, bottom_right=True)]
    if offset is not None:
        corners.append(Band(_plus(left, -offset), _plus(right, offset), bottom_right=False))
    fitting = [c for c in corners if not any(side is not None and side < 0 for side in (c.left, c.right))]
    if not fitting:
        msg = (
            f"window requires sides that are not negative from one corner; got {left} keys to the left and"
            f" {right} to the right of the diagonal from the bottom right; the decision promised such sides."
        )
        raise ValueError(msg)
    return min(fitting, key=lambda c: (c.right != 0, c.bottom_right))


def _plus(side: int | None, offset: int) -> int | None:
    return None if side is None else side + offset


def zero_unattended_rows(request: Request, result: Launched) -> Launched:
    """Return a ragged forward's results with zeros and the log-sum-exp of nothing for queries without keys.

    cuDNN before 9.25 gives NaN for sequences of no length (NVIDIA/cudnn-frontend#943).
    """
    if not request.may_leave_rows_empty:
        return result
    empty = unattended_queries(request)
    nothing = -math.inf if request.sink is None else request.sink.float()[:, None]
    lse = torch.where(empty, nothing, result.lse)
    return result._replace(out=result.out.masked_fill(empty[:, None, None], 0.0), lse=lse)


def zero_unattended_gradients(request: Request, grads: Gradients) -> Gradients:
    """Return a ragged backward's gradients with zeros for tokens that no pair has."""
    if not request.may_leave_rows_empty:
        return grads
    queries, keys = (
        empty[:, None, None] for empty in (unattended_queries(request), unattended_keys(request))
    )
    return grads._replace(
        query=grads.query.masked_fill(queries, 0.0),
        key=grads.key.masked_fill(keys, 0.0),
        value=grads.value.masked_fill(keys, 0.0),
    )


def without_minus_infinity(request: Request, lse: Tensor) -> Tensor:
    """Return a log-sum-exp, -inf in rows with no key, as a backward reads it: there nothing weighs anything.

    exp(-inf - inf) is 0, and exp(-inf + inf) is NaN.
    """
    return lse.masked_fill(lse == -math.inf, math.inf) if request.may_leave_rows_empty else lse


def sink_gradient(request: Request, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor | None:
    """Return the gradient of a request's sinks, float32 (num_heads_q,).

    Args:
        request: The request.
        out: The output, with the sinks.
        lse: The log-sum-exp, with the sinks; +inf where there is neither key nor sink.
        grad_out: The gradient of the output.
    """
    if request.sink is None:
        return None
    if request.is_ragged:
        grad_out, out, lse = grad_out[None].transpose(1, 2), out[None].transpose(1, 2), lse[None]
    else:
        grad_out, out = to_bhsd(request, grad_out), to_bhsd(request, out)
    return sum_of_sink(grad_out, out, lse, request.sink.float())


def unattended_queries(request: Request) -> Tensor:
    """Return bool (total_q,) of a ragged batch, True where a query may attend no key."""
    sums_q, _, lengths_q, lengths_kv = _sequences(request)
    offset = lengths_kv - lengths_q
    first = None if request.left is None else offset - request.left
    last = None if request.right is None else offset + request.right
    return _unattended(sums_q, request.query.shape[0], lengths_kv, first, last)


def unattended_keys(request: Request) -> Tensor:
    """Return bool (total_kv,) of a ragged batch with all keys in use, True where no query may attend it."""
    _, sums_kv, lengths_q, lengths_kv = _sequences(request)
    offset = lengths_q - lengths_kv
    first = None if request.right is None else offset - request.right
    last = None if request.left is None else offset + request.left
    return _unattended(sums_kv, request.key.shape[0], lengths_q, first, last)


def _sequences(request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return prefix sums of queries and keys of a ragged batch, and the lengths of its sequences."""
    sums_q, sums_kv = cast("Tensor", request.cu_seqlens_q), cast("Tensor", request.cu_seqlens_kv)
    return sums_q, sums_kv, sums_q.diff(), sums_kv.diff() if request.used_kv is None else request.used_kv


def _unattended(
    sums: Tensor, total: int, others: Tensor, first: Tensor | None, last: Tensor | None
) -> Tensor:
    """Return which tokens attend, or are attended by, no token of the other side.

    Args:
        sums: Prefix sums of the tokens.
        total: How many tokens there are.
        others: Tokens of each sequence on the other side.
        first: The first place that a sequence's token 0 reaches, per sequence; later tokens reach later ones.
        last: The last place that it reaches.
    """
    ids, at = places(sums, total)
    start = torch.zeros_like(at) if first is None else (at + first[ids]).clamp(min=0)
    end = others[ids] - 1
    return start > (end if last is None else torch.minimum(at + last[ids], end))
