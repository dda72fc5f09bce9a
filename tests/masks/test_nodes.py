"""Mask objects: what they allow, how they combine, what they say of themselves, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import allowed_of, small_call

from attnroute import masks
from attnroute.call import CausalNode, DenseNode, DocumentsNode, KeyPaddingNode, WindowNode
from attnroute.masks import tensors
from attnroute.masks.lowered import FULL
from attnroute.masks.nodes import Extent
from attnroute.masks.tensors import document_ids, key_keep

LENGTHS = st.integers(0, 6)
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
BESIDE = st.none() | st.integers(0, 7)


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_materialize_is_the_definition(data, batch, seqlen_q, seqlen_kv):
    mask, wanted = data.draw(_masks(batch, seqlen_q, seqlen_kv))
    got = mask.materialize(seqlen_q, seqlen_kv, batch=batch, num_heads_q=2)
    assert got.dtype == torch.bool
    assert got.shape in {(b, h, seqlen_q, seqlen_kv) for b in (1, batch) for h in (1, 2)}
    assert torch.equal(got.expand(wanted.shape), wanted)


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_and_is_the_intersection(data, batch, seqlen_q, seqlen_kv):
    (one, first), (other, second) = data.draw(
        st.tuples(*[_masks(batch, seqlen_q, seqlen_kv, documents=False)] * 2)
    )
    both = one & other
    got = both.materialize(seqlen_q, seqlen_kv, batch=batch, num_heads_q=2)
    assert torch.equal(got.expand(first.shape), first & second)
    assert both.nodes == (one, other)


@st.composite
def _masks(draw, batch, seqlen_q, seqlen_kv, *, documents=True):
    """Draw a node and the bool tensor (batch, 2, seqlen_q, seqlen_kv) that its docstring promises."""
    kinds = ["causal", "window", "padding", "dense"]
    kinds += ["documents"] if documents and seqlen_q == seqlen_kv else []
    kind = draw(st.sampled_from(kinds))
    full = (batch, 2, seqlen_q, seqlen_kv)
    if kind == "dense":
        shape = [draw(st.sampled_from([1, size])) for size in full][draw(st.sampled_from([0, 2, 3, 4])) :]
        tensor = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.5
        return masks.Dense(tensor), tensor.expand(full)
    mask, node = draw(_described(kind, batch, seqlen_kv))
    allowed = torch.tensor(allowed_of(small_call((node,), batch, seqlen_q, seqlen_kv)), dtype=torch.bool)
    return mask, allowed.reshape(batch, 1, seqlen_q, seqlen_kv).expand(full)


@st.composite
def _described(draw, kind, batch, seqlen_kv):
    """Draw an object and the data that means the same, each written for itself."""
    if kind == "causal":
        alignment = draw(ALIGNMENTS)
        return masks.Causal(alignment), CausalNode(alignment=alignment)
    if kind == "window":
        left, right, alignment = draw(BESIDE), draw(BESIDE), draw(ALIGNMENTS)
        return masks.Window(left, right, alignment), WindowNode(left=left, right=right, alignment=alignment)
    if kind == "padding":
        counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
        kept = [seqlen_kv - n for n in counts]
        flags = torch.arange(seqlen_kv) < torch.tensor(counts)[:, None]
        right, left = KeyPaddingNode(lengths=counts), KeyPaddingNode(lengths=kept, side="left")
        forms = [
            (masks.KeyPadding(lengths=counts), right),
            (masks.KeyPadding(lengths=torch.tensor(counts)), right),
            (masks.KeyPadding(keep=flags), right),
            (masks.KeyPadding(left=counts), left),
            (masks.KeyPadding(left=torch.tensor(counts, dtype=torch.int32)), left),
        ]
        return draw(st.sampled_from(forms))
    cuts = sorted(draw(st.lists(st.integers(0, seqlen_kv), max_size=3)))
    sums = [0, *cuts, seqlen_kv]
    lengths = [b - a for a, b in pairwise(sums)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    forms = [
        masks.Documents(lengths=lengths),
        masks.Documents(ids=ids),
        masks.Documents(ids=ids.expand(batch, -1)),
        masks.Documents(cu_seqlens=torch.tensor(sums, dtype=torch.int32)),
    ]
    return draw(st.sampled_from(forms)), DocumentsNode(lengths=lengths)


def test_ids_tell_documents_apart_wherever_their_tokens_lie():
    got = masks.Documents(ids=torch.tensor([[3, 7, 3], [1, 1, 2]])).materialize(3, 3, batch=2)
    first = [[True, False, True], [False, True, False], [True, False, True]]
    second = [[True, True, False], [True, True, False], [False, False, True]]
    assert got[:, 0].tolist() == [first, second]


def test_documents_of_no_tokens():
    empty = torch.zeros(0, dtype=torch.int64)
    forms = (
        masks.Documents(lengths=[]),
        masks.Documents(lengths=[0]),
        masks.Documents(ids=empty),
        masks.Documents(ids=empty.expand(2, 0)),
        masks.Documents(cu_seqlens=torch.tensor([0, 0])),
    )
    for mask in forms:
        assert mask.materialize(0, 0, batch=2).shape[-2:] == (0, 0)


def test_conjunctions_of_conjunctions_have_flat_parts():
    inner = masks.Causal() & masks.Window(3)
    outer = masks.All((inner, masks.KeyPadding(lengths=[2])))
    assert outer.nodes == (*inner.nodes, *outer.parts[1].nodes)
    assert ((inner & inner) & masks.Causal()).nodes == (*inner.nodes, *inner.nodes, masks.Causal())


def test_a_mask_is_combined_with_masks_only():
    with pytest.raises(TypeError):
        masks.Causal() & True


def test_masks_of_numbers_are_values_and_masks_of_tensors_are_themselves():
    assert masks.Causal() == masks.Causal("top_left")
    assert len({masks.Window(3, 0), masks.Window(3), masks.Window(3, 1)}) == 2
    flags = torch.ones(2, 4, dtype=torch.bool)
    assert masks.KeyPadding(keep=flags) != masks.KeyPadding(keep=flags)
    assert masks.Dense(flags) != masks.Dense(flags)


def test_masks_say_themselves_without_their_values():
    flags = torch.ones(2, 4, dtype=torch.bool)
    mask = masks.Causal("bottom_right") & masks.Dense(flags)
    assert repr(mask) == "Causal(alignment='bottom_right') & Dense((2, 4))"


def test_descriptions():
    extent = Extent(2, 4, 6, 6)
    lengths, ids = torch.tensor([3, 4]), torch.zeros(6, dtype=torch.int64)
    cu_seqlens, flags = torch.tensor([0, 2, 6]), torch.ones(2, 6, dtype=torch.bool)
    said = [
        (masks.Causal("bottom_right"), CausalNode(alignment="bottom_right")),
        (masks.Window(3, None), WindowNode(left=3)),
        (masks.Documents(lengths=[2, 4]), DocumentsNode(lengths=(2, 4))),
        (masks.Documents(cu_seqlens=cu_seqlens), DocumentsNode()),
        (masks.Documents(ids=ids), DocumentsNode(contiguous=False)),
        (masks.KeyPadding(lengths=[3, 4]), KeyPaddingNode(lengths=(3, 4))),
        (masks.KeyPadding(lengths=lengths), KeyPaddingNode()),
        (masks.KeyPadding(left=[3, 4]), KeyPaddingNode(lengths=(3, 2), side="left")),
        (masks.KeyPadding(left=lengths), KeyPaddingNode(side="left")),
        (masks.KeyPadding(keep=flags), KeyPaddingNode(side="any")),
        (masks.Dense(flags), DenseNode(shape=(2, 6), aligned=False)),
    ]
    for mask, node in said:
        assert mask.describe(extent) == (node,)
    whole = masks.All(tuple(mask for mask, _ in said))
    assert whole.describe(extent) == tuple(node for _, node in said)


def test_keys_are_equal_only_where_descriptions_are():
    ones, flags = torch.tensor([1]), torch.ones(1, 1, dtype=torch.bool)
    each = [
        masks.KeyPadding(lengths=[1]),
        masks.KeyPadding(lengths=[0]),
        masks.KeyPadding(lengths=ones),
        masks.KeyPadding(left=[1]),
        masks.KeyPadding(left=ones),
        masks.KeyPadding(keep=flags),
        masks.Documents(lengths=[1]),
        masks.Documents(ids=ones),
        masks.Documents(cu_seqlens=torch.tensor([0, 1])),
        masks.Causal(),
        masks.Causal("bottom_right"),
        masks.Window(0),
        masks.Dense(flags),
    ]
    assert len({mask.key() for mask in each}) == len(each)
    assert masks.KeyPadding(lengths=torch.tensor([5])).key() == masks.KeyPadding(lengths=ones).key()
    assert masks.Documents(lengths=[1]).key() == each[6].key()


def test_what_is_prepared_from_a_mask_is_made_once_and_again_when_a_tensor_changes():
    counts = torch.tensor([2, 3])
    mask, extent = masks.KeyPadding(lengths=counts), Extent(2, 1, 4, 4)
    first = key_keep(mask, extent)
    assert key_keep(mask, extent) is first
    counts[0] = 4
    assert key_keep(mask, extent).tolist() == [[True] * 4, [True, True, True, False]]
    ids = torch.tensor([0, 0, 1, 1])
    documents = masks.Documents(ids=ids)
    assert document_ids(documents, extent) is document_ids(documents, extent)
    ids[1] = 1
    assert document_ids(documents, extent).tolist() == [[0, 1, 1, 1]]


def test_what_inference_mode_prepares_first_can_be_trained_with_later():
    mask, extent = masks.KeyPadding(lengths=[2, 3]), Extent(2, 1, 4, 4)
    with torch.inference_mode():
        kept = key_keep(mask, extent)
    assert not kept.is_inference()
    assert key_keep(mask, extent) is kept


def test_what_is_made_of_tensors_without_a_version_is_not_kept():
    with torch.inference_mode():
        mask = masks.KeyPadding(lengths=torch.tensor([2, 3]))
        extent = Extent(2, 1, 4, 4)
        assert key_keep(mask, extent) is not key_keep(mask, extent)
        mask.lengths[0] = 4
        assert key_keep(mask, extent)[0].all()


def test_prefix_sums_on_a_device_are_made_to_cover_the_sequence_unread():
    """Nobody waits for the device to check them, and no kernel may read behind the end for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors.checks, "prefix_sums", lambda *_: None)
        for sums in ([0, 3], [1, 4], [0, 3, 2, 4], [0, 9], [-5, 2, 4], [4, 0]):
            mask, extent = masks.Documents(cu_seqlens=torch.tensor(sums)), Extent(1, 1, 4, 4)
            covering = tensors.cu_seqlens(mask, extent).tolist()
            assert (covering[0], covering[-1], covering) == (0, 4, sorted(covering))
            # Both forms say the same documents: the one that holds bounds, and the one that holds ids.
            ids = document_ids(mask, extent)[0].tolist()
            assert ids == [n for n, (a, b) in enumerate(pairwise(covering)) for _ in range(b - a)]


def test_a_band_is_the_narrowest_of_its_parts():
    extent = Extent(1, 1, 4, 6)
    lowered = (masks.Window(5, 3, "bottom_right") & masks.Causal() & masks.Window(2, None)).lower(
        FULL, extent
    )
    assert (lowered.band_lo, lowered.band_hi) == (-2, 0)
    assert lowered.is_band_only
    assert not lowered.is_full


def test_mask_objects_load_no_torch():
    code = "import sys; from attnroute.masks import *; Causal() & Window(3); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
