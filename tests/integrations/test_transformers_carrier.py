"""A mask object in the form of a tensor acts as the dense tensor does, whatever is done with it."""

from __future__ import annotations

import pytest
import torch
from transformers_models import materialized, packed_function

from attnroute.integrations._transformers_carrier import CarriedMask
from attnroute.integrations._transformers_mask import make_mask


def causal(q_length=4, kv_length=6):
    """Return a carried mask of cached decoding with one padded row."""
    keep = torch.ones(2, kv_length, dtype=torch.bool)
    keep[1, 0] = False
    return make_mask(2, q_length, kv_length, kv_length - q_length, attention_mask=keep)


def test_a_carried_mask_looks_like_the_dense_one():
    mask = causal()
    assert (mask.shape, mask.ndim, mask.dim(), len(mask)) == ((2, 1, 4, 6), 4, 4, 2)
    assert (mask.size(-1), mask.numel(), mask.dtype, mask.device.type) == (6, 48, torch.bool, "cpu")
    assert not mask.is_floating_point()
    assert mask.untyped_storage().nbytes() == 48  # Asked for its memory, it is the dense mask.


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), slice(-1, None)),
        (slice(None), slice(None), slice(1, 3), slice(None)),
        (slice(None), slice(None), slice(None), slice(None, 5)),
        (slice(None), slice(None), slice(1, None), slice(2, 6)),
        slice(None),
    ],
)
def test_blocks_stay_objects(index):
    mask = causal()
    expected = causal().dense()[index]
    block = mask[index]
    size = dict(zip(("batch_size", "_", "q_length", "kv_length"), expected.shape, strict=True))
    assert isinstance(block, CarriedMask)
    assert torch.equal(materialized(block, size), expected)
    assert torch.equal(block.dense(), expected)


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), 0),
        (slice(0, 1),),
        (slice(None), slice(None), slice(None, None, 2)),
        (slice(None), slice(None), slice(4, None)),
        (Ellipsis, slice(0, 2)),
        torch.tensor([1]),
        None,
    ],
)
def test_other_indices_give_plain_tensors(index):
    part = causal()[index]
    assert type(part) is torch.Tensor
    assert torch.equal(part, causal().dense()[index])


def test_documents_are_not_cut():
    mask = make_mask(1, 6, 6, mask_function=packed_function(torch.tensor([[0, 1, 0, 1, 2, 0]])))
    assert type(mask[:, :, -2:]) is torch.Tensor
    assert isinstance(mask[:, :, :6], CarriedMask)


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask & True,
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.expand(2, 4, -1, -1),
        lambda mask: torch.nn.functional.pad(mask, (0, 2)),
    ],
    ids=["and", "cat", "where", "float", "expand", "pad"],
)
def test_arithmetic_works_on_the_dense_mask(operation):
    result = operation(causal())
    assert type(result) is torch.Tensor
    assert torch.equal(result, operation(causal().dense()))


@pytest.mark.parametrize(
    "keeps",
    [
        lambda mask: mask.contiguous(),
        lambda mask: mask.to("cpu"),
        lambda mask: mask.clone(),
        lambda mask: mask.detach(),
    ],
    ids=["contiguous", "to", "clone", "detach"],
)
def test_moving_and_copying_keeps_the_object(keeps):
    mask = causal()
    assert keeps(mask).pattern is mask.pattern


def test_moving_to_another_device_keeps_the_object():
    moved = causal().to("meta", non_blocking=True)
    assert isinstance(moved, CarriedMask)
    assert (moved.device.type, moved.pattern.kv_length) == ("meta", 6)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.fill_(True),
        lambda mask: mask.__setitem__((..., 0), True),
        lambda mask: mask[:, :, 1:3].masked_fill_(torch.tensor(True), True),
        lambda mask: mask.transpose(2, 3)[1].logical_not_(),
        lambda mask: torch.logical_not(mask, out=mask),
    ],
    ids=["all", "item", "block", "view", "out"],
)
def test_what_is_written_into_a_mask_counts(write, inference):
    with torch.inference_mode(inference):
        mask, expected = causal(), causal().dense()
        block = mask[:, :, -2:]
        write(mask)
        write(expected)
        assert mask.pattern is None
        assert block.pattern is None
        assert torch.equal(mask.dense(), expected)
        assert torch.equal(block.dense(), expected[:, :, -2:])


def test_a_copy_is_written_to_alone():
    mask = causal()
    mask.clone().fill_(True)
    mask[:, :, -2:].contiguous().fill_(True)
    assert mask.pattern is not None
    assert torch.equal(mask.dense(), causal().dense())
