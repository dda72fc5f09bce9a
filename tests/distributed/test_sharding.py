"""Parts of a call in numbers: drawn meshes and placements against chunks of torch."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attnroute.distributed.sharding import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    TOKENS,
    Placed,
    chunk,
    share_of,
    splits_of,
)
from attnroute.errors import ArgumentError
from attnroute.question.line import parse
from attnroute.question.mesh import Mesh, shares

AXES = (BATCH, HEADS, TOKENS, HEAD_DIM)
KV_AXES = (BATCH, KV_HEADS, TOKENS, HEAD_DIM)


def chunked(values, mesh, at, shards, dim):
    """Return what a process holds of values along a dimension, by torch itself."""
    for size, index, shard in zip(mesh, at, shards, strict=True):
        if shard == dim:
            parts = values.chunk(size) if len(values) else ()
            values = parts[index] if index < len(parts) else values[:0]
    return values


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=3))
def test_chunks_are_those_of_torch(size, steps):
    parts = [count for count, _ in steps]
    at = [index % count for count, index in steps]
    start, stop = chunk(size, parts, at)
    assert list(range(start, stop)) == chunked(torch.arange(size), parts, at, [0] * len(parts), 0).tolist()


@st.composite
def calls(draw):
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    splits = [draw(st.sampled_from([None, 0, 1])) for _ in mesh]
    shared, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = {
        BATCH: draw(st.integers(1, 5)),
        HEADS: shared * kv_heads,
        KV_HEADS: kv_heads,
        TOKENS: 0,
        HEAD_DIM: 0,
    }

    def placed(name, axes, *, first=False):
        shards = [split if first or draw(st.booleans()) else None for split in splits]
        return Placed(name, axes, tuple(sizes[axis] for axis in axes), tuple(shards))

    tensors = [placed("query", AXES, first=True), placed("key", KV_AXES), placed("value", KV_AXES)]
    sink = placed("sink", (HEADS,))
    # The heads of a vector are its first dimension.
    shards = tuple(0 if shard == 1 else None for shard in sink.shards)
    return mesh, [*tensors, sink._replace(shards=shards)]


@given(calls())
def test_each_part_reads_the_heads_and_rows_that_it_needs(call):
    mesh, tensors = call
    query = tensors[0]
    splits = splits_of(tensors[:3])
    assert splits == tuple(None if shard is None else (BATCH, HEADS)[shard] for shard in query.shards)
    shared = query.sizes[1] // tensors[1].sizes[1]
    for at in product(*map(range, mesh)):
        heads = chunked(torch.arange(query.sizes[1]), mesh, at, query.shards, 1)
        rows = chunked(torch.arange(query.sizes[0]), mesh, at, query.shards, 0)
        try:
            share = share_of(tensors, splits, mesh, at)
        except ArgumentError:
            # Refused on all processes alike: one of them lacks a head that it needs.
            assert lacks(mesh, tensors, shared)
            return
        assert share.is_empty == ((HEADS in splits and not len(heads)) or (BATCH in splits and not len(rows)))
        for tensor, cuts in zip(tensors, share.cuts, strict=True):
            for dim, axis in enumerate(tensor.axes):
                if axis not in (BATCH, HEADS, KV_HEADS):
                    continue
                local = chunked(torch.arange(tensor.sizes[dim]), mesh, at, tensor.shards, dim)
                for cut in (cut for cut in cuts if cut.dim == dim):
                    assert len(local) == cut.has
                    local = local[cut.start : cut.start + cut.length]
                    local = local if cut.heads is None else local[list(cut.heads)]
                if axis == KV_HEADS and not share.is_empty:
                    # Query heads share what is left as they share the whole.
                    assert (
                        local.repeat_interleave(len(heads) // len(local)).tolist()
                        == (heads // shared).tolist()
                    )
                elif not share.is_empty:
                    assert local.tolist() == (rows if axis == BATCH else heads).tolist()


def lacks(mesh, tensors, shared):
    """Return whether a process needs a row or head that it does not hold."""
    query = tensors[0]
    for at in product(*map(range, mesh)):
        heads = chunked(torch.arange(query.sizes[1]), mesh, at, query.shards, 1)
        rows = chunked(torch.arange(query.sizes[0]), mesh, at, query.shards, 0)
        needed = {BATCH: rows, HEADS: heads, KV_HEADS: heads // shared}
        for tensor in tensors:
            for dim, axis in enumerate(tensor.axes):
                held = chunked(torch.arange(tensor.sizes[dim]), mesh, at, tensor.shards, dim)
                if axis in needed and not set(needed[axis].tolist()) <= set(held.tolist()):
                    return True
    return False


def test_a_mesh_of_a_thousand_is_looked_at():
    """Of 64 heads on 1024 processes those beside the first 64 have none."""
    heads = Placed("query", AXES, (1, 64, 0, 0), (1,))
    keys = Placed("key", KV_AXES, (1, 8, 0, 0), (None,))
    shares = [share_of([heads, keys, keys], (HEADS,), (1024,), (at,)) for at in (0, 63, 64, 1023)]
    assert [share.is_empty for share in shares] == [False, False, True, True]
    assert [share.cuts[1][0].start for share in shares[:2]] == [0, 7]


def test_key_heads_that_lie_elsewhere_are_refused():
    heads = Placed("query", AXES, (1, 8, 0, 0), (1,))
    keys = Placed("key", KV_AXES, (1, 4, 0, 0), (1,))
    with pytest.raises(
        ArgumentError, match=r"4 key/value heads in 3 chunks .* key.redistribute\(mesh, \[Replicate"
    ):
        share_of([heads, keys, keys], (HEADS,), (3,), (0,))


@given(shared=st.integers(1, 6), kv_heads=st.integers(1, 8), ranks=st.integers(1, 8))
def test_explain_mesh_says_the_heads_that_calls_on_dtensors_have(shared, kv_heads, ranks):
    heads = shared * kv_heads
    try:
        explained = shares(parse(f"bf16 b1 hq{heads} hkv{kv_heads} sq64 d64"), Mesh(tp=ranks))
    except ArgumentError:
        assume(False)
    tensors = [
        Placed("query", AXES, (1, heads, 0, 0), (1,)),
        *(Placed(name, KV_AXES, (1, kv_heads, 0, 0), (None,)) for name in ("key", "value")),
    ]
    cut = Counter()
    for rank in range(ranks):
        of_query, of_key, _ = share_of(tensors, splits_of(tensors), (ranks,), (rank,)).cuts
        # A tensor that is read as it lies has no cut.
        queries = of_query[0].length if of_query else heads
        keys = (len(of_key[0].heads or ()) or of_key[0].length) if of_key else kv_heads
        cut[queries, keys] += 1
    assert cut == {(s.call.num_heads_q, s.call.num_heads_kv): s.ranks for s in explained}
