"""A mask object in the form of a tensor acts as the dense tensor does, whatever is done with it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.transformers_models import materialized, packed_function
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import masking_utils

from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.integrations.transformers.mask_interface import make_mask


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


def as_float(mask):
    return torch.where(mask, 0.0, -1.0)


@pytest.fixture
def windowed():
    """Return how to make a mask with everything that its plain tensors say: offset, window, padding."""
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 0] = False
    function = masking_utils.sliding_window_causal_mask_function(3)
    return lambda: make_mask(2, 4, 6, 2, attention_mask=keep, mask_function=function)


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_vmap_maps_over_the_dense_mask(windowed, dim):
    mapped = torch.vmap(as_float, in_dims=dim)
    assert torch.equal(mapped(windowed()), mapped(windowed().dense()))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_the_mask(windowed, strict):
    class Model(torch.nn.Module):
        def forward(self, scores, mask):
            return scores.masked_fill(~mask, -1.0)

    scores, model = torch.randn(2, 1, 4, 6), Model()
    program = torch.export.export(model, (scores, windowed()), strict=strict).module()
    for mask in (windowed(), causal()):
        assert torch.equal(program(scores, mask), model(scores, mask.dense()))


def test_a_jit_trace_takes_the_mask(windowed):
    traced = torch.jit.trace(as_float, (windowed(),), check_trace=False)
    for mask in (windowed(), causal()):
        assert torch.equal(traced(mask.dense()), as_float(mask.dense()))


@pytest.mark.parametrize(
    "operation",
    [
        as_float,
        lambda mask: mask[:, :, 1:],
        lambda mask: mask[0, 0, 0, 0],
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.clone().logical_not_(),
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: mask.expand(2, 4, -1, -1),
        lambda mask: torch.zeros(mask.shape) + mask.dim(),
    ],
    ids=["where", "block", "item", "float", "copy", "cat", "expand", "shape"],
)
def test_a_graph_computes_with_the_dense_mask(windowed, operation):
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(windowed()), operation(windowed().dense()))
    torch._dynamo.reset()


@pytest.fixture
def silent_compiler(monkeypatch):
    """Have `is_compiling` say no while torch.compile's own code runs, as in torch 2.11."""
    monkeypatch.setattr(torch.compiler, "_compile_session_context", nullcontext, raising=False)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("silent_compiler")
@pytest.mark.parametrize("cut", [slice(None), slice(1, None), slice(2, 5)])
def test_a_compiler_that_does_not_say_so_sees_the_form(windowed, cut):
    compiled = torch.compile(
        as_float, backend=(counter := CompileCounterWithBackend("aot_eager")), fullgraph=True
    )
    for _ in range(3):
        mask = windowed()[:, :, :, cut]
        assert torch.equal(compiled(mask), as_float(windowed().dense()[..., cut]))
        assert mask.made is None
    assert counter.frame_count == 1


def with_documents():
    return make_mask(1, 6, 6, mask_function=packed_function(torch.tensor([[0, 1, 0, 1, 2, 0]])))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "operation",
    [lambda mask: mask.float(), lambda mask: mask & True, lambda mask: torch.cat([mask, mask], -1)],
)
def test_a_fake_mask_needs_no_mode_in_force(windowed, documents, operation):
    mask = with_documents() if documents else windowed()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(mask)
    assert fake.stride() == mask.dense().stride()
    found, expected = operation(fake), operation(mask.dense())
    assert isinstance(found, FakeTensor)
    assert found.fake_mode is mode
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


def test_one_graph_holds_for_other_offsets_windows_and_paddings():
    compiled = torch.compile(as_float, backend=(counter := CompileCounterWithBackend("aot_eager")))
    for offset, window, missing in [(2, 3, 0), (3, 9, 1), (0, 1, 2), (2, 2, 4)]:
        keep = torch.arange(6)[None].expand(2, -1) >= missing
        function = masking_utils.sliding_window_causal_mask_function(window)
        mask = make_mask(2, 4, 6, offset, attention_mask=keep, mask_function=function)
        assert torch.equal(compiled(mask), as_float(mask.dense()))
    mask = make_mask(2, 4, 6, 2)
    assert torch.equal(compiled(mask), as_float(mask.dense()))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_graph_sees_what_was_written(windowed):
    mask = windowed()
    block = mask[:, :, 1:]
    mask[..., 0] = True
    compiled = torch.compile(as_float, backend="aot_eager")
    for part in (mask, block):
        assert torch.equal(compiled(part), as_float(part.dense()))
    assert block.dense()[..., 0].all()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "write", [lambda mask: mask.fill_(True), lambda mask: mask.__setitem__((..., 0), True)]
)
def test_a_graph_that_writes_raises(windowed, write):
    mask = windowed()
    expected = mask.dense().clone()
    with pytest.raises(RuntimeError, match=r"got the mask of the model.*write into mask.clone\(\)"):
        torch.compile(write, backend="aot_eager", fullgraph=True)(mask)
    assert torch.equal(mask.dense(), expected)
    torch._dynamo.reset()


def test_the_mask_of_a_tracer_has_a_text(windowed):
    mask = windowed()
    names, constants = mask.__tensor_flatten__()
    assert (names, constants) == (["offset", "left", "right", "keep"], None)
    parts = {name: getattr(mask, name) for name in names}
    held = CarriedMask.__tensor_unflatten__(parts, None, (2, 1, 4, 6), (24, 24, 6, 1))
    assert repr(held) == "CarriedMask(shape=(2, 1, 4, 6))"
    assert held.pattern is None
    assert torch.equal(held.dense(), windowed().dense())
    assert not hasattr(held, "nothing")


def test_a_mask_whose_memory_numpy_has_counts_as_what_it_holds():
    """Nobody is told of what is written through NumPy, so the pattern may be stale from then on."""
    mask = causal()
    block = mask[:, :, -1:]
    array = mask.numpy()
    assert (mask.pattern, block.pattern) == (None, None)
    array[:] = False
    assert not mask.dense().any()
    assert not block.dense().any()
