"""Documents told by positions: where they start, and when their bounds are read."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnroute import masks
from attnroute.masks import checks
from attnroute.masks.lowered import documents
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.question.nodes import DocumentsNode

ROW = [0, 1, 2, 0, 1, 0, 5, 6, 6]
STARTS = [0, 3, 5, 6, 8]


def lowered(position_ids, batch=1):
    extent = Extent(batch, 1, position_ids.shape[-1], position_ids.shape[-1], position_ids.device)
    mask = masks.Documents(position_ids=position_ids)
    mask.check(extent)
    return mask.lower(FULL, extent), mask.describe(extent)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_document_starts_where_a_position_is_not_the_one_before_it_plus_one(dtype):
    found, said = lowered(torch.tensor(ROW, dtype=dtype))
    assert found.document_ids_q.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 4]]
    assert found.document_ids_kv is found.document_ids_q
    assert found.document_bounds == (*STARTS, len(ROW))
    assert found.cu_seqlens.tolist() == [*STARTS, len(ROW)]
    assert found.cu_seqlens.dtype == found.document_ids_q.dtype == torch.int32
    assert found.max_seqlen == 3
    assert said == (DocumentsNode(),)


def test_positions_of_eight_bits_do_not_wrap_around():
    assert lowered(torch.tensor([254, 255, 0], dtype=torch.uint8))[0].document_bounds == (0, 2, 3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.sampled_from([1, 3]))
def test_both_forms_say_the_same(row, batch):
    shapes = [torch.tensor(row, dtype=torch.int64), torch.tensor(row, dtype=torch.int64).expand(batch, -1)]
    for position_ids in shapes:
        found, said = lowered(position_ids, batch)
        assert said == (DocumentsNode(),)
        bounds = found.document_bounds
        assert (bounds[0], bounds[-1]) == (0, len(row))
        ids = [n for n in range(len(bounds) - 1) for _ in range(bounds[n], bounds[n + 1])]
        assert found.document_ids_q.tolist() == [ids]
        starts = [n for n in range(len(row)) if n == 0 or row[n] != row[n - 1] + 1]
        assert list(bounds[:-1]) == starts


def test_rows_of_their_own_have_ids_and_no_bounds():
    found, said = lowered(torch.tensor([[0, 1, 0], [0, 0, 1]]), batch=2)
    assert found.document_ids_q.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert (found.cu_seqlens, found.document_bounds, found.max_seqlen) == (None, None, 3)
    assert said == (DocumentsNode(contiguous=False),)


def test_bounds_are_read_once_per_tensor_and_version(monkeypatch):
    reads = []
    monkeypatch.setattr(
        documents, "_places", lambda *args, _places=documents._places: (reads.append(1), _places(*args))[1]
    )
    position_ids = torch.tensor(ROW)
    first, again = (lowered(position_ids)[0] for _ in range(2))
    assert first.cu_seqlens is again.cu_seqlens
    assert first.document_ids_q is again.document_ids_q
    assert len(reads) == 1
    position_ids.zero_()
    changed, _ = lowered(position_ids)
    assert changed.document_bounds == tuple(range(len(ROW) + 1))
    assert changed.document_ids_q.tolist() == [list(range(len(ROW)))]
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.compiler, "is_compiling"), (documents, "is_capturing")],
    ids=["compiling", "captured"],
)
def test_nothing_is_read_while_torch_compiles_or_captures(monkeypatch, owner, name):
    position_ids = torch.tensor(ROW)
    known, _ = lowered(position_ids)
    key = masks.Documents(position_ids=position_ids).key()
    monkeypatch.setattr(owner, name, lambda *_: True)
    monkeypatch.setattr(documents, "_places", lambda *_: pytest.fail("a device was waited for"))
    found, said = lowered(position_ids)
    assert found.document_ids_q.tolist() == known.document_ids_q.tolist()
    assert found.document_ids_q is not known.document_ids_q
    assert (found.cu_seqlens, found.document_bounds) == (None, None)
    assert said == (DocumentsNode(contiguous=False),)
    # What a kernel cannot have must not be promised by a route that was remembered.
    assert masks.Documents(position_ids=position_ids).key() != key


def test_tensors_whose_changes_cannot_be_seen_are_not_waited_for():
    with torch.inference_mode():
        found, said = lowered(torch.tensor(ROW))
        assert found.document_ids_q.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 4]]
        assert (found.cu_seqlens, said) == (None, (DocumentsNode(contiguous=False),))


def test_fake_tensors_have_no_values():
    with torch._subclasses.FakeTensorMode():
        assert not documents.positions_are_readable(torch.zeros(4, dtype=torch.int64))
    assert not documents.positions_are_readable(torch.zeros(4, dtype=torch.int64, device="meta"))


def test_a_mask_keeps_to_the_documents_that_positions_say():
    mask = masks.Documents(position_ids=torch.tensor(ROW)) & masks.Causal()
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 4])
    wanted = (ids[:, None] == ids) & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(mask.materialize(9, 9)[0, 0], wanted)


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
