"""Masks as objects say exactly what the dense masks of transformers say."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.transformers_models import MODELS, TINY, materialized, packed_function
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import masking_utils as hf

from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.integrations.transformers.mask_interface import make_mask
from attnroute.masks import Causal, Documents, KeyPadding

NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


@st.composite
def sizes(draw):
    """Draw lengths of a prefill, of cached decoding with or without evicted keys, or of a static cache."""
    q_length = draw(st.integers(1, 7))
    past = draw(st.sampled_from([0, 0, 1, 5]))
    kv_offset = draw(st.integers(0, past))
    unused = draw(st.sampled_from([0, 0, 3]))
    return {
        "batch_size": draw(st.integers(1, 3)),
        "q_length": q_length,
        "kv_length": past - kv_offset + q_length + unused,
        "q_offset": past,
        "kv_offset": kv_offset,
    }


FUNCTIONS = {
    "causal": lambda _: hf.causal_mask_function,
    "window": hf.sliding_window_causal_mask_function,
    "two-sided window": hf.sliding_window_bidirectional_mask_function,
    "bidirectional": lambda _: hf.bidirectional_mask_function,
    "nested": lambda window: hf.and_masks(
        hf.causal_mask_function, hf.sliding_window_causal_mask_function(window)
    ),
}


@st.composite
def paddings(draw, size):
    """Draw no padding mask, padding on either side or anywhere, sometimes shorter than the keys."""
    total = size["kv_offset"] + size["kv_length"]
    kind = draw(st.sampled_from(["none", "full", "left", "right", "random"]))
    if kind == "none":
        return None
    length = draw(st.sampled_from([total, size["q_offset"] + size["q_length"]]))
    place = torch.arange(length)[None]
    counts = torch.tensor([draw(st.integers(0, length)) for _ in range(size["batch_size"])])[:, None]
    if kind == "random":
        return (
            torch.rand(
                size["batch_size"], length, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
            )
            < 0.7
        )
    return {"full": place >= 0 * counts, "left": place >= counts, "right": place < counts}[kind]


@given(data=st.data())
def test_objects_say_what_dense_masks_say(data):
    size = data.draw(sizes())
    name = data.draw(st.sampled_from(sorted(FUNCTIONS)))
    function = FUNCTIONS[name](data.draw(st.integers(1, 9)))
    padding = data.draw(paddings(size))
    static = data.draw(st.booleans()) and size["q_length"] > 1
    offset = torch.tensor(size["q_offset"]) if static else size["q_offset"]

    mask = make_mask(**{**size, "q_offset": offset}, mask_function=function, attention_mask=padding)
    expected = hf.sdpa_mask(**size, mask_function=function, attention_mask=padding, **NO_SKIP)

    assert isinstance(mask, CarriedMask)
    assert torch.equal(mask.dense(), expected)
    assert torch.equal(materialized(mask, size), expected)


@given(data=st.data())
def test_packed_documents_say_what_dense_masks_say(data):
    rows = []
    for _ in range(data.draw(st.integers(1, 2))):
        lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
        row = torch.cat([torch.arange(n) + data.draw(st.sampled_from([0, 0, 3])) for n in lengths])
        rows.append(torch.nn.functional.pad(row, (0, 24 - len(row)), value=0))
    positions = torch.stack(rows)
    inner = data.draw(st.sampled_from([hf.causal_mask_function, hf.sliding_window_causal_mask_function(3)]))
    size = {"batch_size": len(rows), "q_length": 24, "kv_length": 24}
    function = packed_function(positions, inner)

    mask = make_mask(**size, mask_function=function)
    expected = hf.sdpa_mask(**size, mask_function=function, **NO_SKIP)

    assert isinstance(mask, CarriedMask)
    assert torch.equal(mask.dense(), expected)
    assert torch.equal(materialized(mask, size), expected)


@pytest.mark.parametrize(
    ("size", "function", "padding", "mask", "keys"),
    [
        ((1, 4, 4, 0, 0), hf.causal_mask_function, None, "Causal()", (0, 4)),
        ((1, 2, 6, 4, 0), hf.causal_mask_function, None, "Causal(alignment='bottom_right')", (0, 6)),
        ((1, 4, 9, 0, 0), hf.causal_mask_function, None, "Causal()", (0, 4)),
        ((1, 4, 9, 2, 0), hf.causal_mask_function, None, "Causal(alignment='bottom_right')", (0, 6)),
        (
            (1, 2, 5, 7, 4),
            hf.sliding_window_causal_mask_function(3),
            None,
            "Window(2, 0, alignment='bottom_right')",
            (1, 5),
        ),
        (
            (1, 4, 4, 0, 0),
            hf.sliding_window_bidirectional_mask_function(2),
            None,
            "Window(2, 2)",
            (0, 4),
        ),
        ((1, 4, 6, 2, 0), hf.causal_mask_function, [True] * 6, "Causal(alignment='bottom_right')", (0, 6)),
        ((1, 4, 9, 0, 0), hf.causal_mask_function, [True] * 4, "Causal()", (0, 4)),
    ],
)
def test_expected_objects(size, function, padding, mask, keys):
    padding = None if padding is None else torch.tensor([padding])
    pattern = make_mask(*size, mask_function=function, attention_mask=padding).pattern
    assert (repr(pattern.mask), pattern.keys) == (mask, keys)


@pytest.mark.parametrize(
    ("padding", "form", "value"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 1]], "left", [2, 0]),
        ([[1, 1, 1, 0], [1, 1, 1, 1]], "lengths", [3, 4]),
        # Either would do; with the left one the diagonal stays where it is.
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "left", [4, 0]),
        ([[0, 1, 1, 1], [1, 1, 1, 0]], "keep", [[0, 1, 1, 1], [1, 1, 1, 0]]),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "keep", [[1, 0, 1, 1], [1, 1, 1, 1]]),
    ],
)
def test_padding_is_a_node(padding, form, value):
    padding = torch.tensor(padding, dtype=torch.bool)
    causal, node = make_mask(2, 4, 4, attention_mask=padding).pattern.mask.nodes
    assert isinstance(causal, Causal)
    assert isinstance(node, KeyPadding)
    given = {name: getattr(node, name) for name in ("left", "lengths", "keep")}
    assert {name: tensor.int().tolist() for name, tensor in given.items() if tensor is not None} == {
        form: value
    }


@given(data=st.data())
def test_blocks_of_padded_masks_say_what_blocks_of_dense_masks_say(data):
    """Where keys are missing is known for the keys that some query may attend, and for no others."""
    size = data.draw(sizes())
    function = FUNCTIONS[data.draw(st.sampled_from(sorted(FUNCTIONS)))](data.draw(st.integers(1, 9)))
    mask = make_mask(**size, mask_function=function, attention_mask=data.draw(paddings(size)))
    start, first = data.draw(st.integers(0, size["q_length"] - 1)), data.draw(st.integers(0, 2))
    block, expected = (m[:, :, start:, first:] for m in (mask, mask.dense()))
    if not isinstance(block, CarriedMask):
        assert first >= size["kv_length"]
        return
    assert torch.equal(block.pattern.dense(None), expected)
    lengths = {"q_length": block.shape[2], "kv_length": block.shape[3], "batch_size": block.shape[0]}
    for pattern in (block.pattern, block.pattern.with_window(data.draw(st.integers(1, 6)))):
        if pattern.mask is not None:
            carried = CarriedMask.carry(pattern, "cpu")
            assert torch.equal(materialized(carried, lengths), pattern.dense(None))


@pytest.mark.parametrize("rows", [1, 2])
def test_documents_are_a_node(rows):
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]]).expand(rows, -1)
    _, documents = make_mask(rows, 6, 6, mask_function=packed_function(positions)).pattern.mask.nodes
    assert isinstance(documents, Documents)
    if rows == 1:
        assert documents.cu_seqlens.tolist() == [0, 2, 5, 6]
    else:
        assert documents.ids.tolist() == [[0, 0, 1, 1, 1, 2]] * 2


def test_one_document_is_no_document():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids))
    assert make_mask(1, 4, 4, mask_function=function).pattern.mask == Causal()


def same_as_causal(batch, head, query, key):
    return key <= query


BLOCKS = torch.tensor([[-1, 0, 0, -1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 3]])
JUMP = torch.tensor([[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    "function",
    [
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(BLOCKS)),
        hf.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64)),
        hf.and_masks(hf.causal_mask_function, same_as_causal),
        same_as_causal,
        hf.add_offsets_to_mask_function(hf.causal_mask_function, 1, 0),
        # Positions that restart inside a document: a band in positions is none in places.
        hf.and_masks(
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS),
            hf.packed_sequence_mask_function(JUMP),
        ),
        # Positions without documents.
        hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS),
        hf.sliding_window_causal_mask_function(torch.tensor(2)),
    ],
    ids=[
        "blocks",
        "chunks",
        "unknown part",
        "lookalike",
        "offsets",
        "restart",
        "no documents",
        "tensor window",
    ],
)
def test_what_is_not_known_for_certain_stays_dense(function):
    size = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    mask = make_mask(**size, mask_function=function, allow_is_causal_skip=True)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, hf.sdpa_mask(**size, mask_function=function, **NO_SKIP))


def test_documents_that_come_again_are_read_by_ids():
    ids = torch.tensor([[0, 0, 1, 0, 1, 1]])
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids))
    mask = make_mask(1, 6, 6, mask_function=function)
    assert mask.pattern.cu_seqlens is None
    assert torch.equal(mask.dense(), hf.sdpa_mask(1, 6, 6, mask_function=function, **NO_SKIP))


def test_single_tokens_of_a_static_cache_stay_dense():
    mask = make_mask(1, 1, 8, torch.tensor(3))
    assert type(mask) is torch.Tensor
    assert mask.tolist() == [[[[True] * 4 + [False] * 4]]]


@pytest.mark.parametrize("function", [hf.causal_mask_function, hf.sliding_window_causal_mask_function(3)])
def test_steps_that_may_be_compiled_get_masks_of_one_form(function):
    """transformers forbids to leave out the mask of a single query where the cache may be compiled."""
    for offset in (3, torch.tensor(3)):
        mask = make_mask(1, 1, 8, offset, mask_function=function, allow_is_causal_skip=False)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, hf.sdpa_mask(1, 1, 8, 3, mask_function=function, **NO_SKIP))
    assert isinstance(make_mask(1, 1, 8, 3, mask_function=function), CarriedMask)


@pytest.mark.parametrize("function", [hf.causal_mask_function, hf.bidirectional_mask_function])
def test_padding_that_cannot_be_read_stays_a_tensor(function):
    """Shapes of a model on the meta device, and samples that torch.vmap maps over."""
    options = {"mask_function": function, "allow_is_bidirectional_skip": True}
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, :2] = False
    meta = make_mask(2, 6, 6, attention_mask=keep.to("meta"), device="meta", **options)
    assert (type(meta), meta.device.type, meta.shape) == (torch.Tensor, "meta", (2, 1, 6, 6))
    mapped = torch.vmap(lambda row: make_mask(1, 6, 6, attention_mask=row[None], **options))(keep)
    assert torch.equal(
        mapped[:, 0], hf.sdpa_mask(2, 6, 6, 0, mask_function=function, attention_mask=keep, **NO_SKIP)
    )


def packed_rows(rows):
    """Return the causal mask of packed documents with these ids."""
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(rows))
    return make_mask(len(rows), 6, 6, mask_function=function, device=rows.device)


def test_documents_that_cannot_be_read_stay_a_tensor():
    ids = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]])
    with FakeTensorMode() as mode:
        fake = packed_rows(mode.from_tensor(ids))
    for mask, device in ((fake, "cpu"), (packed_rows(ids.to("meta")), "meta")):
        assert not isinstance(mask, CarriedMask)
        assert (mask.device.type, mask.shape) == (device, (2, 1, 6, 6))
    mapped = torch.vmap(lambda row: packed_rows(row[None]))(ids)
    assert torch.equal(mapped[:, 0], packed_rows(ids).dense())


def sums(_):
    return torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"attention_mask": torch.ones_like},
        {"position_ids": torch.zeros_like},
        {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums},
    ],
    ids=["tokens", "padding", "positions", "sums"],
)
def test_a_model_of_fake_tensors_runs(inputs):
    kind, config, extra = MODELS["gemma3"]
    with FakeTensorMode(), torch.no_grad():
        settings = getattr(transformers, config)(**{**TINY, **extra})
        model = getattr(transformers, f"{kind}ForCausalLM")(settings)
        model.set_attn_implementation("attnroute")
        tokens = torch.zeros(1, 9, dtype=torch.int64)
        logits = model(
            tokens, use_cache=False, **{name: make(tokens) for name, make in inputs.items()}
        ).logits
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (1, 9, 48)


def test_none_only_for_nothing_masked():
    bidirectional = {"mask_function": hf.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    full, padded = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[True] * 4, [True, True, False, False]])
    assert make_mask(2, 4, 4, attention_mask=full, **bidirectional) is None
    assert torch.equal(make_mask(2, 4, 4, attention_mask=padded, **bidirectional).dense()[:, 0, 0], padded)
    assert make_mask(2, 1, 4, q_offset=3, allow_is_causal_skip=True) is not None
