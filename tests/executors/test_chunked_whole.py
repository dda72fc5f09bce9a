"""`chunked` on small calls of the CPU: one tile, weights that stay, the numbers of dense attention."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.chunked_compare import TOLERANCE, Drawn, chunked_attention, compare
from support.chunked_reference import error, reference, wide
from support.chunked_tiling import Largest

from attnroute.executors.chunked import autograd
from attnroute.executors.chunked.whole import SKIPPING, WHOLE
from attnroute.masks.lowered.form import FULL, LoweredMask

SIZES = (2, 6, 70, 90)
CAUSAL = LoweredMask(band_hi=0)
EMPTY_ROWS = LoweredMask(band_hi=-5)
PADDED = LoweredMask(key_keep=torch.arange(90) < torch.tensor([[90], [31]]))


@pytest.fixture
def blocks():
    """Count the calls that walk blocks, in either direction."""
    walk = (autograd.run_forward, autograd.run_backward)
    with (
        mock.patch.object(autograd, "run_forward", side_effect=walk[0]) as forward,
        mock.patch.object(autograd, "run_backward", side_effect=walk[1]) as backward,
    ):
        yield lambda: forward.call_count + backward.call_count


def features(drawn, names):
    made = {
        "bias": drawn.normal(1, 6, 70, 90),
        "row_bias": drawn.normal(2, 1, 1, 90),
        "sink": drawn.normal(6),
        "alibi_slopes": drawn.normal(6).abs(),
    }
    chosen = {name.removeprefix("row_"): made[name].requires_grad_() for name in names if name in made}
    return chosen | ({"softcap": 1.5} if "softcap" in names else {})


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "mask", [FULL, CAUSAL, EMPTY_ROWS, PADDED], ids=["full", "causal", "empty", "padded"]
)
@pytest.mark.parametrize(
    "names", [(), ("bias",), ("row_bias", "softcap"), ("sink", "bias", "softcap"), ("sink", "row_bias")]
)
def test_output_lse_and_every_gradient(blocks, dtype, mask, names):
    drawn = Drawn(3, dtype)
    compare(drawn, drawn.tensors(SIZES, 16, 12, heads_kv=2), mask, features(drawn, names))
    assert blocks() == 0


@pytest.mark.parametrize("mask", [FULL, EMPTY_ROWS], ids=["full", "empty"])
def test_slopes_get_their_gradient(blocks, mask):
    drawn = Drawn(4, torch.float32)
    compare(drawn, drawn.tensors(SIZES, 16, 12, heads_kv=2), mask, features(drawn, ("alibi_slopes", "bias")))
    assert blocks() == 0


@pytest.mark.parametrize("names", [(), ("bias", "softcap"), ("sink", "alibi_slopes")])
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_is_dense_attention_under_its_drop_mask(blocks, names, dropout_p):
    drawn = Drawn(5, torch.float64)
    query, key, value = drawn.tensors(SIZES, 16, 90, heads_kv=2)
    chosen = features(drawn, names)

    def attend(value):
        torch.manual_seed(5)
        return chunked_attention(query, key, value, EMPTY_ROWS, dropout_p=dropout_p, **chosen)

    # The output for an identity value is the probabilities after dropout.
    keep = attend(torch.eye(90, dtype=torch.float64).expand(2, 2, 90, 90))[0].detach() != 0
    result = attend(value)
    leaves = [query, key, value, *(t for t in chosen.values() if torch.is_tensor(t))]
    into = [drawn.normal(*result[0].shape), drawn.normal(*result[1].shape).float()]
    got = torch.autograd.grad(result, leaves, into)
    wides = {id(leaf): wide(leaf) for leaf in leaves}
    others = {name: wides.get(id(t), t) for name, t in chosen.items()}
    kept = max(1.0 - dropout_p, 1e-9)
    want = reference(
        *(wides[id(t)] for t in (query, key, value)), EMPTY_ROWS, keep=keep, dropout_p=1.0 - kept, **others
    )
    wanted = torch.autograd.grad(want, list(wides.values()), [into[0], into[1].double()])
    assert blocks() == 0
    assert 0.0 <= keep[:, :, 60:, :50].double().mean() < 1.0
    assert error(result[0], want[0]) < 1e-12
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-6


def test_the_backward_makes_no_scores_again():
    drawn = Drawn(6, torch.float32)
    tensors = drawn.tensors(SIZES)
    seen = []
    for block_q in (None, 16):
        out, _ = chunked_attention(*tensors, FULL, block_q=block_q)
        with torch.profiler.profile() as profile:
            torch.autograd.grad(out.sum(), tensors)
        seen.append([e.count for e in profile.key_averages() if e.key == "aten::baddbmm"])
    # Gradients of the weights, queries, keys and values; the scores too where blocks are walked, in five.
    assert seen == [[4], [5 * 5]]


@pytest.mark.parametrize(
    ("mask", "length", "walks"),
    [
        (FULL, 1024, 0),
        (FULL, 1100, 2),
        (CAUSAL, 512, 0),
        (CAUSAL, 550, 2),
        (LoweredMask(band_lo=-9, band_hi=0), 550, 2),
        (LoweredMask(document_bounds=(0, 300, 550)), 550, 2),
    ],
)
def test_larger_calls_walk_blocks(blocks, mask, length, walks):
    tensors = Drawn(7, torch.float32).tensors((1, 2, length, length))
    with Largest() as largest:
        out, _ = chunked_attention(*tensors, mask)
        out.sum().backward()
    assert blocks() == walks
    assert largest.elements <= (2 * length * length if walks == 0 else max(WHOLE, SKIPPING) // 2)


@pytest.mark.parametrize("kind", ["bias", "sink", "key", "key_keep"])
def test_changes_before_backward_are_noticed(kind):
    drawn = Drawn(8, torch.float32)
    tensors = drawn.tensors(SIZES, heads_kv=2)
    chosen = features(drawn, ("bias", "sink"))
    keep = torch.ones(1, 90, dtype=torch.bool)
    out, _ = chunked_attention(*tensors, LoweredMask(key_keep=keep), **chosen)
    changed = {"bias": chosen["bias"], "sink": chosen["sink"], "key": tensors[1], "key_keep": keep}[kind]
    with torch.no_grad():
        changed[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("names", [(), ("bias", "sink")])
def test_a_batch_of_gradients_is_each_by_itself(names):
    drawn = Drawn(9, torch.float64)
    tensors = drawn.tensors(SIZES, heads_kv=2)
    chosen = features(drawn, names)
    out, _ = chunked_attention(*tensors, PADDED, dropout_p=0.2, **chosen)
    leaves, many = [*tensors, *chosen.values()], drawn.normal(3, *out.shape)
    got = torch.autograd.grad(out, leaves, many, retain_graph=True, is_grads_batched=True)
    for number, one in enumerate(many):
        want = torch.autograd.grad(out, leaves, one, retain_graph=True)
        assert all(torch.equal(a[number], b) for a, b in zip(got, want, strict=True))
