"""Looking into dense masks: what is found is what the tensor says, one look serves all."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import TOLERANCE, attend, error
from spy import Spy

import attnroute
from attnroute import masks
from attnroute import settings as attnroute_settings
from attnroute.call import CausalNode
from attnroute.masks import tensors
from attnroute.masks.nodes import Extent
from attnroute.masks.tensors import LOOK_THRESHOLD, dense_node, look_into

SIZES = st.sampled_from([(256, 256), (300, 300), (257, 511), (400, 256), (1, 70_000), (65_537, 1)])


def extent_of(tensor, batch=2, heads=3):
    return Extent(batch, heads, *tensor.shape[-2:])


def seen(tensor):
    found = look_into(tensor, extent_of(tensor))
    return None if found is None else (found.empty_rows, found.recognized)


@st.composite
def patterns(draw):
    """Draw a mask that is causal or full, in every form that broadcasts, and the nodes that say it."""
    seqlen_q, seqlen_kv = draw(SIZES)
    alignment = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    matrix = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if alignment is not None:
        matrix = matrix.tril(seqlen_kv - seqlen_q if alignment == "bottom_right" else 0)
    form = draw(st.sampled_from(["2-D", "4-D", "batch", "expanded", "transposed", "sliced"]))
    return alignment, _formed(matrix, form)


def _formed(matrix, form):
    if form == "4-D":
        return matrix[None, None]
    if form == "batch":
        return matrix.repeat(2, 1, 1, 1)
    if form == "expanded":
        return matrix.expand(2, 3, *matrix.shape)
    if form == "transposed":
        return matrix.t().contiguous().t()
    if form == "sliced":
        return torch.cat([matrix, ~matrix], 1)[:, : matrix.shape[1]]
    return matrix


@given(patterns())
@settings(max_examples=40)
def test_causal_and_full_masks_are_recognised_bit_for_bit(pattern):
    alignment, mask = pattern
    found = look_into(mask, extent_of(mask))
    said = masks.All(tuple(masks.Causal(node.alignment) for node in found.recognized))
    again = said.materialize(*mask.shape[-2:])
    shape = torch.broadcast_shapes(mask.shape, again.shape)
    assert torch.equal(again.expand(shape), mask.expand(shape))
    if alignment is None:
        assert found.recognized == ()


@given(patterns(), st.data())
@settings(max_examples=40)
def test_one_element_flipped_is_not_recognised(pattern, data):
    _, mask = pattern
    mask = mask.clone(memory_format=torch.contiguous_format)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in mask.shape)
    mask[place] = ~mask[place]
    found = look_into(mask, extent_of(mask))
    # With one row or column, a flipped corner can make one pattern of another.
    if found.recognized is not None:
        assume(min(mask.shape[-2:]) > 1)
    assert found.recognized is None
    assert found.empty_rows == ("none" if mask.any(-1).all() else "some")


def test_both_alignments_are_told_apart():
    assert seen(torch.ones(300, 400, dtype=torch.bool).tril()) == ("none", (CausalNode(),))
    bottom_right = (CausalNode(alignment="bottom_right"),)
    assert seen(torch.ones(300, 400, dtype=torch.bool).tril(100)) == ("none", bottom_right)
    assert seen(torch.ones(400, 300, dtype=torch.bool).tril(-100)) == ("some", bottom_right)
    assert seen(torch.ones(300, 300, dtype=torch.bool)) == ("none", ())


@pytest.mark.parametrize("row", [0, 150, 299])
def test_one_empty_row_is_seen(row):
    mask = torch.ones(2, 1, 300, 300, dtype=torch.bool)
    mask[1, 0, row] = False
    assert seen(mask) == ("some", None)


def test_one_sequence_of_the_batch_that_differs_is_seen():
    mask = torch.ones(3, 1, 300, 300, dtype=torch.bool).tril()
    mask[2, 0, 299, 0] = False
    assert seen(mask) == ("none", None)


def test_a_mask_read_in_several_pieces_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(tensors, "_LOOK_CHUNK", 300 * 7)
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    assert seen(causal) == ("none", (CausalNode(),))
    causal[299, 299] = False
    assert seen(causal) == ("none", None)


@pytest.fixture
def looks(monkeypatch):
    """Count the looks."""
    counted = []
    look = tensors._look

    def count(tensor):
        counted.append(tensor.shape)
        return look(tensor)

    monkeypatch.setattr(tensors, "_look", count)
    return counted


def test_one_look_serves_every_layer(looks):
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    query = torch.randn(1, 2, 300, 8)
    for _ in range(3):
        attnroute.attention(query, query, query, mask)
        attnroute.attention(query, query, query, masks.Dense(mask))
        attnroute.explain(query, query, query, mask)
    assert len(looks) == 1


def test_a_mask_changed_in_place_is_looked_at_again(looks):
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    assert seen(mask)[1] == (CausalNode(),)
    mask[0, 1] = True
    assert seen(mask)[1] is None
    mask.view(-1)[1] = False
    assert seen(mask)[1] == (CausalNode(),)
    assert len(looks) == 3


def test_equal_masks_that_are_other_tensors_are_looked_at_each(looks):
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    assert seen(mask) == seen(mask.clone())
    assert len(looks) == 2


def test_a_freed_mask_leaves_nothing_behind():
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    seen(mask)
    place = id(mask)
    assert place in tensors._MEMORY
    mask = mask.clone()
    gc.collect()
    assert place not in tensors._MEMORY or tensors._MEMORY[place].reference() is not None


@pytest.mark.parametrize("size", [(255, 257), (1, 65_535), (1, 1)])
def test_a_small_mask_is_not_looked_at(looks, size):
    assert size[0] * size[1] < LOOK_THRESHOLD
    assert seen(torch.ones(size, dtype=torch.bool)) is None
    assert looks == []


def test_a_mask_that_broadcasts_along_queries_or_keys_is_not_looked_at(looks):
    extent = Extent(1, 1, 300, 300)
    for shape in ((300,), (1, 300), (300, 1), (1, 1, 1, 300)):
        assert look_into(torch.ones(shape, dtype=torch.bool), extent) is None
    assert looks == []


def test_a_mask_without_a_version_is_not_looked_at(looks):
    with torch.inference_mode():
        assert seen(torch.ones(300, 300, dtype=torch.bool)) is None
    trained = torch.ones(300, 300).requires_grad_()
    assert look_into(trained, extent_of(trained)) is None
    assert looks == []


def test_a_mask_without_values_is_not_looked_at(looks):
    assert seen(torch.ones(300, 300, dtype=torch.bool, device="meta")) is None
    assert looks == []


def test_a_mask_of_another_type_than_torchs_own_is_not_looked_at(looks):
    class Logged(torch.Tensor):
        pass

    assert seen(torch.ones(300, 300, dtype=torch.bool).as_subclass(Logged)) is None
    assert looks == []


def test_a_mask_of_no_batch_row_is_looked_at_without_harm():
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).expand(0, 1, 300, 300)
    assert seen(mask) == ("none", ())


def test_override_keeps_masks_closed(looks):
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    query = torch.randn(1, 2, 300, 8)
    with attnroute.override(recognize=False):
        decision = attnroute.explain(query, query, query, mask)
        attnroute.attention(query, query, query, mask)
    assert looks == []
    (node,) = decision.call.mask
    assert (node.recognized, node.empty_rows) == (None, "unknown")


def test_the_environment_keeps_masks_closed(looks, monkeypatch):
    monkeypatch.setenv("ATTNROUTE_RECOGNIZE", "0")
    attnroute_settings.reload()
    try:
        query = torch.randn(1, 2, 300, 8)
        attnroute.attention(query, query, query, torch.ones(300, 300, dtype=torch.bool).tril())
    finally:
        monkeypatch.undo()
        attnroute_settings.reload()
    assert looks == []


def test_the_data_of_a_mask_says_what_was_found():
    mask = torch.ones(300, 300, dtype=torch.bool).tril(-1)
    node = dense_node(mask, extent_of(mask), look=True)
    assert (node.empty_rows, node.recognized, node.shape, node.aligned) == ("some", None, (300, 300), False)
    assert dense_node(mask, extent_of(mask), look=False).empty_rows == "unknown"


class Arguments(Spy):
    """Keep what the flash operator was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
            names = [a.name for a in func._schema.arguments]
            self.calls.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("wrap", [lambda mask: mask, masks.Dense], ids=["tensor", "object"])
