"""Torch's own mask objects: what ours say of them is what torch says."""

from __future__ import annotations

import pytest
import torch
from support.mask_objects import HEADS, table
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnroute import masks
from attnroute.masks.lowered.form import Extent
from attnroute.masks.objects.arbitrary import from_torch
from attnroute.question.nodes import FunctionNode

MARKS = torch.tensor([0, 1, 1, 0, 2, 2, 2, 1] * 40)


def causal(_b, _h, i, j):
    return j <= i


def by_mark(b, h, i, j):
    return (MARKS[i] == MARKS[j]) & (j <= i + b + 2 * h)


@pytest.mark.parametrize(("batch", "heads"), [(None, None), (2, None), (None, HEADS), (2, HEADS)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(20, 20), (33, 50), (64, 16), (7, 9)])
@pytest.mark.parametrize("block", [16, (16, 32)])
def test_a_block_mask_allows_what_its_function_does(batch, heads, seqlen_q, seqlen_kv, block):
    mask_mod = by_mark if (batch, heads) == (2, HEADS) else causal
    given = create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_kv, device="cpu", BLOCK_SIZE=block)
    mask = from_torch(given)
    assert mask == masks.Blocks(given)
    got = mask.materialize(seqlen_q, seqlen_kv, batch=2, num_heads_q=HEADS)
    wanted = create_mask(mask_mod, 2, HEADS, seqlen_q, seqlen_kv, device="cpu")
    assert torch.equal(got.expand(wanted.shape), wanted)


def test_blocks_that_are_not_listed_are_forbidden_whatever_the_function_says():
    given = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    # One key block, that of the query, in each row of blocks; full ones nowhere.
    given.kv_num_blocks[:] = 1
    given.kv_indices[..., 0] = torch.arange(2, dtype=torch.int32)
    given.full_kv_num_blocks[:] = 0
    wanted = table(1, 32, 32, lambda _b, _h, i, j: j <= i and j // 16 == i // 16)[:, :1]
    assert torch.equal(masks.Blocks(given).materialize(32, 32), wanted)


def test_blocks_combine_with_other_masks():
    given = masks.Blocks(create_block_mask(causal, None, None, 20, 20, device="cpu", BLOCK_SIZE=16))
    got = (given & ~masks.Window(2) | masks.KeyPadding(lengths=[1])).materialize(20, 20)
    wanted = table(1, 20, 20, lambda _b, _h, i, j: j < i - 2 or j < 1)[:, :1]
    assert torch.equal(got, wanted)


def test_blocks_say_for_which_lengths_rows_and_heads_they_were_made():
    for batch, heads in ((1, 1), (2, 1), (2, HEADS)):
        given = masks.Blocks(create_block_mask(by_mark, batch, heads, 20, 30, device="cpu"))
        node = FunctionNode(block_mask_shape=(20, 30), per_batch=batch > 1, per_head=heads > 1)
        assert given.describe(Extent(2, HEADS, 20, 30)) == (node,)


def test_blocks_list_their_tensors_and_those_of_their_function():
    given = create_block_mask(by_mark, None, None, 20, 20, device="cpu")
    found = {id(t) for t in masks.Blocks(given).tensors}
    assert {id(t) for t in (given.kv_num_blocks, given.kv_indices, given.q_indices, MARKS)} <= found


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(3, 5), (4, 4), (1, 6)])
def test_a_causal_bias_is_causal_in_its_corner(seqlen_q, seqlen_kv):
    for make, alignment in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        given = make(seqlen_q, seqlen_kv)
        mask = from_torch(given)
        assert mask == masks.Causal(alignment)
        wanted = given._materialize()
        assert wanted.dtype == torch.bool
        assert torch.equal(mask.materialize(seqlen_q, seqlen_kv)[0, 0], wanted)


@pytest.mark.parametrize(
    "other", [None, torch.ones(2, 2), torch.ones(2, 2).bool(), causal, masks.Causal(), "causal"]
)
def test_anything_else_is_not_torchs(other):
    assert from_torch(other) is None
