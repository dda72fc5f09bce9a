"""Key padding as kernels get it: flags, and counts where the padding is at one side."""

from __future__ import annotations

import pytest
import torch

from attnroute import masks
from attnroute.masks.lowered.form import FULL, Extent

COUNTS = [2, 0, 5]


@pytest.mark.parametrize("made", [tuple, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
@pytest.mark.parametrize(("side", "counts"), [("right", [2, 0, 5]), ("left", [3, 5, 0])])
def test_padding_at_one_side_is_counted(made, side, counts):
    mask = masks.KeyPadding(lengths=made(COUNTS)) if side == "right" else masks.KeyPadding(left=made(COUNTS))
    lowered = mask.lower(FULL, Extent(3, 1, 4, 5))
    assert (lowered.key_counts.tolist(), lowered.padding_side) == (counts, side)
    assert lowered.key_counts.dtype == torch.int32
    assert lowered.key_keep.sum(1).tolist() == counts
    assert mask.lower(FULL, Extent(3, 1, 4, 5)).key_counts is lowered.key_counts


def test_counts_are_within_the_row_whatever_was_given():
    wild = torch.tensor([-3, 2, 2**40])
    extent = Extent(3, 1, 5, 5)
    assert masks.KeyPadding(lengths=wild).lower(FULL, extent).key_counts.tolist() == [0, 2, 5]
    assert masks.KeyPadding(left=wild).lower(FULL, extent).key_counts.tolist() == [5, 3, 0]


def test_padding_that_is_no_count_is_not_counted():
    extent = Extent(3, 1, 4, 5)
    right, left = masks.KeyPadding(lengths=COUNTS), masks.KeyPadding(left=[0, 1, 5])
    flags = masks.KeyPadding(keep=torch.ones(3, 5, dtype=torch.bool))
    for mask in (flags, right & left, left & right, flags & right, right & flags):
        lowered = mask.lower(FULL, extent)
        assert (lowered.key_counts, lowered.padding_side) == (None, None)
        assert lowered.key_keep is not None


def test_paddings_at_the_same_side_are_counted_together():
    extent = Extent(3, 1, 4, 5)
    both = masks.KeyPadding(lengths=[2, 0, 5]) & masks.KeyPadding(lengths=torch.tensor([1, 3, 4]))
    lowered = both.lower(FULL, extent)
    assert (lowered.key_counts.tolist(), lowered.padding_side) == ([1, 0, 4], "right")
    both = masks.KeyPadding(left=[2, 0, 5]) & masks.KeyPadding(left=[3, 0, 1])
    lowered = both.lower(FULL, extent)
    assert (lowered.key_counts.tolist(), lowered.padding_side) == ([2, 5, 0], "left")
    assert torch.equal(lowered.key_keep, both.materialize(4, 5, batch=3).expand(3, 1, 4, 5)[:, 0, 0])


def test_padding_that_rules_nothing_out_is_as_little_there_as_decisions_say():
    extent = Extent(3, 1, 4, 5)
    everything = masks.KeyPadding(lengths=[5, 5, 5])
    assert everything.lower(FULL, extent) == FULL
    lowered = (everything & masks.KeyPadding(left=torch.tensor(COUNTS))).lower(FULL, extent)
    assert lowered.padding_side == "left"
