"""Lists of blocks miss no allowed pair, and what they call full holds no forbidden one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from support.mask_trees import by_block, masks, written_out

from attnroute.masks import Causal, Dense, Documents, KeyPadding, Window
from attnroute.masks.lowered.blocks import guess
from attnroute.masks.lowered.form import FULL, Extent

CPU = torch.device("cpu")


@settings(max_examples=150, deadline=None)
@given(masks())
def test_no_allowed_pair_is_outside_of_the_listed_blocks_and_no_full_block_holds_a_forbidden_one(drawn):
    mask, extent = drawn
    block = (4, 3)
    some, every = guess(mask.lower(FULL, extent), extent, block)
    full = written_out(mask, extent)
    assert (some | ~by_block(full, block, "any")).all()
    assert (~every | by_block(full, block, "all")).all()


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Causal("bottom_right"),
        Window(5, 2),
        Window(3, 0, "bottom_right"),
        KeyPadding(lengths=[3, 9]),
        KeyPadding(left=[3, 9]),
        Dense(torch.rand(2, 3, 14, 17, generator=torch.Generator().manual_seed(0)) > 0.8),
    ],
    ids=repr,
)
def test_simple_masks_list_exactly_the_blocks_that_hold_something(mask):
    extent = Extent(2, 3, 14, 17, CPU)
    some, every = guess(mask.lower(FULL, extent), extent, (4, 3))
    full = written_out(mask, extent)
    assert torch.equal(some.expand(2, 3, 4, 6), by_block(full, (4, 3), "any"))
    assert torch.equal(every.expand(2, 3, 4, 6), by_block(full, (4, 3), "all"))


def test_documents_list_exactly_the_blocks_on_their_diagonal():
    extent = Extent(1, 1, 16, 16, CPU)
    mask = Causal() & Documents(lengths=[8, 8])
    some, every = guess(mask.lower(FULL, extent), extent, (4, 4))
    full = written_out(mask, extent)
    assert torch.equal(some, by_block(full, (4, 4), "any"))
    assert torch.equal(every, by_block(full, (4, 4), "all"))


def test_a_long_band_is_listed_without_anything_of_size_seqlen_q_times_seqlen_kv():
    length = 2**20
    extent = Extent(1, 1, length, length, CPU)
    some, _ = guess(Window(4095).lower(FULL, extent), extent, (1024, 1024))
    assert some.shape == (1, 1, 1024, 1024)
    assert some.sum().item() == sum(min(row, 4) + 1 for row in range(1024))
