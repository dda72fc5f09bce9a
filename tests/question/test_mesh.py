"""A call over the ranks of a mesh: what they have adds up to the whole, or the split is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnroute.errors import ArgumentError
from attnroute.question.line import parse, render
from attnroute.question.mesh import Mesh, mesh_of, pieces, ring, shares, ulysses

CAUSAL = "bf16 b4 hq32 hkv8 sq4096 d128 causal train"


def lines(found):
    return [(share.ranks, share.readers, render(share.call)) for share in found]


def refused(line, text):
    with pytest.raises(ArgumentError) as caught:
        shares(parse(line), mesh_of(text))
    return str(caught.value)


@given(count=st.integers(1, 200), parts=st.integers(1, 64))
def test_pieces_are_those_of_torch(count, parts):
    import torch

    cut = [len(piece) for piece in torch.arange(count).chunk(parts)]
    assert pieces(count, parts) == cut + [0] * (parts - len(cut))


def test_words_become_a_mesh():
    assert mesh_of("tp=2,cp=4") == Mesh(tp=2, cp=4)
    assert mesh_of(" dp=8 , tp=1") == Mesh(dp=8)
    assert mesh_of("tp=2,cp=4,dp=3").ranks == 24


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "tp=-1", "tp=2,tp=2", "pp=2", "tp=99999999999"])
def test_other_words_are_refused(text):
    with pytest.raises(ArgumentError, match=r"^--mesh requires "):
        mesh_of(text)


def test_heads_over_tp_and_rows_over_dp():
    assert lines(shares(parse(CAUSAL), Mesh(tp=4, dp=2, cp=3))) == [
        (24, 1, "bf16 b2 hq8 hkv2 sq4096 skv4096 d128 causal train")
    ]


def test_fewer_key_heads_than_ranks_are_read_by_several():
    assert lines(shares(parse(CAUSAL), Mesh(tp=16))) == [
        (16, 2, "bf16 b4 hq2 hkv1 sq4096 skv4096 d128 causal train")
    ]


def test_uneven_heads_make_two_kinds_of_ranks():
    assert lines(shares(parse("bf16 b4 hq8 sq64 d64"), Mesh(tp=3, dp=4))) == [
        (8, 1, "bf16 b1 hq3 hkv3 sq64 skv64 d64"),
        (4, 1, "bf16 b1 hq2 hkv2 sq64 skv64 d64"),
    ]


@pytest.mark.parametrize(
    ("line", "tp", "expected"),
    [
        ("bf16 b1 hq12 hkv6 sq64 d64", 4, [(4, 3, 3)]),
        ("bf16 b1 hq12 hkv3 sq64 d64", 4, [(2, 3, 3), (2, 3, 1)]),
        ("bf16 b1 hq32 hkv8 sq64 d64", 3, [(2, 11, 11), (1, 10, 10)]),
        ("bf16 b1 hq12 hkv2 sq64 d64", 3, [(1, 4, 4), (2, 4, 1)]),
    ],
)
def test_key_heads_that_no_split_fits_are_whole_on_each_rank(line, tp, expected):
    found = shares(parse(line), Mesh(tp=tp))
    assert [(s.ranks, s.call.num_heads_q, s.call.num_heads_kv) for s in found] == expected
    assert {(s.readers, s.kv_whole) for s in found} == {(tp, parse(line).num_heads_kv)}
    assert [s.copies_heads for s in found] == [kv > 1 for _, _, kv in expected]


def test_no_rank_is_left_without_work():
    assert "torch's Shard would leave 2 of 6 ranks without any" in refused(CAUSAL, "dp=6")
    assert "query heads for every rank; got 8; torch's Shard would leave 2 of 6" in refused(
        "bf16 b4 hq8 sq64 d64", "tp=6"
    )


def test_packed_sequences_are_split_by_heads_alone():
    packed = "bf16 b1 hq8 sq512 d64 thd documents=256,256"
    assert shares(parse(packed), Mesh(tp=2))[0].call.num_heads_q == 4
    assert "describe what one rank packs" in refused(packed, "dp=2")


@pytest.mark.parametrize(
    ("line", "mesh", "part"),
    [
        ("bf16 b4 hq8 sq64 d64 dense=4x8x64x64", Mesh(tp=2, dp=2), "dense=2x4x64x64"),
        ("bf16 b4 hq8 sq64 d64 dense=1x1x64x64", Mesh(tp=2, dp=2), "dense=1x1x64x64"),
        ("bf16 b4 hq8 sq64 d64 dense=64x64", Mesh(tp=2, dp=2), "dense=64x64"),
        ("bf16 b4 hq8 sq64 d64 bias=bf16:1x8x64x64", Mesh(tp=2, dp=2), "bias=bf16:1x4x64x64"),
        ("bf16 b2 hq8 sq64 d64 keys=10,20", Mesh(tp=2), "keys=10,20"),
        ("bf16 b2 hq8 sq64 d64 keys=10,20", Mesh(dp=2), "keys"),
        ("bf16 b2 hq8 sq64 d64 not(prefix=1,2)", Mesh(dp=2), "not(prefix)"),
        ("bf16 b2 hq8 sq64 d64 any(causal|keys=1,2)", Mesh(dp=2), "any(causal|keys)"),
    ],
)
def test_masks_and_biases_are_cut_with_the_call(line, mesh, part):
    assert part in render(shares(parse(line), mesh)[0].call).split()


def test_a_causal_ring_is_balanced():
    own, others = ring(parse(CAUSAL), 4)
    assert (own.times, render(own.call)) == (
        1,
        "bf16 b4 hq32 hkv8 sq1024 skv1024 d128 causal train ring",
    )
    assert (others.times, render(others.call)) == (
        3,
        "bf16 b4 hq32 hkv8 sq1024 skv512 d128 train ring",
    )


@pytest.mark.parametrize("mask", ["", "window=63,0", "causal documents"])
def test_other_rings_have_equal_steps(mask):
    (step,) = ring(parse(f"bf16 b1 hq8 sq1024 d64 {mask}"), 4)
    assert step.times == 4
    assert (step.call.seqlen_q, step.call.seqlen_kv) == (256, 256)


@settings(max_examples=40)
@given(cp=st.sampled_from([2, 4, 8]), blocks=st.integers(1, 8))
def test_a_balanced_ring_computes_every_pair_once(cp, blocks):
    """Ranks have as many pairs each: together those of the triangle, but for the diagonals' halves."""
    own, others = ring(parse(f"bf16 b1 hq1 sq{2 * cp * blocks} d64 causal"), cp)
    local = own.call.seqlen_q
    mine = local * (local + 1) // 2 + others.times * others.call.seqlen_q * others.call.seqlen_kv
    whole = cp * local
    assert cp * mine == whole * (whole + 1) // 2


