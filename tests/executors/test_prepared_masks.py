"""What is prepared from a mask is made once for all layers, and goes with its mask."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.repair_inputs import inputs_of, lowered, reference
from torch._subclasses.fake_tensor import FakeTensorMode

import attnroute
from attnroute import masks
from attnroute.executors import ragged
from attnroute.executors.prepare import masks as repairs
from attnroute.masks import kept


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    reference.seen = []


@pytest.fixture
def builds(monkeypatch):
    """Count how often a mask becomes a tensor."""
    found = []
    build = repairs.build

    def counted(mask, extent):
        found.append(extent)
        return build(mask, extent)

    monkeypatch.setattr(repairs, "build", counted)
    return found


def normal(seqlen=6):
    return [torch.randn(2, 4, seqlen, 8) for _ in range(3)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(2)) < 0.7,
        masks.KeyPadding(lengths=[6, 2]),
        masks.Causal() & masks.KeyPadding(lengths=torch.tensor([6, 2])),
    ],
    ids=["tensor", "padding", "both"],
)
def test_a_mask_is_prepared_once_for_all_layers(builds, mask):
    for _ in range(4):
        attnroute.attention(*normal(), mask)
    assert len(builds) == 1
    attnroute.attention(*(t.double() for t in normal()), mask)
    assert len(builds) == 2


def test_a_mask_is_prepared_for_each_length(builds):
    mask = masks.KeyPadding(lengths=[4, 2])
    for length in (5, 6, 7, 5, 6, 7):
        attnroute.attention(*normal(length), mask)
    assert len(builds) == 3


def test_a_mask_beside_a_bias_is_prepared_each_time(builds):
    mask, bias = masks.KeyPadding(lengths=[6, 2]), torch.randn(6, 6)
    for _ in range(2):
        attnroute.attention(*normal(), mask, bias=bias, backend="flash")
    assert len(builds) == 2


@pytest.mark.parametrize(
    "mask", [masks.KeyPadding(lengths=[6, 2]), torch.rand(6, 6) < 0.7], ids=["object", "tensor"]
)
def test_a_mask_beside_causal_and_window_is_prepared_once_for_each(builds, mask):
    for _ in range(2):
        attnroute.attention(*normal(), mask, is_causal=True)
        attnroute.attention(*normal(), mask, window=(2, 1))
    assert len(builds) == 2


def test_a_large_mask_is_not_kept(builds, monkeypatch):
    monkeypatch.setattr(repairs, "PREPARED_LIMIT_BYTES", 6 * 6 * 4 - 1)
    mask = masks.KeyPadding(lengths=[6, 2])
    for _ in range(2):
        attnroute.attention(*normal(), mask)
    assert len(builds) == 2


def test_what_was_prepared_goes_with_its_mask():
    before, seen = set(kept._OF_TENSORS.values()), []
    mask = masks.KeyPadding(lengths=[6, 2])
    dense = torch.rand(6, 6) < 0.7
    for given in (mask, dense):
        attnroute.attention(*normal(), given)
        keeper = kept.keeper_of(given)
        seen += [weakref.ref(made) for made in keeper.values() if isinstance(made, torch.Tensor)]
    assert len(seen) >= 2
    assert set(kept._OF_TENSORS.values()) > before
    del mask, dense, given, keeper
    gc.collect()
    assert set(kept._OF_TENSORS.values()) <= before
    assert [alive for alive in seen if alive() is not None] == []


@pytest.mark.parametrize("batch", [1, 3])
def test_prefix_sums_of_every_row_follow_each_other(batch):
    inputs = inputs_of(batch, 2, 2, 6, 6)
    inputs.mask = lowered(masks.Documents(lengths=[2, 0, 4]), inputs)
    found = ragged.rows_of(inputs, training=False)
    want = torch.tensor([0, *(n + 6 * b for b in range(batch) for n in (2, 2, 6))], dtype=torch.int32)
    assert found.rows.sums_q.dtype == torch.int32
    assert torch.equal(found.rows.sums_q, want)
    assert torch.equal(found.rows.sums_kv, want)
    assert (found.longest_q, found.longest_kv) == (4, 4)


def test_a_ragged_batch_needs_prefix_sums():
    inputs = inputs_of(1, 2, 2, 6, 6)
    inputs.mask = lowered(masks.Documents(ids=torch.zeros(6, dtype=torch.int64)), inputs)
    with pytest.raises(ValueError, match="to_varlen requires documents or key padding given by lengths"):
        ragged.rows_of(inputs, training=False)


def test_what_a_tracer_made_for_a_mask_is_not_kept():
    """A mask of numbers alone belongs to no tracer, so nothing of the tracer's may stay with it."""
    mask = masks.KeyPadding(lengths=[7, 5])
    tensors = [torch.randn(2, 2, 7, 8) for _ in range(3)]
    want = attnroute.attention(*tensors, masks.KeyPadding(lengths=[7, 5]))
    with FakeTensorMode() as mode:
        attnroute.attention(*(mode.from_tensor(t) for t in tensors), mask)
    torch.testing.assert_close(attnroute.attention(*tensors, mask), want)
