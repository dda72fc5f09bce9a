"""When dense masks are looked into: once per tensor and version, and never where values cannot be trusted."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.masks import kept, marks
from attnroute.masks.layout import dense_node
from attnroute.masks.lowered.form import Extent
from attnroute.masks.recognition import summary
from attnroute.masks.recognition.summary import (
    INSPECT_THRESHOLD,
    SUMMARIES_KEPT,
    MaskSummary,
    inspect_mask,
    inspected_node,
)
from attnroute.question.nodes import CausalNode, KeyPaddingNode

N = 300
CAUSAL = (CausalNode(),)


def causal():
    return torch.ones(N, N, dtype=torch.bool).tril()


def extent_of(tensor, batch=2):
    return Extent(batch, 3, *tensor.shape[-2:])


def seen(tensor):
    found = inspect_mask(tensor, extent_of(tensor))
    return None if found is None else (found.empty_rows, found.recognized)


@pytest.fixture
def looks(monkeypatch):
    """Count the looks."""
    counted = []
    real = summary._inspect

    def count(tensor, extent):
        counted.append(tensor.shape)
        return real(tensor, extent)

    monkeypatch.setattr(summary, "_inspect", count)
    return counted


def test_one_look_serves_every_layer(looks):
    mask = causal()
    query = torch.randn(1, 2, N, 8)
    for _ in range(3):
        attnroute.attention(query, query, query, mask)
        attnroute.attention(query, query, query, masks.Dense(mask))
        attnroute.explain(query, query, query, mask)
    assert len(looks) == 1


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_look_serves_every_layer_that_runs_what_was_seen(looks, layout):
    mask = (masks.Causal() & masks.KeyPadding(left=[0, 70])).materialize(N, N, batch=2)
    query = torch.randn((2, 2, N, 8) if layout == "bhsd" else (2, N, 2, 8))
    for _ in range(3):
        attnroute.attention(query, query, query, mask, layout=layout, backend="chunked")
    assert len(looks) == 1


def test_a_mask_changed_in_place_is_looked_at_again(looks):
    mask = causal()
    assert seen(mask)[1] == CAUSAL
    mask[0, 2] = True
    assert seen(mask)[1] is None
    mask.view(-1)[2] = False
    assert seen(mask)[1] == CAUSAL
    assert len(looks) == 3


def test_another_batch_size_is_another_question(looks):
    mask = (masks.Causal() & masks.KeyPadding(left=[70])).materialize(N, N)
    for batch in (2, 3, 2):
        found = inspect_mask(mask, extent_of(mask, batch))
        assert found.recognized == (*CAUSAL, KeyPaddingNode(lengths=(230,) * batch, side="left"))
    assert len(looks) == 2


def test_equal_masks_that_are_other_tensors_are_looked_at_each(looks):
    mask = causal()
    assert seen(mask) == seen(mask.clone())
    assert len(looks) == 2


def test_layers_that_cut_the_same_mask_out_of_one_buffer_share_a_look(looks):
    buffer = torch.ones(1, 1, 400, 400, dtype=torch.bool).tril()
    for _ in range(3):
        assert seen(buffer[:, :, :N, :N])[1] == CAUSAL
    assert len(looks) == 1
    assert seen(buffer[:, :, 50 : 50 + N, :N])[1] == masks.Window(None, 50).describe(None)
    assert len(looks) == 2


def test_a_buffer_changed_in_place_is_looked_at_again(looks):
    buffer = torch.ones(1, 1, 400, 400, dtype=torch.bool).tril()
    assert seen(buffer[:, :, :N, :N])[1] == CAUSAL
    buffer[0, 0, 0, 2] = True
    assert seen(buffer[:, :, :N, :N])[1] is None
    assert len(looks) == 2


def test_views_without_end_are_not_all_kept(looks):
    row = torch.ones(1, 1, 1, INSPECT_THRESHOLD + 2 * SUMMARIES_KEPT, dtype=torch.bool)
    for extra in range(SUMMARIES_KEPT + 2):
        assert seen(row[..., : INSPECT_THRESHOLD + extra]) == ("none", ())
    stored = kept.remember(row, "summaries", dict)
    assert 0 < len(stored) <= SUMMARIES_KEPT
    assert len(looks) == SUMMARIES_KEPT + 2


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "view"])
def test_a_freed_mask_leaves_nothing_behind(cut):
    mask = masks.Documents(ids=torch.arange(400) // 100).materialize(400, 400)[0, 0].clone()
    assert seen(mask[:N, :N] if cut else mask) is not None
    places, alive = marks.places_of(mask), weakref.ref(mask)
    assert any(kept._OF_TENSORS.get(place) for place in places)
    del mask
    gc.collect()
    assert alive() is None
    assert not any(kept._OF_TENSORS.get(place) for place in places)


@pytest.mark.parametrize("size", [(255, 257), (1, 65_535), (1, 1)])
def test_a_small_mask_is_not_looked_at(looks, size):
    assert size[0] * size[1] < INSPECT_THRESHOLD
    assert seen(torch.ones(size, dtype=torch.bool)) is None
    assert looks == []


@pytest.mark.parametrize("shape", [(), (N, 1), (1, 1, N, 1), (3, N, N), (200, N), (3, 1, N, N)])
def test_a_mask_of_another_shape_is_not_looked_at(looks, shape):
    assert inspect_mask(torch.ones(shape, dtype=torch.bool), Extent(2, 3, N, N)) is None
    assert looks == []


@pytest.mark.parametrize("shape", [(N,), (1, N), (1, 1, 1, N), (2, 1, 1, N), (2, 3, N, N)])
def test_a_mask_of_any_shape_that_says_which_keys_is_looked_at(looks, shape):
    assert inspect_mask(torch.ones(shape, dtype=torch.bool), Extent(2, 3, N, N)) == MaskSummary("none", ())
    assert len(looks) == 1


def test_what_is_no_bool_tensor_is_not_looked_at(looks):
    for tensor in (torch.ones(N, N), torch.ones(N, N, dtype=torch.uint8), torch.ones(N, N).requires_grad_()):
        assert inspect_mask(tensor, extent_of(tensor)) is None
    assert looks == []


def test_a_mask_without_a_version_is_not_looked_at(looks):
    with torch.inference_mode():
        assert seen(causal()) is None
    assert looks == []


def test_a_mask_made_before_is_looked_at_in_inference_mode(looks):
    mask = (masks.Causal() & masks.Documents(ids=torch.arange(N) // 100)).materialize(N, N)
    with torch.inference_mode():
        found = inspect_mask(mask, extent_of(mask))
    assert found.recognized is not None
    assert not any(t.is_inference() for part in found.masks for t in part.tensors)


def test_a_mask_without_values_is_not_looked_at(looks):
    assert seen(torch.ones(N, N, dtype=torch.bool, device="meta")) is None
    assert looks == []


def test_a_mask_of_another_type_than_torchs_own_is_not_looked_at(looks):
    class Logged(torch.Tensor):
        pass

    assert seen(causal().as_subclass(Logged)) is None
    assert looks == []


def test_a_mask_inside_a_transform_is_not_looked_at(looks):
    found = []

    def look_inside(mask):
        found.append(inspect_mask(mask, Extent(1, 1, N, N)))
        return mask

    torch.vmap(look_inside)(causal().repeat(2, 1, 1))
    assert found == [None]
    assert looks == []


def test_a_mask_inside_a_trace_is_not_looked_at(looks, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert seen(causal()) is None
    assert looks == []


def test_override_keeps_masks_closed(looks):
    query = torch.randn(1, 2, N, 8)
    with attnroute.override(recognize=False):
        decision = attnroute.explain(query, query, query, causal())
        attnroute.attention(query, query, query, causal())
    assert looks == []
    (node,) = decision.call.mask
    assert (node.recognized, node.empty_rows) == (None, "unknown")


def test_the_environment_keeps_masks_closed(looks, environment):
    environment(RECOGNIZE="0")
    query = torch.randn(1, 2, N, 8)
    attnroute.attention(query, query, query, causal())
    assert looks == []


def test_the_data_of_a_mask_says_what_was_found():
    mask = torch.ones(N, N, dtype=torch.bool).tril(-1)
    node = inspected_node(mask, extent_of(mask))
    assert (node.empty_rows, node.recognized, node.shape, node.aligned) == ("some", None, (N, N), False)
    assert dense_node(mask).empty_rows == "unknown"


def test_masks_that_are_one_for_a_decision_are_equal():
    ids = [torch.arange(N) // torch.tensor([[step], [90]]) for step in (70, 80)]
    shown = [masks.Documents(ids=each).materialize(N, N, batch=2) for each in ids]
    first, second = (inspect_mask(mask, extent_of(mask)) for mask in shown)
    assert first == second
    assert hash(first) == hash(second)
    assert not torch.equal(first.masks[0].ids, second.masks[0].ids)
