"""The ring beside one that is written by hand: the same numbers, in no more operators and messages."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
from support.context_parallel import drawn, mesh
from torch.utils._python_dispatch import TorchDispatchMode

import attnroute
from attnroute.distributed import context_parallel
from benchmarks import by_hand

TOKENS = 16


class Operators(TorchDispatchMode):
    """How often each operator runs, those of messages among them."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def counted(attend, leaves, grad):
    with Operators():
        attend(*leaves)  # A first call decides, with tensors of its own.
    with Operators() as forward:
        out = attend(*leaves)
    with Operators() as backward:
        grads = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *grads], forward.seen, backward.seen


def beside(causal, load_balance, heads_first, dtype):
    block = context_parallel(mesh(), load_balance=load_balance)
    own = [block.shard(t, 2).detach() for t in drawn(tokens=TOKENS, heads_kv=4, dtype=dtype)]
    if not heads_first:
        own = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in own]
    leaves = [t.requires_grad_() for t in own[:3]]
    hand = by_hand.Ring(dist.group.WORLD, "cpu", is_causal=causal, load_balance=load_balance)
    with block:
        ours = counted(lambda *t: attnroute.attention(*t, is_causal=causal), leaves, own[3])
    theirs = counted(hand, leaves, own[3])
    tolerance = {torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    for got, want in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    return [[sum(seen.values()) for seen in found[1:]] for found in (ours, theirs)], [
        [seen["c10d::send"] for seen in found[1:]] for found in (ours, theirs)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("causal", "load_balance"), [(True, True), (True, False), (False, False)])
def test_no_more_operators_than_by_hand(two_ranks, four_ranks, causal, load_balance, heads_first, dtype):
    for ranks in (two_ranks, four_ranks):
        for operators, messages in ranks.run(beside, causal, load_balance, heads_first, dtype):
            for ours, theirs in zip(*operators, strict=True):
                assert ours <= theirs, operators
            # Keys and values, and the sums of their gradients, are one message each.
            assert messages[0] == [ranks.size - 1, 2 * ranks.size - 1]
            assert messages[1] == [2 * n for n in messages[0]]


def other_features():
    block = context_parallel(mesh(), load_balance=True)
    tensors = drawn(tokens=TOKENS, dim=5, dim_v=3, heads_kv=1)
    own = [block.shard(t, 2).detach() for t in tensors]
    leaves = [t.requires_grad_() for t in own[:3]]
    with block:
        out = attnroute.attention(*leaves, is_causal=True, scale=0.3)
        again = attnroute.attention(*leaves, is_causal=True, scale=0.7)
    allowed = torch.ones(TOKENS, TOKENS).tril().bool()
    for got, scale in ((out, 0.3), (again, 0.7)):
        scores = (tensors[0] @ tensors[1].mT * scale).masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(got, block.shard(scores.softmax(-1) @ tensors[2], 2))


def test_calls_of_one_kind_may_have_other_scales_and_heads_of_any_width(two_ranks):
    two_ranks.run(other_features)
