"""The mask of a ragged batch: it is that of each sequence apart, and says so in every form."""

from __future__ import annotations

import weakref
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import small_call

from attnroute import masks
from attnroute.errors import ArgumentError
from attnroute.masks.lowered import sequences
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.masks.objects.ragged import Ragged
from attnroute.question.nodes import CausalNode, DocumentsNode, WindowNode
from attnroute.question.normalize import normalize

ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
BESIDE = st.none() | st.integers(0, 12)
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.int32, torch.int64])


def sums_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def allowed_apart(lengths_q, lengths_kv, left, right, alignment):
    """Write each sequence's own mask into its place, one pair of positions at a time."""
    allowed = torch.zeros(sum(lengths_q), sum(lengths_kv), dtype=torch.bool)
    first_q = first_kv = 0
    for size_q, size_kv in zip(lengths_q, lengths_kv, strict=True):
        offset = size_kv - size_q if alignment == "bottom_right" else 0
        for i in range(size_q):
            for j in range(size_kv):
                after = j - i - offset
                near = (left is None or after >= -left) and (right is None or after <= right)
                allowed[first_q + i, first_kv + j] = near
        first_q, first_kv = first_q + size_q, first_kv + size_kv
    return allowed


def extent_of(lengths_q, lengths_kv):
    return Extent(1, 2, sum(lengths_q), sum(lengths_kv), None)


@given(PAIRS, BESIDE, BESIDE, ALIGNMENTS, DTYPES)
def test_cross_is_each_sequence_apart(pairs, left, right, alignment, dtype):
    lengths_q, lengths_kv = zip(*pairs, strict=True)
    mask = Ragged(sums_of(lengths_q, dtype), sums_of(lengths_kv), left=left, right=right, alignment=alignment)
    wanted = allowed_apart(lengths_q, lengths_kv, left, right, alignment)
    got = mask.materialize(*wanted.shape, num_heads_q=2)
    assert torch.equal(got[0, 0], wanted)


@given(PAIRS, BESIDE, BESIDE, ALIGNMENTS, st.booleans())
def test_self_is_each_sequence_apart(pairs, left, right, alignment, twice):
    lengths = [size for size, _ in pairs]
    sums = sums_of(lengths)
    mask = Ragged(sums, sums if twice else None, left=left, right=right, alignment=alignment)
    wanted = allowed_apart(lengths, lengths, left, right, alignment)
    assert torch.equal(mask.materialize(*wanted.shape)[0, 0], wanted)
    assert mask.lower(FULL, extent_of(lengths, lengths)).diagonal is None
    assert not mask.cross


@given(PAIRS, BESIDE, BESIDE, ALIGNMENTS, st.booleans())
def test_lowered_masks_have_a_band_where_decisions_see_one(pairs, left, right, alignment, cross):
    """A kernel that was chosen because there is no band must not meet one, and the other way round."""
    lengths_q, lengths_kv = zip(*pairs, strict=True) if cross else ([size for size, _ in pairs],) * 2
    mask = Ragged(
        sums_of(lengths_q),
        sums_of(lengths_kv) if cross else None,
        left=left,
        right=right,
        alignment=alignment,
    )
    extent = extent_of(lengths_q, lengths_kv)
    lowered = mask.lower(FULL, extent)
    nodes = normalize(_call(extent, mask.describe(extent))).mask
    said = [n for n in nodes if isinstance(n, CausalNode | WindowNode)]
    assert bool(said) == (lowered.band_lo is not None or lowered.band_hi is not None)
    for node in said:
        sides = (None, 0) if isinstance(node, CausalNode) else (node.left, node.right)
        assert (None if lowered.band_lo is None else -lowered.band_lo, lowered.band_hi) == sides
        assert not cross or node.alignment == alignment


def _call(extent, nodes):
    return small_call(nodes, 1, extent.seqlen_q, extent.seqlen_kv, layout="thd")


