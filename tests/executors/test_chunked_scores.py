"""`chunked` with score functions: values and gradients, those of the tensors that the function reads too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_compare import TOLERANCE, Drawn, chunked_attention, compare
from support.chunked_reference import error
from support.chunked_strategies import CHANCE, features, programs
from support.chunked_tiling import Largest, tiling
from torch.utils.checkpoint import checkpoint

from attnroute.errors import AttnRouteError
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.executors.chunked.run import run
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, LoweredMask, MaskFunction

CAUSAL = LoweredMask(band_hi=0)
LENGTH = st.sampled_from([1, 2, 5, 17, 33])
SIZES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), LENGTH, LENGTH)


def relative(table):
    """A learned bias for each head and distance, as T5 has it."""
    return lambda score, _b, h, i, j: score + table[h, (i - j) % table.shape[1]]


def squared(gain):
    return lambda score, _b, h, _i, _j: score.square() * gain[h]


def curved(gain, shift):
    return lambda score, b, h, _i, j: torch.tanh(score * gain[h]) + shift[b, j]


def by_distance(slopes):
    return lambda score, _b, h, i, j: score - slopes[h] * (i - j).abs()


def position_only(table):
    return lambda _score, b, _h, i, j: table[b, i] * table[b, 0] + 0.1 * j


def some_of_all(temperature):
    return lambda score, b, _h, i, j: torch.where((i + 2 * j + b) % 4 == 0, -math.inf, score * temperature)


def nothing_learned():
    return lambda score, _b, _h, i, j: score + (i - j).abs() / 8


def unread(table):
    del table
    return lambda score, _b, _h, _i, _j: score * 2


@st.composite
def scores(draw, sizes, drawn):
    """Draw a score function as a pair: what makes it, and the tensors that it reads."""
    batch, heads, seqlen_q, seqlen_kv = sizes
    make, *shapes = draw(
        st.sampled_from(
            [
                (relative, (heads, 7)),
                (squared, (heads,)),
                (curved, (heads,), (batch, seqlen_kv)),
                (by_distance, (heads,)),
                (position_only, (batch, seqlen_q)),
                (some_of_all, ()),
                (nothing_learned,),
            ]
        )
    )
    return make, tuple(drawn.normal(*shape).requires_grad_(draw(st.booleans())) for shape in shapes)


@given(data=st.data(), sizes=SIZES, dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_scores_against_float64(data, sizes, dtype, seed):
    drawn = Drawn(seed, dtype)
    mask = data.draw(programs(sizes, drawn.generator, 1)) if data.draw(CHANCE) else CAUSAL
    heads_kv = data.draw(st.sampled_from([n for n in (1, 2, 4) if sizes[1] % n == 0]))
    chosen = data.draw(features(dtype, *sizes, drawn.generator))
    with tiling(data.draw(st.sampled_from([400, 2**24])), data.draw(st.sampled_from([4, 8]))):
        tensors = drawn.tensors(sizes, heads_kv=heads_kv)
        score, block_q = data.draw(scores(sizes, drawn)), data.draw(st.sampled_from([None, 16]))
        compare(drawn, tensors, mask, chosen, score=score, block_q=block_q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_tables_are_summed_in_float32(dtype):
    """A table of few entries gets thousands of terms each, which half precision would swallow."""
    drawn = Drawn(0, dtype)
    tensors = drawn.tensors((2, 2, 150, 150))
    table = drawn.normal(2, 2).requires_grad_()
    with tiling(2**24, 64):
        compare(drawn, tensors, CAUSAL, score=(relative, (table,)))


def test_gradcheck():
    drawn = Drawn(1, torch.float64)
    table, gain = (drawn.normal(*shape).requires_grad_() for shape in ((4, 7), (4,)))

    def attend(query, key, value, table, gain):
        def score_mod(score, _b, h, i, j):
            return torch.tanh(score * gain[h]) + table[h, (i - j) % 7] * score

        return chunked_attention(
            query, key, value, LoweredMask(band_hi=2), score_mod=score_mod, softcap=2.0, block_q=2
        )[0]

    with tiling(16, 4):
        tensors = drawn.tensors((1, 4, 3, 5), 2, 1, heads_kv=2)
        assert torch.autograd.gradcheck(attend, (*tensors, table, gain))


class Bucketed(torch.nn.Module):
    """A score function that is a method and reads its tables through the module."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 10).view(2, 5))
        self.mix = torch.nn.Linear(1, 1)

    def forward(self, score, _b, h, i, j):
        bucket = (i - j).abs().clamp(max=4)
        return self.mix(score[None])[0] + self.table[h, bucket]


