"""Mask objects that mean nothing, or do not fit a call, are refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attnroute import masks
from attnroute.errors import ArgumentError

CAUSAL_WORDS = 'alignment requires one of "top_left" and "bottom_right"; got \'middle\'; state which corner'


REFUSED = [
    (lambda: masks.Causal("middle"), CAUSAL_WORDS),
    (lambda: masks.Window(3, 0, "middle"), CAUSAL_WORDS),
    (
        lambda: masks.Window(-1),
        "Window left requires a count of at least 0, or None for no limit; got -1; pass None",
    ),
    (
        lambda: masks.Window(3, -2),
        "Window right requires a count of at least 0, or None for no limit; got -2; pass",
    ),
    (
        lambda: masks.Window(2.5),
        "Window left requires a count of at least 0, or None for no limit; got 2.5; pass None",
    ),
    (
        lambda: masks.Window("3"),
        "Window left requires a count of at least 0, or None for no limit; got '3'; pass None",
    ),
    (
        masks.Documents,
        "Documents requires exactly one of lengths, ids, cu_seqlens and position_ids; got none; pass one",
    ),
    (
        lambda: masks.Documents(lengths=[1], ids=torch.zeros(1)),
        "Documents requires exactly one of lengths, ids, cu_seqlens and position_ids; got ['lengths', 'ids']",
    ),
    (
        lambda: masks.Documents(position_ids=torch.zeros(1, 2, 3, dtype=torch.int64)),
        "Documents position_ids requires a 1-D or 2-D integer tensor; got torch.int64 of shape (1, 2, 3);",
    ),
    (
        lambda: masks.Documents(position_ids=[0, 1]),
        "Documents position_ids requires a 1-D or 2-D integer tensor; got list; convert it.",
    ),
    (lambda: masks.PrefixLM([1], "middle"), CAUSAL_WORDS),
    (
        lambda: masks.PrefixLM(3),
        "PrefixLM lengths requires a sequence of counts; got 3; pass a list of ints.",
    ),
    (
        lambda: masks.PrefixLM([2, -1]),
        "PrefixLM lengths requires counts of at least 0; got (2, -1); pass how many tokens there are.",
    ),
    (
        lambda: masks.PrefixLM(torch.ones(2)),
        "PrefixLM lengths requires a 1-D integer tensor; got torch.float32 of shape (2,); convert it.",
    ),
    (
        lambda: masks.Function(torch.ones(2, 2)),
        "mask Function requires a function; got Tensor; pass a mask_mod or score_mod.",
    ),
    (
        lambda: masks.Blocks(torch.ones(2, 2)),
        "mask Blocks requires a BlockMask of torch; got Tensor; make one with create_block_mask, or pass",
    ),
    (
        lambda: masks.Documents(lengths=3),
        "Documents lengths requires a sequence of counts; got 3; pass a list of ints.",
    ),
    (
        lambda: masks.Documents(lengths=[-1, 5]),
        "Documents lengths requires counts of at least 0; got (-1, 5); pass how many tokens there are.",
    ),
    (
        lambda: masks.Documents(ids=torch.zeros(4)),
        "Documents ids requires a 1-D or 2-D integer tensor; got torch.float32 of shape (4,); convert it.",
    ),
    (
        lambda: masks.Documents(ids=[0, 0, 1]),
        "Documents ids requires a 1-D or 2-D integer tensor; got list; convert it.",
    ),
    (
        lambda: masks.Documents(cu_seqlens=torch.zeros(2, 3, dtype=torch.int32)),
        "Documents cu_seqlens requires a 1-D integer tensor; got torch.int32 of shape (2, 3); convert it.",
    ),
    (
        lambda: masks.Documents(cu_seqlens=torch.tensor([0])),
        "Documents cu_seqlens requires at least two elements, a start and an end; got 1; pass [0, seqlen]",
    ),
    (
        masks.KeyPadding,
        "KeyPadding requires exactly one of lengths, left and keep; got none; pass one of them.",
    ),
    (
        lambda: masks.KeyPadding(lengths=[1], left=[1]),
        "KeyPadding requires exactly one of lengths, left and keep; got ['lengths', 'left']; pass",
    ),
    (
        lambda: masks.KeyPadding(left=4),
        "KeyPadding left requires a sequence of counts; got 4; pass a list of ints.",
    ),
    (
        lambda: masks.KeyPadding(lengths=[2.5]),
        "KeyPadding lengths requires a sequence of counts; got [2.5]; pass a list of ints.",
    ),
    (
        lambda: masks.KeyPadding(lengths=torch.ones(2, 1, dtype=torch.int64)),
        "KeyPadding lengths requires a 1-D integer tensor; got torch.int64 of shape (2, 1); convert it.",
    ),
    (
        lambda: masks.KeyPadding(keep=torch.ones(2, 4)),
        "KeyPadding keep requires a bool tensor; got torch.float32; convert it with .bool().",
    ),
    (
        lambda: masks.Dense(torch.zeros(4, 4)),
        "mask Dense requires a bool tensor; got torch.float32; pass a float tensor as bias.",
    ),
    (
        lambda: masks.Dense([[True]]),
        "mask Dense requires a bool tensor; got list; pass a float tensor as bias.",
    ),
]


FLAGS = torch.ones(3, 5, dtype=torch.bool)


def blocks(*sizes):
    return create_block_mask(lambda _b, _h, i, j: j <= i, *sizes, device="cpu")


DOES_NOT_FIT = [
    (
        masks.Documents(lengths=[4]),
        (1, 3, 4),
        "mask Documents requires as many queries as keys; got seqlen_q = 3, s",
    ),
    (
        masks.Documents(lengths=[1, 2]),
        (1, 4, 4),
        "mask Documents lengths requires a sum of seqlen = 4; got (1, 2) with",
    ),
    (
        masks.Documents(ids=torch.zeros(2, 4, dtype=torch.int64)),
        (3, 4, 4),
        "mask Documents ids requires shape (4,) or (3, 4); got (2, 4); give every token",
    ),
    *(
        (
            masks.Documents(cu_seqlens=torch.tensor(sums)),
            (1, 4, 4),
            f"mask Documents cu_seqlens requires sums that rise from 0 to seqlen = 4; got {sums}; add",
        )
        for sums in ([0, 3], [1, 4], [0, 3, 2, 4], [0, 5], [4, 0])
    ),
    (
        masks.KeyPadding(lengths=[1, 2]),
        (3, 4, 4),
        "mask KeyPadding lengths requires one entry per batch row (3); got 2; pass one count per row.",
    ),
    (
        masks.KeyPadding(left=torch.tensor([1, 2])),
        (3, 4, 4),
        "mask KeyPadding left requires one entry per batch row (3); got 2; pass one count per row.",
    ),
    (
        masks.KeyPadding(lengths=[1, 5]),
        (2, 8, 4),
        "mask KeyPadding lengths requires counts from 0 to seqlen_kv = 4; got (1, 5); count keys",
    ),
    (
        masks.KeyPadding(keep=FLAGS),
        (3, 4, 4),
        "mask KeyPadding keep requires shape (3, 4); got (3, 5); pass one bool per key and batch row.",
    ),
    (
        masks.Dense(FLAGS),
        (1, 4, 4),
        "broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) = (1, 1, 4, 4); got (3, 5); reshape",
    ),
    (
        masks.Dense(FLAGS[None]),
        (1, 3, 5),
        "got 3-D shape (1, 3, 5); say whether the first dimension is batch",
    ),
    (masks.Dense(FLAGS[None, None, None]), (1, 3, 5), "got (1, 1, 1, 3, 5); reshape it"),
    (
        masks.Documents(position_ids=torch.zeros(2, 4, dtype=torch.int64)),
        (3, 4, 4),
        "mask Documents position_ids requires shape (4,) or (3, 4); got (2, 4); give every token its pos",
    ),
    (
        masks.PrefixLM([1, 2]),
        (3, 4, 4),
        "mask PrefixLM lengths requires one entry per batch row (3); got 2; pass one count per row.",
    ),
    (
        masks.PrefixLM([1, 5]),
        (2, 8, 4),
        "mask PrefixLM lengths requires counts from 0 to seqlen_kv = 4; got (1, 5); count keys",
    ),
    (
        masks.Blocks(blocks(1, 1, 4, 4)),
        (1, 4, 8),
        "mask requires a BlockMask made for seqlen_q = 4, seqlen_kv = 8; got (4, 4); make one with",
    ),
    (
        masks.Blocks(blocks(2, 1, 4, 4)),
        (3, 4, 4),
        "mask requires a BlockMask for 1 or 3 batch rows and 1 or 1 heads; got (2, 1); make one for this",
    ),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_means_nothing_is_refused_when_it_is_made(make, said):
    with pytest.raises(ArgumentError) as raised:
        make()
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("mask", "sizes", "said"), DOES_NOT_FIT, ids=[said[:50] for _, _, said in DOES_NOT_FIT]
)
def test_what_does_not_fit_is_refused_when_it_is_read(mask, sizes, said):
    batch, seqlen_q, seqlen_kv = sizes
    with pytest.raises(ArgumentError) as raised:
        mask.materialize(seqlen_q, seqlen_kv, batch=batch)
    assert said in str(raised.value)
    with pytest.raises(ArgumentError):
        (mask & masks.Causal()).materialize(seqlen_q, seqlen_kv, batch=batch)