@pytest.mark.parametrize(
    ("band", "nodes"),
    [
        ((None, None, "top_left"), ()),
        ((None, 0, "bottom_right"), (CausalNode(alignment="bottom_right"),)),
        ((3, 0, "top_left"), (WindowNode(left=3, right=0),)),
        ((None, 2, "bottom_right"), (WindowNode(right=2, alignment="bottom_right"),)),
        ((0, None, "top_left"), (WindowNode(left=0),)),
    ],
)
def test_it_says_documents_and_their_band(band, nodes):
    left, right, alignment = band
    sums = sums_of([2, 3])
    extent = Extent(1, 2, 5, 5)
    for other, cross in ((None, False), (sums, False), (sums.clone(), True)):
        mask = Ragged(sums, other, left=left, right=right, alignment=alignment)
        assert mask.describe(extent) == (DocumentsNode(count=2, cross=cross), *nodes)
        assert all(a is b for a, b in zip(mask.tensors, (sums, other)[: 1 + cross], strict=True))


def test_kernels_get_int32_sums_and_upper_bounds():
    lengths_q, lengths_kv = [2, 0, 3], [1, 4, 0]
    extent = extent_of(lengths_q, lengths_kv)
    sums_q, sums_kv = sums_of(lengths_q, torch.int64), sums_of(lengths_kv, torch.int64)
    lowered = Ragged(sums_q, sums_kv, right=0, alignment="bottom_right").lower(FULL, extent)
    assert lowered.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert lowered.cu_seqlens_kv.tolist() == [0, 1, 5, 5]
    assert (lowered.max_seqlen, lowered.max_seqlen_kv) == (5, 5)
    assert lowered.document_ids_q.tolist() == [[0, 0, 2, 2, 2]]
    assert lowered.document_ids_kv.tolist() == [[0, 1, 1, 1, 1]]
    assert lowered.diagonal.tolist() == [-1, 0, 2, 3, 4]
    tensors = (lowered.cu_seqlens, lowered.cu_seqlens_kv, lowered.document_ids_q, lowered.diagonal)
    assert {t.dtype for t in tensors} == {torch.int32}
    bounded = Ragged(sums_q, sums_kv, 3, 4).lower(FULL, extent)
    assert (bounded.max_seqlen, bounded.max_seqlen_kv) == (3, 4)
    own = Ragged(sums_q, None, 3).lower(FULL, extent_of(lengths_q, lengths_q))
    assert (own.max_seqlen, own.max_seqlen_kv, own.cu_seqlens_kv) == (3, 3, None)


def test_masks_of_the_same_sums_share_what_is_made():
    sums_q, sums_kv = sums_of([2, 3]), sums_of([4, 1])
    extent = extent_of([2, 3], [4, 1])

    def lowered():
        return Ragged(sums_q, sums_kv, right=0, alignment="bottom_right").lower(FULL, extent)

    first, second = lowered(), lowered()
    assert first.document_ids_q is second.document_ids_q
    assert first.diagonal is second.diagonal
    sums_kv.copy_(sums_of([1, 4]))
    assert lowered().diagonal.tolist() == [-1, 0, 2, 3, 4]
    sums_q.copy_(sums_of([4, 1]))
    assert lowered().diagonal.tolist() == [-3, -2, -1, 0, 4]


def test_nothing_that_was_made_outlives_the_sums():
    sums_q, sums_kv = sums_of([2, 3]), sums_of([4, 1])
    lowered = Ragged(sums_q, sums_kv, right=0).lower(FULL, extent_of([2, 3], [4, 1]))
    made = [weakref.ref(t) for t in (lowered.document_ids_q, lowered.document_ids_kv, lowered.diagonal)]
    del lowered
    assert all(reference() is not None for reference in made)
    del sums_kv
    assert [reference() is None for reference in made] == [False, True, True]
    del sums_q
    assert made[0]() is None


def test_inference_mode_leaves_no_tensor_that_training_cannot_use():
    with torch.inference_mode():
        fresh = Ragged(sums_of([2, 3]), sums_of([1, 4]), right=0).materialize(5, 5)
    sums_q, sums_kv = sums_of([2, 3]), sums_of([1, 4])
    with torch.inference_mode():
        lowered = Ragged(sums_q, sums_kv, right=0).lower(FULL, extent_of([2, 3], [1, 4]))
    assert fresh.shape == (1, 1, 5, 5)
    assert not any(t.is_inference() for t in (lowered.diagonal, lowered.cu_seqlens, lowered.document_ids_q))