def test_a_dense_causal_mask_runs_as_is_causal_without_a_tensor(wrap):
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    with Arguments() as spy:
        out = attnroute.attention(query, key, value, wrap(mask))
    (call,) = spy.calls
    assert call["is_causal"] is True
    assert call.get("attn_mask") is None
    assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_a_full_mask_runs_without_a_tensor():
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    with Arguments() as spy:
        out = attnroute.attention(query, key, value, torch.ones(300, 300, dtype=torch.bool))
    (call,) = spy.calls
    assert call.get("is_causal", False) is False
    assert call.get("attn_mask") is None
    assert error(out, attend(query, key, value)[0]) <= TOLERANCE[torch.float32]


def test_a_dense_causal_mask_beside_a_window_keeps_both():
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    out = attnroute.attention(query, key, value, mask, window=(5, None))
    allowed = mask & ~mask.tril(-6)
    assert error(out, attend(query, key, value, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


def test_masks_of_one_shape_that_say_different_things_go_different_ways():
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    full, odd = torch.ones_like(causal), causal.clone()
    odd[299, 17] = False
    for _ in range(2):
        for mask in (causal, full, odd):
            out = attnroute.attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_a_route_taken_inside_vmap_is_not_that_of_another_mask():
    query, key, value = torch.randn(3, 2, 1, 2, 300, 8).unbind()
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    odd = causal.clone()
    odd[299, 17] = False
    for mask in (causal, odd):

        def run(q, k, v, mask=mask):
            return attnroute.attention(q, k, v, mask)

        out = torch.vmap(run)(query, key, value).flatten(0, 1)
        want, _ = attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), allowed=mask)
        assert error(out, want) <= TOLERANCE[torch.float32]
