"""aten::_flash_attention_forward in plain torch: what it takes, what it means, what it leaves unwritten.

Written after flash_api.cpp of torch 2.13: how windows are opened, the case of one query per sequence, the
log-sum-exp of rows with no key. Whatever no sequence writes stays NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import torch
from support.reference import attend


@dataclass
class Seen:
    """The calls of the kernel, and in which form it gives the log-sum-exp."""

    padded_lse: bool = False
    calls: list = field(default_factory=list)

    @property
    def only(self):
        (call,) = self.calls
        return call


def install(monkeypatch, *, padded_lse=False):
    """Put the kernel in the place of torch's and return what it will have seen."""
    seen = Seen(padded_lse)

    def run(*args, **options):
        return _forward(seen, *args, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", SimpleNamespace(default=run))
    return seen


def _forward(
    seen,
    query,
    key,
    value,
    sums_q,
    sums_kv,
    longest_q,
    longest_kv,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
):
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    assert all(t.stride(-1) == 1 for t in (query, key, value))
    left = -1 if window_size_left is None else window_size_left
    right = -1 if window_size_right is None else window_size_right
    if sums_q is None:
        shapes = (query.shape[:2], key.shape[:2])
        sums_q, sums_kv = (torch.arange(0, b * s + 1, s, dtype=torch.int32) for b, s in shapes)
        longest_q, longest_kv = query.shape[1], key.shape[1]
        batched = query.shape[:2]
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    else:
        batched = None
        _check_sums(sums_q, sums_kv, longest_q, longest_kv, query, key, seqused_k)
    seen.calls.append(
        SimpleNamespace(
            sums_q=sums_q,
            sums_kv=sums_kv,
            longest_q=longest_q,
            longest_kv=longest_kv,
            window=(window_size_left, window_size_right),
            used=seqused_k,
            pointers=[t.data_ptr() for t in (query, key, value)],
        )
    )
    if batched is None and longest_q == 1 and query.shape[1] > key.shape[1] and left < 0 and right < 0:
        # Query heads become queries, which are found without their prefix sums.
        assert query.shape[0] == sums_q.numel() - 1, "shape is invalid for input"
        assert sums_q.diff().eq(1).all()
    window = _window(left, right, longest_kv)
    out, lse = _sequences(query, key, value, sums_q, sums_kv, seqused_k, window, scale)
    if batched is not None:
        return out.unflatten(0, batched), lse.unflatten(1, batched).transpose(0, 1), None, None, None
    return out, _padded(lse, sums_q, longest_q) if seen.padded_lse else lse, None, None, None


def _check_sums(sums_q, sums_kv, longest_q, longest_kv, query, key, used):
    for sums, longest, tensor in ((sums_q, longest_q, query), (sums_kv, longest_kv, key)):
        assert sums.dtype == torch.int32
        assert sums.is_contiguous()
        assert (sums.diff() >= 0).all()
        assert sums[-1] == tensor.shape[0], "tokens are left out, or memory behind them is read"
        assert used is not None or sums[0] == 0
        assert isinstance(longest, int)
    assert sums_q.shape == sums_kv.shape
    assert sums_q.diff().max() <= longest_q
    lengths_kv = sums_kv.diff() if used is None else used
    assert lengths_kv.max() <= longest_kv
    if used is not None:
        assert not torch.is_grad_enabled() or not key.requires_grad
        assert used.dtype == torch.int32
        assert (sums_kv[:-1] + used <= key.shape[0]).all()


def _window(left, right, longest_kv):
    """Return the window as the kernel reads it; None is open on both sides."""
    left = -1 if left >= longest_kv else left
    right = -1 if right >= longest_kv else right
    if left < 0 and right < 0:
        return None
    return (longest_kv if left < 0 else left, longest_kv if right < 0 else right)


def _sequences(query, key, value, sums_q, sums_kv, used, window, scale):
    out = torch.full_like(query, math.nan, dtype=torch.float64)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan, dtype=torch.float64)
    for n in range(sums_q.numel() - 1):
        q0, q1 = sums_q[n].item(), sums_q[n + 1].item()
        k0 = sums_kv[n].item()
        k1 = sums_kv[n + 1].item() if used is None else k0 + used[n].item()
        distance = torch.arange(k1 - k0)[None] - torch.arange(q1 - q0)[:, None] - (k1 - k0) + (q1 - q0)
        allowed = None
        if window is not None:
            allowed = (distance >= -window[0]) & (distance <= window[1])
        rows = (t[a:b].transpose(0, 1)[None] for t, a, b in ((query, q0, q1), (key, k0, k1), (value, k0, k1)))
        part, part_lse = attend(*rows, allowed=allowed, scale=scale)
        out = torch.cat([out[:q0], part[0].transpose(0, 1), out[q1:]])
        lse[:, q0:q1] = part_lse[0].detach().masked_fill(part_lse[0] == -math.inf, math.inf)
    return out.to(query.dtype), lse


def _padded(lse, sums_q, longest_q):
    """Return the log-sum-exp as (sequences, num_heads_q, longest_q)."""
    rows = torch.full((sums_q.numel() - 1, lse.shape[0], longest_q), math.nan, dtype=lse.dtype)
    for n, (start, end) in enumerate(pairwise(sums_q.tolist())):
        rows[n, :, : end - start] = lse[:, start:end]
    return rows
