"""Mask nodes: what they say of themselves, what is prepared from them, and what they are lowered to."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from attnroute import masks
from attnroute.masks import checks
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.question.call import (
    AnyNode,
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)


def test_ids_tell_documents_apart_wherever_their_tokens_lie():
    got = masks.Documents(ids=torch.tensor([[3, 7, 3], [1, 1, 2]])).materialize(3, 3, batch=2)
    first = [[True, False, True], [False, True, False], [True, False, True]]
    second = [[True, True, False], [True, True, False], [False, False, True]]
    assert got[:, 0].tolist() == [first, second]


@pytest.mark.parametrize(
    "mask",
    [masks.Documents(lengths=[2, 0, 4]), masks.Documents(cu_seqlens=torch.tensor([0, 2, 2, 6]))],
    ids=["lengths", "sums"],
)
def test_bounds_of_documents_are_known_where_no_device_is_asked(mask):
    lowered = mask.lower(FULL, Extent(1, 1, 6, 6))
    assert (lowered.document_bounds, lowered.max_seqlen) == ((0, 2, 2, 6), 4)
    assert lowered.cu_seqlens.tolist() == [0, 2, 2, 6]


def test_bounds_of_documents_on_a_device_are_not_read():
    mask = masks.Documents(cu_seqlens=torch.tensor([0, 2, 6], device="meta"))
    lowered = mask.lower(FULL, Extent(1, 1, 6, 6, torch.device("meta")))
    assert (lowered.document_bounds, lowered.max_seqlen) == (None, 6)


def test_documents_of_no_tokens():
    empty = torch.zeros(0, dtype=torch.int64)
    forms = (
        masks.Documents(lengths=[]),
        masks.Documents(lengths=[0]),
        masks.Documents(ids=empty),
        masks.Documents(ids=empty.expand(2, 0)),
        masks.Documents(cu_seqlens=torch.tensor([0, 0])),
        masks.Documents(position_ids=empty),
        masks.Documents(position_ids=empty.expand(2, 0)),
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
        (masks.Documents(position_ids=ids), DocumentsNode()),
        (masks.PrefixLM([3, 4]), PrefixNode(lengths=(3, 4))),
        (masks.PrefixLM(lengths, "bottom_right"), PrefixNode(alignment="bottom_right")),
        (masks.Function(print, per_head=False), FunctionNode(per_head=False)),
        (~masks.Causal(), NotNode(part=(CausalNode(),))),
        (
            masks.Causal() & masks.Window(1) | masks.All(()),
            AnyNode(parts=((CausalNode(), WindowNode(left=1, right=0)), ())),
        ),
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
        masks.Documents(position_ids=ones),
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
    first = mask.lower(FULL, extent).key_keep
    assert mask.lower(FULL, extent).key_keep is first
    counts[0] = 4
    assert mask.lower(FULL, extent).key_keep.tolist() == [[True] * 4, [True, True, True, False]]
    ids = torch.tensor([0, 0, 1, 1])
    documents = masks.Documents(ids=ids)
    assert documents.lower(FULL, extent).document_ids_q is documents.lower(FULL, extent).document_ids_q
    ids[1] = 1
    assert documents.lower(FULL, extent).document_ids_q.tolist() == [[0, 1, 1, 1]]


def test_what_inference_mode_prepares_first_can_be_trained_with_later():
    mask, extent = masks.KeyPadding(lengths=[2, 3]), Extent(2, 1, 4, 4)
    with torch.inference_mode():
        kept = mask.lower(FULL, extent).key_keep
    assert not kept.is_inference()
    assert mask.lower(FULL, extent).key_keep is kept


def test_what_is_made_of_tensors_without_a_version_is_not_kept():
    with torch.inference_mode():
        mask = masks.KeyPadding(lengths=torch.tensor([2, 3]))
        extent = Extent(2, 1, 4, 4)
        assert mask.lower(FULL, extent).key_keep is not mask.lower(FULL, extent).key_keep
        mask.lengths[0] = 4
        assert mask.lower(FULL, extent).key_keep[0].all()


def test_prefix_sums_on_a_device_are_made_to_cover_the_sequence_unread():
    """Nobody waits for the device to check them, and no kernel may read behind the end for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_rise", lambda *_: True)
        for sums in ([0, 3], [1, 4], [0, 3, 2, 4], [0, 9], [-5, 2, 4], [4, 0]):
            mask, extent = masks.Documents(cu_seqlens=torch.tensor(sums)), Extent(1, 1, 4, 4)
            covering = mask.lower(FULL, extent).cu_seqlens.tolist()
            assert (covering[0], covering[-1], covering) == (0, 4, sorted(covering))
            # Both forms say the same documents: the one that holds bounds, and the one that holds ids.
            ids = mask.lower(FULL, extent).document_ids_q[0].tolist()
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