def test_tensors_of_a_module_are_found_and_get_gradients():
    drawn, module = Drawn(2, torch.float32), Bucketed()
    tensors = drawn.tensors((2, 2, 19, 23))
    with tiling(200, 8):
        out, lse = chunked_attention(*tensors, CAUSAL, score_mod=module, block_q=8)
        got = torch.autograd.grad(out.sum() + lse.sum(), [*tensors, *module.parameters()])
    query, key, value = tensors
    i, j = torch.arange(19)[:, None], torch.arange(23)
    raw = query @ key.mT / 8**0.5
    raw = module.mix(raw[..., None])[..., 0] + module.table[:, (i - j).abs().clamp(max=4)]
    raw = raw.masked_fill(j > i, -math.inf)
    want = raw.softmax(-1) @ value
    wanted = torch.autograd.grad(want.sum() + raw.logsumexp(-1).sum(), [*tensors, *module.parameters()])
    assert error(out, want) < 1e-5
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 1e-5 or float((one - other).norm()) < 1e-4


def test_only_the_table_is_trained():
    drawn = Drawn(3, torch.float32)
    tensors = [t.detach() for t in drawn.tensors((1, 2, 12, 12))]
    table = drawn.normal(2, 7).requires_grad_()
    out, _ = chunked_attention(*tensors, FULL, score_mod=relative(table))
    assert out.requires_grad
    (grad,) = torch.autograd.grad(out.square().sum(), table)
    assert grad.norm() > 0


def test_a_table_that_the_function_does_not_read_stays_out():
    drawn = Drawn(4, torch.float32)
    table = drawn.normal(2, 7).requires_grad_()
    out, _ = chunked_attention(*drawn.tensors((1, 2, 12, 12)), FULL, score_mod=unread(table))
    assert torch.autograd.grad(out.sum(), table, allow_unused=True) == (None,)


def test_gradients_flow_on_into_what_made_the_table():
    drawn = Drawn(5, torch.float32)
    tensors, weight = drawn.tensors((1, 2, 12, 12)), drawn.normal(2, 7).requires_grad_()
    results = []
    for table in (weight.exp(), weight.exp().detach().requires_grad_()):
        out, _ = chunked_attention(*tensors, FULL, score_mod=relative(table))
        results.append(torch.autograd.grad(out.square().sum(), weight if table.grad_fn else table)[0])
    assert error(results[0], results[1] * weight.exp()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_very_negative_scores_keep_their_precision(dtype):
    drawn = Drawn(6, dtype)
    tensors = drawn.tensors((1, 2, 20, 20))
    results = []
    for shift in (0.0, -1e4):
        out, lse = chunked_attention(
            *tensors, CAUSAL, score_mod=lambda score, *_, shift=shift: score + shift, block_q=8
        )
        grads = torch.autograd.grad(out.float().square().sum(), tensors)
        results.append((out, *grads, lse - shift))
    for got, want in zip(*results[::-1], strict=True):
        assert error(got, want) < 5e-3


def test_slopes_behind_a_mask_do_not_matter():
    """A function may be undefined where a mask says no; its NaN must reach neither output nor gradient."""
    tensors = Drawn(7, torch.float32).tensors((1, 2, 20, 20))

    def score_mod(score, _b, _h, i, j):
        return score * torch.sqrt((i - j).to(score.dtype))

    programmed = LoweredMask(functions=(MaskFunction(lambda _b, _h, i, j: j <= i),))
    results = []
    for mask in (CAUSAL, programmed):
        out, lse = chunked_attention(*tensors, mask, score_mod=score_mod, block_q=8)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), tensors)))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        assert error(one, other) < 1e-6


