"""Mask objects that mean nothing, or do not fit a call, are refused in one sentence."""

from __future__ import annotations

import pytest
import torch

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
        "Documents requires exactly one of lengths, ids and cu_seqlens; got none; pass one of them.",
    ),
    (
        lambda: masks.Documents(lengths=[1], ids=torch.zeros(1)),
        "Documents requires exactly one of lengths, ids and cu_seqlens; got ['lengths', 'ids']; pass",
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
        masks.Documents(lengths=[4]) & masks.Documents(lengths=[4]),
        (1, 4, 4),
        "mask requires at most one Documents node; got 2; combine the ids into one node.",
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
