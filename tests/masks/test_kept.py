"""What is kept with a tensor or a mask object: made once, made anew after a change, gone with its owner."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.masks.kept import keeper_of, remember_pair
from attnroute.masks.lowered.form import FULL, Extent

N = 300


def causal(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()


def normal(n=N, heads=2):
    return torch.randn(1, heads, n, 8)


def test_what_two_tensors_make_goes_with_either():
    first, second = torch.zeros(3), torch.zeros(3)
    made = iter(range(9))
    both = lambda: remember_pair(first, second, "sum", lambda: next(made))  # noqa: E731
    assert [both(), both()] == [0, 0]
    second[0] = 1
    assert [both(), both()] == [1, 1]
    first[0] = 1
    assert [both(), both()] == [2, 2]


def test_a_mask_does_not_keep_more_than_its_bound():
    mask = masks.KeyPadding(lengths=[3, 2])
    for length in range(3, 203):
        mask.materialize(1, length, batch=2)
    assert len(keeper_of(mask).values()) <= 64


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_mask_is_equal_and_reads_its_own_tensors(copied):
    ids = torch.arange(8) // 3
    mask = ~masks.Documents(ids=ids)
    mask.materialize(8, 8)
    twin = copied(mask)
    assert torch.equal(twin.materialize(8, 8), mask.materialize(8, 8))
    twin.part.ids.fill_(0)
    assert not twin.materialize(8, 8).any()
    assert repr(twin) == repr(mask)


def test_what_is_kept_is_no_part_of_a_mask():
    used, fresh = masks.KeyPadding(lengths=[3, 2]), masks.KeyPadding(lengths=[3, 2])
    used.materialize(4, 4, batch=2)
    assert used == fresh
    assert hash(used) == hash(fresh)
    saved = [io.BytesIO(), io.BytesIO()]
    tensor, other = causal(), causal()
    attnroute.attention(normal(), normal(), normal(), tensor)
    for t, file in zip((tensor, other), saved, strict=True):
        torch.save(t, file)
    assert saved[0].getvalue() == saved[1].getvalue()
    assert vars(tensor) == {}


class Model(torch.nn.Module):
    """Owns its mask, which has a function of the model."""

    def __init__(self, make):
        super().__init__()
        self.register_buffer("limit", torch.tensor(5))
        self.mask = make(self)

    def allow(self, _b, _h, i, j):
        return j - i < self.limit


def functions(model):
    return masks.Function(model.allow)


FUNCTION_MASKS = [
    functions,
    lambda model: ~functions(model),
    lambda model: masks.Window(0) | functions(model),
    lambda model: masks.Window(2) & ~functions(model),
    lambda model: ~(masks.KeyPadding(lengths=[4]) | functions(model)),
    lambda model: ~(~functions(model) & masks.Causal()),
]


@pytest.mark.parametrize("make", FUNCTION_MASKS)
@pytest.mark.parametrize("train", [False, True])
def test_a_model_that_owns_a_mask_of_functions_is_freed(make, train):
    model = Model(make)
    query = torch.randn(1, 2, 8, 4, requires_grad=train)
    for length in (8, 6):
        part = query[:, :, :length]
        out = attnroute.attention(part, part, part, model.mask, backend="chunked")
        if train:
            out.sum().backward()
    attnroute.explain(query, query, query, model.mask)
    model.mask.materialize(8, 8)
    alive = weakref.ref(model)
    del model, out, part
    gc.collect()
    assert alive() is None


def test_a_model_that_owns_a_score_function_is_freed():
    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.bias = attnroute.biases.Function(self.change) + attnroute.biases.Softcap(3.0)

        def change(self, score, _b, _h, _i, _j):
            return score * self.scale

    model, query = Biased(), torch.randn(1, 2, 8, 4, requires_grad=True)
    out = attnroute.attention(query, query, query, bias=model.bias, backend="chunked")
    out.sum().backward()
    attnroute.explain(query, query, query, bias=model.bias)
    alive = weakref.ref(model)
    del model, out
    gc.collect()
    assert alive() is None


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
