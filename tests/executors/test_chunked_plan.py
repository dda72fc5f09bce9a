from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_reference import allowed
from support.chunked_tiling import budget

from attnroute.executors.chunked import plan
from attnroute.executors.chunked.plan import Geometry, Limits, make_plan
from attnroute.masks.lowered.form import LoweredMask

LENGTHS = st.integers(0, 90)
LONG = st.integers(0, 20_000)
EDGE = st.none() | st.integers(-60, 60)
GEOMETRIES = st.builds(Geometry, st.integers(0, 5), st.integers(1, 6), st.integers(1, 9), LENGTHS, LENGTHS)


@st.composite
def limits(draw, length):
    bounds = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, length), max_size=4))
        bounds = (0, *sorted(inner), length)
    return Limits(draw(EDGE), draw(EDGE), bounds)


@given(
    shape=GEOMETRIES, block_q=st.none() | st.integers(1, 100), elements=st.sampled_from([1, 500, 5000, 10**7])
)
@settings(deadline=None, max_examples=150)
def test_chunks_and_blocks_partition_the_call(shape, block_q, elements):
    made = make_plan(shape, Limits(), budget(elements), block_q)
    pairs = [(b, h) for c in made.chunks for b in range(c.b0, c.b1) for h in range(c.h0, c.h1)]
    assert pairs == [(b, h) for b in range(shape.batch) for h in range(shape.heads_kv)]
    assert all(c.units >= 1 for c in made.chunks)
    assert [i for b in made.blocks for i in range(b.i0, b.i1)] == list(range(shape.seqlen_q))
    for block in made.blocks:
        keys = [j for j0, j1 in block.keys for j in range(j0, j1)]
        assert keys == (list(range(shape.seqlen_kv)) if shape.seqlen_q else [])


@given(shape=GEOMETRIES, elements=st.sampled_from([5000, 50_000]))
@settings(deadline=None, max_examples=100)
def test_no_tile_exceeds_the_budget_by_more_than_one_aligned_strip(shape, elements):
    made = make_plan(shape, Limits(), budget(elements))
    smallest = made.block_q * shape.group * min(plan.KEY_ALIGN, max(shape.seqlen_kv, 1))
    units = max((c.units for c in made.chunks), default=0)
    assert units * made.block_q * shape.group * made.tile_keys <= max(elements, smallest)


@given(
    shape=st.builds(Geometry, st.integers(0, 5), st.integers(1, 6), st.integers(1, 80), LONG, LONG),
    limit=st.sampled_from([Limits(), Limits(band_hi=0)]),
    tiling=st.sampled_from([plan.CPU, plan.ACCELERATOR]),
)
def test_default_blocks_keep_to_their_bounds(shape, limit, tiling):
    size = plan.default_block_q(shape, limit, tiling)
    made = make_plan(shape, limit, tiling)
    assert size % plan.KEY_ALIGN == 0
    assert size >= plan.KEY_ALIGN
    # Blocks are as long as each other, to the next multiple.
    last = made.blocks[-1]
    assert (last.i1 - last.i0) > made.block_q - plan.KEY_ALIGN * len(made.blocks)
    if limit == Limits() and tiling.worth_a_block:
        fits = shape.group * shape.seqlen_q * shape.seqlen_kv <= tiling.score_elements
        assert not fits or len(made.blocks) == 1
    else:
        assert size <= tiling.max_block_q
        assert size * shape.group <= max(plan.ROWS, plan.KEY_ALIGN * shape.group) or len(made.blocks) == 1


@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "limit", "blocks", "chunks"),
    [
        (1, 8, 1, 4096, Limits(), 1, 2),
        (1, 1, 8, 4096, Limits(), 2, 1),
        (16, 8, 4, 128, Limits(), 1, 1),
        (1, 12, 1, 257, Limits(band_hi=0), 1, 1),
        (1, 8, 1, 1024, Limits(band_hi=0), 1, 1),
        (1, 8, 2, 4096, Limits(band_hi=0), 4, 1),
        (1, 8, 2, 8192, Limits(band_hi=0), 8, 2),
    ],
)
def test_an_accelerator_gets_few_blocks_where_they_save_little(
    batch, heads, group, length, limit, blocks, chunks
):
    made = make_plan(Geometry(batch, heads, group, length, length), limit, plan.ACCELERATOR)
    assert (len(made.blocks), len(made.chunks)) == (blocks, chunks)


@given(data=st.data(), length=st.integers(1, 60))
@settings(deadline=None, max_examples=200)
def test_key_range_is_exactly_what_the_mask_leaves(data, length):
    limit = data.draw(limits(length))
    i0 = data.draw(st.integers(0, length - 1))
    i1 = data.draw(st.integers(i0 + 1, length))
    ids = None
    if limit.bounds is not None:
        ids = torch.bucketize(torch.arange(length), torch.tensor(limit.bounds[1:]), right=True)[None]
    mask = LoweredMask(band_lo=limit.band_lo, band_hi=limit.band_hi, document_ids_q=ids, document_ids_kv=ids)
    seen = allowed(mask, (1, 1, length, length))[0, 0, i0:i1].any(0).nonzero().flatten().tolist()
    j0, j1 = limit.key_range(i0, i1, length)
    assert set(seen) <= set(range(j0, j1))
    if seen and (limit.bounds is None or (limit.band_lo is None and limit.band_hi is None)):
        assert (j0, j1) == (seen[0], seen[-1] + 1)


@given(data=st.data(), length=st.integers(1, 60))
@settings(deadline=None, max_examples=200)
def test_one_document_is_said_only_of_tiles_inside_one(data, length):
    limit = data.draw(limits(length))
    i0, j0 = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length - 1))
    i1, j1 = data.draw(st.integers(i0 + 1, length)), data.draw(st.integers(j0 + 1, length))
    said = limit.one_document(i0, i1, j0, j1)
    if limit.bounds is None:
        assert not said
    else:
        ids = torch.bucketize(torch.arange(length), torch.tensor(limit.bounds[1:]), right=True)
        assert said == bool((ids[i0:i1, None] == ids[j0:j1]).all())


def test_a_window_is_walked_in_narrow_tiles():
    made = make_plan(Geometry(1, 1, 1, 16_384, 16_384), Limits(band_lo=-1023, band_hi=0), plan.ACCELERATOR)
    assert made.tile_keys <= 1023 + made.block_q + 2 * plan.KEY_ALIGN
    assert all(len(block.keys) == 1 for block in made.blocks)


def test_causal_blocks_skip_the_keys_ahead():
    made = make_plan(Geometry(1, 8, 2, 8192, 8192), Limits(band_hi=0), plan.ACCELERATOR)
    tiles = sum((b.i1 - b.i0) * (j1 - j0) for b in made.blocks for j0, j1 in b.keys)
    assert tiles < 0.6 * 8192**2
