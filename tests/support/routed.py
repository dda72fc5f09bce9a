"""Inputs and modules for tests of `route_sdpa()`, and what ran in a block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attnroute


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def routed_calls(function):
    """Return what a function gives inside of the block, and how many calls ran on attnroute there."""
    with attnroute.trace() as trace, attnroute.route_sdpa():
        result = function()
    return result, sum(call.count or 1 for call in trace.calls)


class _Counting(TorchFunctionMode):
    """Counts the calls of torch's scaled_dot_product_attention."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def counted_calls(function):
    """Return what a function gives outside of every block, and how often it calls torch's function."""
    with _Counting() as mode:
        result = function()
    return result, mode.count


QUERY, KEY, VALUE = normal(2, 4, 6, 16), normal(2, 4, 9, 16), normal(2, 4, 9, 16)
TOKENS = normal(2, 8, 32)


def multi_head(**named):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    return module, lambda: module(TOKENS, TOKENS, TOKENS, need_weights=False, **named)[0]


def is_routed():
    with attnroute.trace() as trace:
        F.scaled_dot_product_attention(QUERY, KEY, VALUE)
    return bool(trace.calls)