@pytest.mark.parametrize(
    "line", ["bf16 b1 hq8 sq1 skv64 d64", "bf16 b1 hq8 sq66 d64", "bf16 b1 hq8 sq68 d64 causal"]
)
def test_tokens_are_split_evenly(line):
    with pytest.raises(ArgumentError, match="pad the tokens"):
        ring(parse(line), 4)


def test_a_causal_ring_has_one_diagonal():
    with pytest.raises(ArgumentError, match="as many queries as keys"):
        ring(parse("bf16 b1 hq8 sq64 skv128 d64 causal=bottom_right"), 4)


def test_ulysses_leaves_all_tokens():
    call, copies = ulysses(parse(CAUSAL), 8)
    assert (render(call), copies) == ("bf16 b4 hq4 hkv1 sq4096 skv4096 d128 causal train", 1)
    call, copies = ulysses(parse(CAUSAL), 16)
    assert (render(call), copies) == ("bf16 b4 hq2 hkv1 sq4096 skv4096 d128 causal train", 2)


def test_ulysses_copies_key_heads_that_the_ranks_do_not_divide():
    call, copies = ulysses(parse("bf16 b1 hq24 hkv6 sq64 d64"), 4)
    assert (call.num_heads_q, call.num_heads_kv, copies) == (6, 3, 2)


def test_ulysses_takes_no_uneven_heads():
    with pytest.raises(ArgumentError, match="choose one of 1, 2, 4, 8"):
        ulysses(parse("bf16 b1 hq8 sq48 d64"), 3)