@pytest.mark.parametrize(
    ("wrong", "covering"),
    [
        ([0, 3, 7], [0, 3, 7]),
        ([1, 3, 6], [0, 3, 7]),
        ([0, 9, 7], [0, 7, 7]),
        ([0, -2, 7], [0, 0, 7]),
        ([0, 5, 3, 7], [0, 5, 5, 7]),
        ([0, 2**40, 7], [0, 7, 7]),
    ],
)
def test_sums_that_nobody_can_look_at_cover_the_tokens_all_the_same(wrong, covering):
    assert sequences.covering(torch.tensor(wrong), 7).tolist() == covering


SUMS = sums_of([2, 3])
REFUSED = [
    (lambda: Ragged([0, 5]), "cu_seqlens_q requires a 1-D integer tensor; got list"),
    (lambda: Ragged(SUMS.float()), "cu_seqlens_q requires a 1-D integer tensor; got torch.float32"),
    (
        lambda: Ragged(SUMS, SUMS[None]),
        "cu_seqlens_kv requires a 1-D integer tensor; got torch.int32",
    ),
    (lambda: Ragged(SUMS[:1]), "cu_seqlens_q requires at least two elements, a start and an end; got 1"),
    (
        lambda: Ragged(SUMS, SUMS[1:]),
        "cu_seqlens_kv requires as many sequences as cu_seqlens_q has (2); got 1; give a sequence without",
    ),
    (lambda: Ragged(SUMS, max_seqlen=-1), "max_seqlen_q requires a count of at least 0, or None; got -1"),
    (
        lambda: Ragged(SUMS, max_seqlen_kv=2.5),
        "max_seqlen_kv requires a count of at least 0, or None; got 2",
    ),
    (lambda: Ragged(SUMS, left=-1), "window left requires a count of at least 0, or None; got -1; pass None"),
    (lambda: Ragged(SUMS, right="3"), "window right requires a count of at least 0, or None; got '3'"),
    (lambda: Ragged(SUMS, alignment="middle"), 'alignment requires one of "top_left" and "bottom_right"'),
    (
        lambda: Ragged(SUMS).materialize(5, 4),
        "cu_seqlens_q requires as many queries as keys without cu_seqlens_kv; got total_q = 5, total_kv = 4",
    ),
    (
        lambda: Ragged(SUMS).materialize(6, 6),
        "cu_seqlens_q requires prefix sums that rise from 0 to the 6 tokens there are; got [0, 2, 5]; pass 0",
    ),
    (
        lambda: Ragged(SUMS, SUMS.clone()).materialize(5, 6),
        "cu_seqlens_kv requires prefix sums that rise from 0 to the 6 tokens there are; got [0, 2, 5]",
    ),
    (
        lambda: Ragged(torch.tensor([0, 6, 5])).materialize(5, 5),
        "cu_seqlens_q requires prefix sums that rise from 0 to the 5 tokens there are; got [0, 6, 5]",
    ),
    (
        lambda: Ragged(SUMS, max_seqlen=2).materialize(5, 5),
        "max_seqlen_q requires at least the longest sequence (3); got 2; correct it, or leave it out.",
    ),
    (
        lambda: Ragged(SUMS, SUMS.clone(), max_seqlen_kv=2).materialize(5, 5),
        "max_seqlen_kv requires at least the longest sequence (3); got 2",
    ),
    (
        lambda: (masks.Causal() & Ragged(SUMS)).materialize(5, 5),
        "mask Ragged requires no causal or window mask beside it; got one; pass is_causal and window",
    ),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_means_nothing_is_refused_in_one_sentence(make, words):
    with pytest.raises(ArgumentError) as caught:
        make()
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")


def test_lowering_refuses_sums_that_changed_since_the_check():
    sums = sums_of([2, 3])
    mask = Ragged(sums)
    mask.check(Extent(1, 1, 5, 5))
    sums[-1] = 4
    with pytest.raises(ArgumentError, match="cu_seqlens_q requires prefix sums"):
        mask.lower(FULL, Extent(1, 1, 5, 5))


def test_keys_tell_masks_with_other_descriptions_apart():
    sums = sums_of([2, 3])
    different = (
        Ragged(sums),
        Ragged(sums, sums.clone()),
        Ragged(sums_of([2, 2, 1])),
        Ragged(sums, left=1),
        Ragged(sums, right=1),
        Ragged(sums, sums.clone(), right=1, alignment="bottom_right"),
        Ragged(sums, sums.clone(), right=1),
    )
    assert len({mask.key() for mask in different}) == len(different)
    assert Ragged(sums).key() == Ragged(sums_of([1, 4]), max_seqlen=4).key()
