"""Lists of blocks in the size that a kernel takes, from masks of every kind and from lists of other sizes."""

from __future__ import annotations

import pytest
import torch
from support.cudnn_checks import allowed_of
from support.flex_fa4_calls import FLASH, asked_of, inputs_of, plan, uncompiled
from support.reference import attend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attnroute import masks
from attnroute.executors.flex import run as flex
from attnroute.executors.flex.program import blocked
from attnroute.masks.kept import keeper_of


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    with uncompiled(monkeypatch) as found:
        yield found


LENGTH = 600


def seventh(b, h, i, j):
    return (i - j) % 7 < 3


SIZES = [(128, 128), (256, 128), (128, 256)]
IDS = (torch.arange(LENGTH) // 170)[None].expand(2, -1).contiguous()
MASKS = {
    "causal": masks.Causal(),
    "window": masks.Window(200, 9),
    "documents": masks.Documents(ids=IDS) & masks.Causal(),
    "documents in one row": masks.Documents(ids=IDS[:1].contiguous()),
    "documents or a window": masks.Documents(ids=IDS) | masks.Window(40, 0),
    "padding": masks.KeyPadding(lengths=torch.tensor([600, 130])),
    "prefix": masks.PrefixLM(lengths=torch.tensor([300, 5])),
    "predicate": masks.Function(seventh),
}


def sized(size):
    options = (("SPARSE_Q_BLOCK_SIZE", size[0]), ("SPARSE_KV_BLOCK_SIZE", size[1]))
    return plan(options=(*FLASH, *options))


def matrix(numbers, indices, columns):
    """Return bool (batch, heads, rows, columns), True for the blocks that lists name."""
    found = torch.zeros(*numbers.shape, columns, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in numbers.shape)).tolist():
        listed = indices[tuple(place)][: numbers[tuple(place)]]
        found[tuple(place)][listed.long()] = True
    return found


def hold_lists(tensors, size, allowed):
    """Hold that full blocks allow everything, and blocks that no list names nothing."""
    columns = -(-LENGTH // size[1])
    partial, full = matrix(*tensors[:2], columns), matrix(*tensors[2:4], columns)
    assert partial.shape[-2] == -(-LENGTH // size[0])
    assert not (partial & full).any()
    spread = [
        t.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :LENGTH, :LENGTH]
        for t in (partial, full)
    ]
    wide = allowed.expand(torch.broadcast_shapes(allowed.shape, spread[0].shape))
    assert not (wide & ~(spread[0] | spread[1])).any(), "an allowed pair lies in no block"
    assert not (spread[1] & ~wide).any(), "a full block has a pair that is not allowed"
    rows = matrix(*tensors[4:6], partial.shape[-2]), matrix(*tensors[6:8], partial.shape[-2])
    assert torch.equal(rows[0].mT, partial), "the lists of rows are not those of columns"
    assert torch.equal(rows[1].mT, full)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", MASKS)
def test_lists_have_the_size_that_the_plan_states(graphs, case, size):
    mask = MASKS[case]
    inputs = inputs_of(mask, LENGTH)
    out, _ = flex.run(inputs, sized(size))
    (graph,) = graphs
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
    assert tuple(node.args[4][-3:-1]) == size
    assert not {"SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE"} & asked_of(graph).keys()
    allowed = allowed_of(mask, inputs)
    hold_lists(blocked(inputs, size).blocks, size, allowed)
    want, _ = attend(inputs.query, inputs.key, inputs.value, allowed=allowed)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"), [("SPARSE_Q_BLOCK_SIZE", (256, 128)), ("SPARSE_KV_BLOCK_SIZE", (128, 256))]
)
def test_one_side_that_is_stated_leaves_the_other_as_usual(graphs, name, size):
    flex.run(inputs_of(masks.Causal(), LENGTH), plan(options=(*FLASH, (name, 256))))
    (graph,) = graphs
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
    assert tuple(node.args[4][-3:-1]) == size


def strided(b, h, i, j):
    return (j <= i) & ((i - j) % 3 != 1)


@pytest.mark.parametrize(
    ("given", "size", "is_kept"),
    [
        ((128, 128), (128, 128), True),
        ((256, 128), (128, 128), True),
        ((256, 128), (256, 128), True),
        ((128, 128), (256, 128), False),
        ((64, 64), (128, 128), False),
    ],
)
def test_a_block_mask_of_another_size_is_listed_anew(graphs, given, size, is_kept):
    block_mask = create_block_mask(strided, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=given)
    inputs = inputs_of(masks.Blocks(block_mask), LENGTH)
    made = blocked(inputs, size)
    assert made.size == (given if is_kept else size)
    assert (made.blocks[0] is block_mask.kv_num_blocks) is is_kept
    rows = torch.arange(LENGTH)
    gap = rows[:, None] - rows
    allowed = ((gap >= 0) & (gap % 3 != 1))[None, None]
    hold_lists(made.blocks, made.size, allowed)
    out, _ = flex.run(inputs, sized(size))
    want, _ = attend(inputs.query, inputs.key, inputs.value, allowed=allowed)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_sizes_do_not_share_lists_or_code(graphs):
    """A mask object keeps its lists: those of one size are not handed to a kernel of another."""
    mask = masks.Documents(ids=IDS)
    inputs = inputs_of(mask, LENGTH)
    inputs.keeper = keeper_of(mask)
    for size in (*SIZES, *SIZES):
        flex.run(inputs, sized(size))
        hold_lists(blocked(inputs, size).blocks, size, allowed_of(mask, inputs))
    assert len(graphs) == len(SIZES)


@pytest.mark.parametrize(
    ("length", "size", "is_used"),
    [
        (384, (256, 256), False),
        (384, (128, 256), False),
        (384, (256, 128), False),
        (384, (128, 128), True),
        (512, (256, 256), True),
        # A kernel looks for the end of 600 tokens by itself, and one block holds all of 384.
        (600, (256, 256), True),
        (384, (512, 512), True),
        # The kernels' own tiles may be larger than a block of 64.
        (384, (64, 64), False),
        (384, (128, 64), False),
    ],
)
def test_lists_whose_last_block_ends_behind_the_last_token_are_listed_anew(length, size, is_used):
    block_mask = create_block_mask(seventh, None, None, length, length, device="cpu", BLOCK_SIZE=size)
    made = blocked(inputs_of(masks.Blocks(block_mask), length))
    assert made.size == (size if is_used else (128, 128))
    assert (made.blocks[1] is block_mask.kv_indices) is is_used


def test_lists_of_full_blocks_that_lie_otherwise_than_the_partial_ones_are_listed_anew():
    def below(b, h, i, j):
        return j <= i

    whole = create_block_mask(below, None, None, LENGTH, LENGTH, device="cpu")
    spaced = torch.nn.functional.pad(whole.full_kv_indices, (0, 3))[..., :-3]
    other = BlockMask.from_kv_blocks(
        whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, spaced, mask_mod=below
    )
    assert other.kv_indices.stride() != other.full_kv_indices.stride()
    for block_mask, is_used in ((whole, True), (other, False)):
        inputs = inputs_of(masks.Blocks(block_mask), LENGTH)
        made = blocked(inputs)
        assert (made.blocks[1] is block_mask.kv_indices) is is_used
        allowed = (torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH))[None, None]
        hold_lists(made.blocks, made.size, allowed)