def test_rows_that_a_function_leaves_nothing_give_zeros():
    tensors = Drawn(8, torch.float32).tensors((1, 2, 20, 20))
    out, lse = chunked_attention(
        *tensors, FULL, score_mod=lambda score, _b, _h, i, _j: torch.where(i < 5, -math.inf, score)
    )
    grads = torch.autograd.grad(out.sum() + lse[:, :, 5:].sum(), tensors)
    assert not out[:, :, :5].any()
    assert (lse[:, :, :5] == -math.inf).all()
    assert out[:, :, 5:].all()
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_heads_are_query_heads():
    """A score function sees the number of the query head, not of the key head that several share."""
    tensors = Drawn(9, torch.float32).tensors((1, 6, 5, 4), heads_kv=2)
    with tiling(20, 1):
        _, lse = chunked_attention(*tensors, FULL, score_mod=lambda _s, _b, h, _i, _j: h * 1.0)
    want = torch.arange(6.0)[:, None] + math.log(4)
    assert error(lse, want.expand(1, 6, 5)) < 1e-6


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_activation_checkpointing(use_reentrant):
    drawn = Drawn(10, torch.float32)
    tensors, table = drawn.tensors((1, 2, 20, 20)), drawn.normal(2, 7).requires_grad_()

    def attend(query, key, value):
        return chunked_attention(query, key, value, CAUSAL, score_mod=relative(table), block_q=8)[0]

    results = []
    for out in (attend(*tensors), checkpoint(attend, *tensors, use_reentrant=use_reentrant)):
        table.grad = None
        for tensor in tensors:
            tensor.grad = None
        out.square().sum().backward()
        results.append([table.grad, *(t.grad for t in tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_changes_of_a_table_before_backward_are_noticed():
    drawn = Drawn(11, torch.float32)
    for wants_grad in (True, False):
        table = drawn.normal(2, 7).requires_grad_(wants_grad)
        out, _ = chunked_attention(*drawn.tensors((1, 2, 9, 9)), FULL, score_mod=relative(table))
        with torch.no_grad():
            table.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_without_gradients_nothing_is_recorded():
    drawn = Drawn(12, torch.float32)
    tensors, table = drawn.tensors((1, 2, 9, 9)), drawn.normal(2, 7).requires_grad_()
    want = chunked_attention(*tensors, FULL, score_mod=relative(table))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = chunked_attention(*tensors, FULL, score_mod=relative(table))
        assert all(t.grad_fn is None and not t.requires_grad for t in got)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_second_derivative_is_refused():
    drawn = Drawn(13, torch.float32)
    table = drawn.normal(2, 7).requires_grad_()
    out, _ = chunked_attention(*drawn.tensors((1, 2, 9, 9)), FULL, score_mod=relative(table))
    (grad,) = torch.autograd.grad(out.square().sum(), table, create_graph=True)
    with pytest.raises(AttnRouteError, match="backend='math'"):
        grad.sum().backward()


@pytest.mark.parametrize("length", [256, 1024])
def test_memory_does_not_grow_with_the_square_of_the_length(length):
    budget = 2**14
    drawn = Drawn(14, torch.float32)
    tensors, table = drawn.tensors((1, 4, length, length), heads_kv=2), drawn.normal(4, 7).requires_grad_()
    with tiling(budget, chunked_plan.KEY_ALIGN), Largest() as largest:
        out, lse = chunked_attention(*tensors, CAUSAL, score_mod=relative(table), softcap=5.0, block_q=32)
        (out.sum() + lse.sum()).backward()
    assert largest.elements <= max(budget, *(t.numel() for t in tensors))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_empty_sizes(sizes):
    drawn = Drawn(15, torch.float32)
    tensors, table = drawn.tensors(sizes), drawn.normal(2, 7).requires_grad_()
    out, lse = chunked_attention(*tensors, FULL, score_mod=relative(table))
    assert out.shape == tensors[0].shape
    assert (lse == -math.inf).all()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


def test_the_executor_passes_the_function_on():
    tensors = Drawn(16, torch.float32).tensors((1, 2, 9, 9))
    plan = Plan(backend="chunked", repairs=(), training=True, return_lse=True, device_type="cpu")
    got = run(Inputs(*tensors, score_mod=squared(torch.tensor([0.5, -1.0]))), plan)
    want = chunked_attention(*tensors, FULL, score_mod=squared(torch.tensor([0.5, -1.0])))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert error(got[0], chunked_attention(*tensors, FULL)[0]) > 0.01
