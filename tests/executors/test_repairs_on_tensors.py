"""Preparations on tensors: each is what its definition and the engine's data say, and changes no result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.repair_inputs import FORMS, executor_of, inputs_of, lowered, plan, reference, stored

from attnroute import masks
from attnroute.api.question import strides_of
from attnroute.engine import repairs
from attnroute.executors.prepare import apply as preparing
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Executor
from attnroute.masks.layout import is_aligned
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.question.call import Call, Strides
from attnroute.question.nodes import DenseBias, DenseNode


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    reference.seen = []


def allowed_by(mask, inputs):
    batch, heads, seqlen_q, _ = inputs.query.shape
    return mask.materialize(seqlen_q, inputs.key.shape[2], batch=batch, num_heads_q=heads)


@given(
    FORMS,
    FORMS,
    st.sampled_from([(8, 8), (5, 5), (8, 12), (1, 24), (20, 8)]),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_the_kernel_gets_what_the_repaired_call_says(form, form_kv, head_dims, heads_kv, data):
    """The engine decides on data; where that says contiguous, padded or expanded, the tensors must be."""
    reference.seen = []
    inputs = inputs_of(heads_kv=heads_kv, head_dims=head_dims)
    inputs.query = stored(inputs.query, "packed" if form == "expanded" else form)
    inputs.key, inputs.value = stored(inputs.key, form_kv), stored(inputs.value, form_kv)
    want, want_lse = attend(inputs.query, inputs.key, inputs.value)
    call = Call(
        dtype="float32",
        batch=2,
        num_heads_q=4,
        num_heads_kv=heads_kv,
        seqlen_q=5,
        seqlen_kv=7,
        head_dim_qk=head_dims[0],
        head_dim_v=head_dims[1],
        strides=_laid_out(inputs),
    )
    made = []
    for repair in data.draw(
        st.permutations(["expand_kv", "pad_head_dim", "contiguous"]).map(lambda p: p[:2])
    ):
        change = repairs.apply(repair, call)
        if change is not None:
            made.append(repair)
            call = change[0]
    assume(made)
    made.sort(key=repairs.ORDER.index)
    out, lse = run_repaired(Executor(reference), inputs, plan(*made))
    assert error(out, want) <= TOLERANCE[torch.float64]
    assert torch.allclose(lse, want_lse)
    (seen,) = reference.seen
    sizes = (seen.key.shape[1], seen.query.shape[-1], seen.value.shape[-1])
    assert sizes == (call.num_heads_kv, call.head_dim_qk, call.head_dim_v)
    promised, kept = call.strides, _laid_out(seen)
    assert kept.last_dim_contiguous or not promised.last_dim_contiguous
    assert kept.aligned_16 or not promised.aligned_16
    assert promised.kv_heads_expanded or not kept.kv_heads_expanded


def _laid_out(inputs):
    """Say of query, key and value what a call says of its arguments."""

    class Arguments:
        query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.mask
        transform = None

    strides = strides_of(Arguments)
    assert isinstance(strides, Strides)
    return strides


@given(FORMS, st.sampled_from([1, 2]), st.sampled_from([(8, 8), (5, 8)]), st.booleans())
def test_sequences_made_contiguous_have_their_tokens_outermost(form, batch, head_dims, expands):
    """Tokens of a ragged batch lie one behind the other; heads outermost are contiguous in another way."""
    reference.seen = []
    inputs = inputs_of(batch=batch, head_dims=head_dims)
    inputs.query, inputs.key, inputs.value = (
        stored(t, form) for t in (inputs.query, inputs.key, inputs.value)
    )
    want, _ = attend(inputs.query, inputs.key, inputs.value)
    made = ("to_varlen", "expand_kv", "pad_head_dim", "contiguous")
    out, _ = run_repaired(Executor(reference), inputs, plan(*(made if expands else (made[0], *made[2:]))))
    torch.testing.assert_close(out, want)
    (seen,) = reference.seen
    for tensor in (seen.query, seen.key, seen.value):
        assert tensor.transpose(1, 2).is_contiguous()
        assert tensor.data_ptr() % 16 == 0


def test_padding_keeps_the_scale_of_the_head_that_was_given():
    inputs = inputs_of(head_dims=(5, 3))
    want, _ = attend(inputs.query, inputs.key, inputs.value)
    out, _ = run_repaired(Executor(reference), inputs, plan("pad_head_dim"))
    assert out.shape == want.shape
    assert error(out, want) <= TOLERANCE[torch.float64]
    (seen,) = reference.seen
    assert seen.scale == 5**-0.5
    assert (seen.query.shape[-1], seen.value.shape[-1]) == (8, 8)
    assert not seen.query[..., 5:].any()
    assert not seen.value[..., 3:].any()


def test_padding_keeps_a_scale_that_was_given():
    inputs = inputs_of(head_dims=(5, 5), scale=-2.0)
    run_repaired(Executor(reference), inputs, plan("pad_head_dim"))
    assert reference.seen[0].scale == -2.0


def test_expanded_heads_are_a_real_copy():
    one = torch.randn(2, 1, 7, 8)
    for heads_kv in (1, 2, 4):
        inputs = inputs_of(heads_kv=heads_kv)
        inputs.key = inputs.value = one.expand(-1, heads_kv, -1, -1)
        run_repaired(Executor(reference), inputs, plan("expand_kv"))
        seen = reference.seen[-1]
        assert seen.key.shape[1] == 4
        assert seen.key.is_contiguous()
        assert torch.equal(seen.key, one.expand(-1, 4, -1, -1))


def test_what_lies_well_is_not_copied():
    inputs = inputs_of()
    key, value = inputs.key, inputs.value
    inputs.query = stored(inputs.query, "last stride")
    run_repaired(Executor(reference), inputs, plan("contiguous"))
    (seen,) = reference.seen
    assert seen.query.is_contiguous()
    assert (seen.key is key, seen.value is value) == (True, True)


def test_without_repairs_the_kernel_gets_what_was_given():
    inputs = inputs_of()
    given_tensors = (inputs.query, inputs.key, inputs.value)
    dense, bias = torch.rand(5, 7) < 0.5, torch.randn(5, 7)
    for mask, extra, attn in ((None, None, None), (dense, None, dense), (None, bias, bias)):
        part = replace(inputs, mask=FULL if mask is None else replace(FULL, dense=mask), bias=extra)
        run_repaired(Executor(reference), part, plan())
        seen = reference.seen[-1]
        assert seen.attn is attn
        assert all(a is b for a, b in zip((seen.query, seen.key, seen.value), given_tensors, strict=True))


# Masks and biases.

MASKS = {
    "causal": masks.Causal("bottom_right"),
    "window": masks.Window(1, 2),
    "padding": masks.KeyPadding(lengths=[7, 3]),
    "left padding": masks.KeyPadding(left=torch.tensor([2, 0])),
    "dense": masks.Dense(torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.6),
    "dense row": masks.Dense(torch.tensor([True, False, True, True, False, True, True])),
    "empty row": masks.Dense(torch.ones(5, 7, dtype=torch.bool).tril(-2)),
    "both": masks.Causal("bottom_right") & masks.KeyPadding(lengths=[4, 7]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bias", [None, (5, 7), (2, 1, 1, 7), (1, 4, 5, 1)], ids=str)
@pytest.mark.parametrize(
    "made",
    [("materialize_mask",), ("materialize_mask", "cast_mask"), ("cast_mask", "align_bias")],
    ids="+".join,
)
def test_a_mask_said_as_a_tensor_means_the_same(made, bias, mask):
    inputs = inputs_of()
    inputs.mask = lowered(mask, inputs)
    inputs.bias = None if bias is None else torch.randn(bias)
    want, want_lse = attend(
        inputs.query, inputs.key, inputs.value, allowed=allowed_by(mask, inputs), bias=inputs.bias
    )
    out, lse = run_repaired(Executor(reference), inputs, plan(*made))
    assert error(out, want) <= TOLERANCE[torch.float64]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    (seen,) = reference.seen
    additive = bias is not None or made != ("materialize_mask",)
    assert seen.attn.dtype == (torch.float32 if additive else torch.bool)
    assert not additive or (is_aligned(seen.attn) and seen.attn.stride(-1) == 1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bias", [None, (5, 7), (2, 1, 1, 7)], ids=str)
def test_a_tensor_has_the_shape_that_the_engine_reckons_with(bias, mask):
    inputs = inputs_of()
    inputs.mask, inputs.bias = lowered(mask, inputs), None if bias is None else torch.randn(bias)
    call = Call(
        dtype="float32",
        batch=2,
        num_heads_q=4,
        num_heads_kv=2,
        seqlen_q=5,
        seqlen_kv=7,
        head_dim_qk=8,
        head_dim_v=8,
        mask=mask.describe(Extent(2, 4, 5, 7)),
        bias=None if bias is None else DenseBias(dtype="float32", shape=bias),
    )
    made = []
    for repair in ("materialize_mask", "cast_mask"):
        change = repairs.apply(repair, call)
        if change is not None:
            made.append(repair)
            call = change[0]
    run_repaired(Executor(reference), inputs, plan(*made))
    assert not any(isinstance(node, DenseNode) for node in call.mask)
    got, promised = tuple(reference.seen[0].attn.shape), call.bias.shape
    assert got == (1,) * (len(got) - len(promised)) + promised


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_bias_is_cast_to_the_dtype_of_the_query(dtype):
    inputs = inputs_of()
    inputs.bias = torch.randn(5, 7).to(dtype)
    want, _ = attend(inputs.query, inputs.key, inputs.value, bias=inputs.bias)
    out, _ = run_repaired(Executor(reference), inputs, plan("cast_bias"))
    assert reference.seen[0].attn.dtype == torch.float32
    assert error(out, want) <= 1e-6


@pytest.mark.parametrize("mask", [None, MASKS["dense"], MASKS["causal"]], ids=["plain", "dense", "causal"])
def test_a_bias_that_is_cast_and_masked_keeps_its_gradient(mask):
    inputs = inputs_of()
    bias = torch.randn(4, 5, 7)[None].requires_grad_()
    inputs.bias = bias
    allowed = None
    if mask is not None:
        inputs.mask, allowed = lowered(mask, inputs), allowed_by(mask, inputs)
    want = torch.autograd.grad(
        attend(inputs.query, inputs.key, inputs.value, allowed=allowed, bias=bias)[0].sum(), bias
    )
    out, _ = run_repaired(
        Executor(reference), inputs, plan("materialize_mask", "cast_mask", "cast_bias", "align_bias")
    )
    assert error(torch.autograd.grad(out.sum(), bias)[0], want[0], floor=1.0) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_rows_without_a_key_are_set_to_zero(kind):
    """A kernel that gives something else for them, as some do, is set right."""
    allowed = MASKS["empty row"].tensor

    def careless(inputs, plan):
        out, lse = reference(inputs, plan)
        return out.masked_fill(~allowed.any(-1)[:, None], math.nan), lse.masked_fill(
            ~allowed.any(-1), math.inf
        )

    inputs = inputs_of()
    if kind == "mask":
        inputs.mask = replace(FULL, dense=allowed)
    else:
        inputs.bias = torch.zeros(5, 7).masked_fill(~allowed, -math.inf)
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, allowed=allowed)
    out, lse = run_repaired(Executor(careless), inputs, plan("zero_empty_rows"))
    assert error(out, want) <= TOLERANCE[torch.float64]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert not (lse == math.inf).any()


# Splitting.


@st.composite
def split_problems(draw):
    batch, heads_kv, group = (
        draw(st.sampled_from([1, 4, 7])),
        draw(st.sampled_from([1, 5])),
        draw(st.sampled_from([1, 2])),
    )
    heads = heads_kv * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = [
        (5, 5),
        (1, 1, 5, 5),
        (batch, 1, 5, 5),
        (1, heads, 1, 5),
        (batch, heads, 5, 5),
        (batch, 1, 1, 5),
    ]
    kinds = {
        "none": lambda: None,
        "causal": masks.Causal,
        "dense": lambda: masks.Dense(torch.rand(draw(st.sampled_from(shapes)), generator=generator) < 0.7),
        "padding": lambda: masks.KeyPadding(
            lengths=draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
        ),
        "documents": lambda: masks.Documents(ids=torch.randint(0, 2, (batch, 5), generator=generator)),
    }
    mask = kinds[draw(st.sampled_from(sorted(kinds)))]()
    bias = draw(st.none() | st.sampled_from(shapes).map(lambda s: torch.randn(s, generator=generator)))
    return (batch, heads, heads_kv), mask, bias


@given(
    split_problems(), st.sampled_from([("split_batch",), ("split_heads",), ("split_batch", "split_heads")])
)
@settings(max_examples=150)
def test_pieces_joined_are_the_whole(problem, made):
    (batch, heads, heads_kv), mask, bias = problem
    reference.seen = []
    inputs = inputs_of(batch, heads, heads_kv, 5, 5, bias=bias)
    if mask is not None:
        inputs.mask = lowered(mask, inputs)
    allowed = None if mask is None else allowed_by(mask, inputs)
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, allowed=allowed, bias=bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "GRID_LIMIT", 3)
        out, lse = run_repaired(Executor(reference), inputs, plan("materialize_mask", "cast_mask", *made))
    assert error(out, want) <= TOLERANCE[torch.float64]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    for seen in reference.seen:
        assert seen.query.shape[0] <= 3 or "split_batch" not in made
        assert seen.query.shape[1] <= 3 or "split_heads" not in made
    assert sum(seen.query.shape[0] * seen.query.shape[1] for seen in reference.seen) == batch * heads


@pytest.mark.parametrize("made", ["split_batch", "split_heads"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_a_real_kernel_in_pieces_gives_what_it_gives_in_one(backend, made, monkeypatch):
    inputs = inputs_of(7, 6, 3)
    mask = masks.Dense(torch.rand(7, 6, 5, 7) < 0.7)
    inputs.mask = lowered(mask, inputs)
    given_tensors = [t.requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    whole, _ = run_repaired(executor_of(backend), replace(inputs), plan("cast_mask", backend=backend))
    monkeypatch.setattr(preparing, "GRID_LIMIT", 4)
    pieces, _ = run_repaired(executor_of(backend), replace(inputs), plan("cast_mask", made, backend=backend))
    assert torch.allclose(whole, pieces, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(pieces.sum(), given_tensors),
        torch.autograd.grad(whole.sum(), given_tensors),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_pieces_of_a_kernel_without_a_log_sum_exp_have_none(monkeypatch):
    monkeypatch.setattr(preparing, "GRID_LIMIT", 2)
    out, lse = run_repaired(
        Executor(lambda inputs, _: (inputs.query, None)), inputs_of(5, 2, 2), plan("split_batch")
    )
    assert (out.shape[0], lse) == (5, None)


def test_heads_of_a_group_larger_than_a_piece_stay_together(monkeypatch):
    monkeypatch.setattr(preparing, "GRID_LIMIT", 2)
    inputs = inputs_of(1, 8, 2)
    want, _ = attend(inputs.query, inputs.key, inputs.value)
    out, _ = run_repaired(Executor(reference), inputs, plan("split_heads"))
    assert error(out, want) <= TOLERANCE[torch.float64]
    assert [seen.key.shape[1] for seen in reference.seen] == [1, 1]
