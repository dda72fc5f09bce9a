"""Masks written as expressions for FlexAttention allow what `materialize` allows."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from support.mask_trees import by_block, masks, written_out
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attnroute.masks import Blocks, KeyPadding, Window
from attnroute.masks.lowered.blocks import guess
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.masks.lowered.mods import CONSTANT_BANDS, Names, expression
from attnroute.memory import reset

CPU = torch.device("cpu")


def anybody(b, h, i, j):
    return j >= 0


@pytest.fixture(autouse=True)
def no_constants_yet():
    reset()


def asked(mask, extent, names=None):
    """Ask the expression for every pair."""
    names = names or Names("m")
    text = expression(mask.lower(FULL, extent), names, CPU)
    space = {f"m{n}": t for n, t in enumerate(names.tensors)}
    space |= {f"mf{n}": f for n, f in enumerate(names.functions)}
    mask_mod = eval(f"lambda b, h, i, j: {text}", space)  # our own text, made two lines above
    return create_mask(
        mask_mod, extent.batch, extent.num_heads_q, extent.seqlen_q, extent.seqlen_kv, device="cpu"
    )


@settings(max_examples=150, deadline=None)
@given(masks())
def test_the_expression_of_a_mask_is_the_mask(drawn):
    mask, extent = drawn
    assert torch.equal(asked(mask, extent), written_out(mask, extent))


@settings(max_examples=150, deadline=None)
@given(masks())
def test_for_cute_dsl_no_tensor_is_read_but_at_an_index_that_varies(drawn):
    """Neither a tensor without a dimension nor a constant index: pytorch#177813."""
    mask, extent = drawn
    names = Names("m", constants=False, cute_heads=extent.num_heads_q)
    text = expression(mask.lower(FULL, extent), names, CPU)
    for read in re.findall(r"\bm\d+\b(\[[^\[\]]*\])?", text):
        assert all(re.search(r"\b[bhij]\b", index) for index in read[1:-1].split(",")), text
    assert all(t.dim() for t in names.tensors)
    # What is multiplied by zero, or indexes a single entry, is a constant again when the code is made.
    assert "* 0" not in text
    for name in re.findall(r"\bm(\d+)\[h\]", text):
        assert names.tensors[int(name)].shape[0] > 1 or extent.num_heads_q == 1
    assert torch.equal(
        asked(mask, extent, Names("m", constants=False, cute_heads=extent.num_heads_q)),
        written_out(mask, extent),
    )


def test_masks_that_differ_in_tensors_only_have_one_text():
    extent = Extent(2, 1, 8, 8, CPU)
    texts = {
        expression(KeyPadding(lengths=[n, 3]).lower(FULL, extent), Names("m"), CPU) for n in range(8)
    } | {expression(KeyPadding(left=[n, 3]).lower(FULL, extent), Names("m"), CPU) for n in range(8)}
    assert texts == {"m0[b, j]"}


def test_after_a_few_windows_their_sizes_are_tensors():
    extent = Extent(1, 1, 64, 64, CPU)
    texts = [expression(Window(n).lower(FULL, extent), Names("m"), CPU) for n in range(1, 41)]
    assert len(set(texts)) == CONSTANT_BANDS + 1
    assert texts[-1] == "(j <= i) & (j - i >= m0)"
    assert texts[0] == expression(Window(1).lower(FULL, extent), Names("m"), CPU)


def test_limits_that_follow_the_lengths_are_tensors():
    texts = {
        expression(
            Window(9, 0, "bottom_right").lower(FULL, Extent(1, 1, 1, n, CPU)),
            Names("m", constants=False),
            CPU,
        )
        for n in range(20, 60)
    }
    assert texts == {"(j - i <= m0) & (j - i >= m1)"}


def test_a_block_mask_among_other_parts_keeps_its_blocks():
    blocks = create_block_mask(anybody, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=100)
    blocks.full_kv_num_blocks[:, :, 1] = 1  # The second row of blocks sees one block, whatever mask_mod says.
    extent = Extent(1, 1, 300, 300, CPU)
    mask = Blocks(blocks) & KeyPadding(left=[5])
    allowed = written_out(mask, extent)[0, 0]
    assert allowed.sum(-1).tolist() == [295] * 100 + [95] * 100 + [295] * 100
    assert torch.equal(asked(mask, extent)[0, 0], allowed)
    some, every = guess(mask.lower(FULL, extent), extent)
    assert (some | ~by_block(allowed[None, None], (128, 128), "any")).all()
    assert (~every | by_block(allowed[None, None], (128, 128), "all")).all()
