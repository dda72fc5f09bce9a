"""`chunked` under masks that are programs: `|`, `~`, predicates, BlockMasks, diagonals of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_compare import TOLERANCE, Drawn, chunked_attention, compare
from support.chunked_reference import allowed as reference_allowed
from support.chunked_reference import error, reference, wide
from support.chunked_strategies import functions, programs
from support.chunked_tiling import Largest, tiling
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from attnroute.errors import ArgumentError, AttnRouteError
from attnroute.executors.chunked import call as chunked_call
from attnroute.executors.chunked import operator as chunked_op
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.executors.chunked.functions import is_wide
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.masks import Causal, Function, KeyPadding, PrefixLM
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, MaskFunction
from attnroute.masks.lowered.region import Region, allowed

LENGTH = st.sampled_from([1, 2, 5, 17, 33])
SIZES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), LENGTH, LENGTH)
TILES = st.sampled_from([400, 2**24])


def some_blocks(sizes, block=16):
    """Return a BlockMask with full, partial and empty blocks that differ between heads and batch rows."""
    return create_block_mask(
        lambda b, h, i, j: (j <= i + 5 * h) & (j >= 20 * b), *sizes, device="cpu", BLOCK_SIZE=block
    )


@given(data=st.data(), sizes=SIZES, dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_programs_against_float64(data, sizes, dtype, seed):
    drawn = Drawn(seed, dtype)
    mask = data.draw(programs(sizes, drawn.generator))
    heads_kv = data.draw(st.sampled_from([n for n in (1, 2, 4) if sizes[1] % n == 0]))
    with tiling(data.draw(TILES), data.draw(st.sampled_from([4, 8]))):
        tensors = drawn.tensors(sizes, heads_kv=heads_kv)
        compare(drawn, tensors, mask, block_q=data.draw(st.sampled_from([None, 16])))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tiles", [600, 2**20])
def test_blocks_among_other_masks(dtype, tiles):
    sizes = (2, 4, 70, 53)
    drawn = Drawn(1, dtype)
    shared = create_block_mask(lambda _b, _h, i, j: (i + j) % 7 != 3, None, None, *sizes[2:], device="cpu")
    mask = LoweredMask(
        band_hi=9,
        sparse=(some_blocks(sizes),),
        either=((LoweredMask(sparse=(shared,)), LoweredMask(band_lo=0)),),
    )
    with tiling(tiles, 8):
        compare(drawn, drawn.tensors(sizes, heads_kv=2), mask, block_q=12)


def test_full_blocks_allow_and_only_partial_blocks_ask():
    numbers = torch.tensor([[[1, 1]]]), torch.tensor([[[1, 1]]])
    indices = torch.tensor([[[[0, 2, 1], [2, 0, 1]]]]), torch.tensor([[[[1, 0, 2], [0, 1, 2]]]])
    never = BlockMask.from_kv_blocks(
        numbers[0], indices[0], numbers[1], indices[1], BLOCK_SIZE=(4, 3),
        mask_mod=lambda _b, _h, i, _j: i < 0, seq_lengths=(8, 9),
    )  # fmt: skip
    found = allowed(LoweredMask(sparse=(never,)), Region(0, 1, 0, 1, 2, 8, 1, 9, None))
    want = torch.zeros(8, 9, dtype=torch.bool)
    want[:4, 3:6] = True
    want[4:, :3] = True
    assert torch.equal(found[0, 0], want[2:8, 1:9])


@given(data=st.data(), sizes=SIZES, seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_a_region_is_a_slice_of_the_whole(data, sizes, seed):
    mask = data.draw(programs(sizes, torch.Generator().manual_seed(seed)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in sizes]
    region = Region(*(end for pair in ends for end in pair), None)
    found = allowed(mask, region)
    want = reference_allowed(mask, sizes)[tuple(slice(*pair) for pair in ends)]
    assert torch.equal(
        torch.ones(()).bool().expand(want.shape) if found is None else found.expand_as(want), want
    )


@given(data=st.data(), sizes=SIZES, seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_functions_mean_what_they_mean_to_torch(data, sizes, seed):
    function = data.draw(functions(*sizes, torch.Generator().manual_seed(seed)))
    region = Region(0, sizes[0], 0, sizes[1], 0, sizes[2], 0, sizes[3], None)
    found = allowed(LoweredMask(functions=(function,)), region)
    assert torch.equal(found.expand(sizes), create_mask(function.mask_mod, *sizes, device="cpu"))


def test_functions_that_do_more_than_elementwise_arithmetic():
    """Broadcasting index tensors would give something else here; one call per position is what is meant."""
    table = torch.arange(40).view(8, 5)
    mask = LoweredMask(functions=(MaskFunction(lambda _b, _h, i, j: table[i].sum() > table[j, 2] * 5),))
    region = Region(0, 1, 0, 1, 1, 8, 0, 6, None)
    want = [[bool(table[i].sum() > table[j, 2] * 5) for j in range(6)] for i in range(1, 8)]
    assert torch.equal(allowed(mask, region)[0, 0], torch.tensor(want))


def test_what_a_function_does_not_read_takes_no_memory():
    mask = LoweredMask(functions=(MaskFunction(lambda _b, h, _i, j: j > h),))
    assert allowed(mask, Region(0, 4, 0, 3, 0, 50, 0, 20, None)).shape == (1, 3, 1, 20)


def test_a_function_must_return_bools():
    mask = LoweredMask(functions=(MaskFunction(lambda _b, _h, i, j: i - j),))
    with pytest.raises(ArgumentError, match=r"bool tensors; got torch\.int64; compare"):
        allowed(mask, Region(0, 1, 0, 1, 0, 4, 0, 4, None))


def test_mask_objects_lower_to_what_runs():
    drawn, sizes = Drawn(2, torch.float64), (2, 2, 33, 33)
    mask = (Causal() | KeyPadding(lengths=(5, 20))) & ~Function(lambda b, _h, i, j: (i + j + b) % 4 == 1)
    for each in (mask, mask | PrefixLM((3, 9)), ~mask):
        lowered = each.lower(FULL, Extent(*sizes))
        with tiling(300, 8):
            compare(drawn, drawn.tensors(sizes), lowered, block_q=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_a_program_leaves_nothing_give_zeros(dtype):
    drawn = Drawn(3, dtype)
    late = LoweredMask(exclude=(LoweredMask(functions=(MaskFunction(lambda _b, _h, i, _j: i < 6),)),))
    for mask in (late, LoweredMask(exclude=(FULL,))):
        with tiling(200, 8):
            out = compare(drawn, drawn.tensors((2, 2, 21, 30)), mask, block_q=8)
        assert not out[:, :, :6].any()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("band", [(None, 0), (3, 0), (2, 1), (None, None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ragged_documents_with_lengths_of_their_own(alignment, band, dtype):
    lengths_q, lengths_kv = (3, 0, 17, 5, 1), (9, 2, 11, 0, 30)
    drawn = Drawn(4, dtype)
    tensors = drawn.tensors((1, 4, sum(lengths_q), sum(lengths_kv)), heads_kv=2)
    left, right = band
    ids = [torch.repeat_interleave(torch.arange(5), torch.tensor(n))[None] for n in (lengths_q, lengths_kv)]
    mask = LoweredMask(
        band_lo=None if left is None else -left, band_hi=right, document_ids_q=ids[0], document_ids_kv=ids[1],
        diagonal=diagonal(lengths_q, lengths_kv, alignment),
    )  # fmt: skip
    with tiling(300, 8):
        out = compare(drawn, tensors, mask, block_q=8)
    starts = [0, 0]
    for count_q, count_kv in zip(lengths_q, lengths_kv, strict=True):
        offset = count_kv - count_q if alignment == "bottom_right" else 0
        alone = LoweredMask(
            band_lo=None if left is None else offset - left, band_hi=None if right is None else offset + right
        )
        part = slice(starts[0], starts[0] + count_q), slice(starts[1], starts[1] + count_kv)
        query, key, value = (wide(t[:, :, part[n > 0]]) for n, t in enumerate(tensors))
        want, _ = reference(query, key, value, alone)
        assert error(out[:, :, part[0]], want) < TOLERANCE[dtype]
        starts = [starts[0] + count_q, starts[1] + count_kv]


def diagonal(lengths_q, lengths_kv, alignment):
    """Return, for each query of a ragged batch, the key on its diagonal."""
    found, start = [], 0
    for count_q, count_kv in zip(lengths_q, lengths_kv, strict=True):
        offset = count_kv - count_q if alignment == "bottom_right" else 0
        found += [start + offset + i for i in range(count_q)]
        start += count_kv
    return torch.tensor(found)


def wide_program(length):
    table = torch.rand(4, 2 * length) < 0.7
    return LoweredMask(
        band_hi=0,
        either=(
            (LoweredMask(band_lo=-9), LoweredMask(functions=(MaskFunction(lambda *at: at[3] % 5 == 0),))),
        ),
        functions=(MaskFunction(lambda _b, h, i, j: table[h, i - j + length]),),
        sparse=(some_blocks((1, 4, length, length), 128),),
    )


@pytest.mark.parametrize("length", [256, 1024])
def test_memory_does_not_grow_with_the_square_of_the_length(length):
    budget = 2**14
    drawn = Drawn(5, torch.float32)
    tensors = drawn.tensors((1, 4, length, length), heads_kv=2)
    mask = wide_program(length)
    with tiling(budget, chunked_plan.KEY_ALIGN), Largest() as largest:
        out, lse = chunked_attention(*tensors, mask, block_q=32)
        (out.sum() + lse.sum()).backward()
    assert largest.elements <= max(budget, *(t.numel() for t in tensors))


def test_causal_blocks_are_skipped_under_a_program_too():
    drawn = Drawn(6, torch.float32)
    places = []

    def late(_b, _h, i, j):
        places.append(None)
        return (i + j) % 3 > 0

    counts = []
    for band_hi in (None, 0):
        places.clear()
        mask = LoweredMask(band_hi=band_hi, functions=(MaskFunction(late),))
        with torch.no_grad(), tiling(64 * 64, 64):
            chunked_attention(*drawn.tensors((1, 1, 512, 512)), mask, block_q=64)
        counts.append(len(places))
    assert counts == [8 * 8, 8 * 9 // 2]


def test_tiles_are_smaller_only_where_functions_tell_heads_or_rows_apart():
    keys = MaskFunction(lambda _b, _h, i, j: i > j, per_batch=False, per_head=False)
    narrow = LoweredMask(
        functions=(keys,), either=((LoweredMask(band_hi=0), LoweredMask(functions=(keys,))),)
    )
    heads = LoweredMask(functions=(MaskFunction(lambda _b, h, _i, j: j > h, per_batch=False),))
    assert not is_wide(narrow)
    assert is_wide(heads)
    assert is_wide(LoweredMask(exclude=(heads,)))
    assert is_wide(LoweredMask(either=((LoweredMask(band_hi=0), heads),)))
    assert is_wide(LoweredMask(sparse=(some_blocks((2, 4, 32, 32)),)))
    usual = chunked_plan.tiling_for("cuda")
    share = chunked_plan.tiling_for("cuda", wide_functions=True)
    assert share.score_elements * chunked_plan.FUNCTION_SHARE == usual.score_elements
    tensors = Drawn(7, torch.float32).tensors((1, 4, 8, 8))
    plans = []

    def recorded(_shape, _limits, tiling, *_):
        plans.append(tiling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_call, "planned", recorded)
        for program in (None, narrow, heads):
            spec = Spec(1.0, 0.0, 0.0, 0, chunked_plan.Limits(), None, program)
            chunked_call.Call.build(*tensors, Extras(), spec)
    assert [plan.score_elements for plan in plans] == [2**22, 2**22, 2**20]


@pytest.mark.parametrize("part", ["function", "keys", "blocks"])
def test_changes_before_backward_are_noticed(part):
    tensors = Drawn(8, torch.float32).tensors((1, 2, 20, 20))
    table = torch.ones(20, dtype=torch.bool)
    blocks = some_blocks((1, 2, 20, 20))
    mask, read = {
        "function": (LoweredMask(functions=(MaskFunction(lambda _b, _h, i, _j: table[i]),)), table),
        "keys": (LoweredMask(exclude=(LoweredMask(key_keep=table[None]),)), table),
        "blocks": (LoweredMask(sparse=(blocks,)), blocks.kv_indices),
    }[part]
    out, _ = chunked_attention(*tensors, mask)
    out.sum().backward(retain_graph=True)
    read[..., 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_empty_sizes_under_a_program(sizes):
    tensors = Drawn(9, torch.float32).tensors(sizes)
    out, lse = chunked_attention(*tensors, wide_program(8))
    assert out.shape == tensors[0].shape
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


def test_the_operator_refuses_functions():
    tensors = Drawn(10, torch.float32).tensors((1, 2, 8, 8))
    limits = chunked_plan.Limits()
    for extra in ({"program": wide_program(8)}, {"score_mod": lambda score, *_: score}):
        spec = Spec(1.0, 0.0, 0.0, 0, limits, None, **extra)
        with pytest.raises(AttnRouteError, match="without functions inside a compiled graph"):
            chunked_op.attend(*tensors, Extras(), spec, None)
