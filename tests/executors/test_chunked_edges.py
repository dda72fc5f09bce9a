"""`chunked` at the edges: no keys, extreme scores, dropout, autograd's modes, memory, bad arguments."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.chunked_compare import chunked_attention
from support.chunked_reference import error, reference, wide
from support.chunked_tiling import Largest, tiling
from torch.utils.checkpoint import checkpoint

from attnroute.errors import AttnRouteError
from attnroute.executors.chunked import call as chunked_call
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.masks.lowered.form import FULL, LoweredMask

CAUSAL = LoweredMask(band_hi=0)


def inputs(batch=1, heads=2, heads_kv=1, seqlen_q=20, seqlen_kv=20, dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, seqlen_q, dim, dtype=dtype, requires_grad=True)
    key = torch.randn(batch, heads_kv, seqlen_kv, dim, dtype=dtype, requires_grad=True)
    value = torch.randn(batch, heads_kv, seqlen_kv, dim, dtype=dtype, requires_grad=True)
    return query, key, value


def grads_of(result, tensors):
    return torch.autograd.grad([t.sum() for t in result], tensors)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_kv": 0}, {"seqlen_q": 0, "seqlen_kv": 0}]
)
def test_empty_sizes(sizes):
    tensors = inputs(**sizes)
    out, lse = chunked_attention(*tensors, CAUSAL)
    assert out.shape == tensors[0].shape
    assert lse.shape == tensors[0].shape[:3]
    assert not out.any()
    assert (lse == -math.inf).all()
    for grad, tensor in zip(torch.autograd.grad(out.sum(), tensors), tensors, strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


def test_no_keys_but_a_sink():
    query, key, value = inputs(seqlen_kv=0)
    sink = torch.tensor([0.5, -2.0], requires_grad=True)
    out, lse = chunked_attention(query, key, value, FULL, sink=sink)
    assert not out.any()
    assert torch.equal(lse, sink.detach()[None, :, None].expand_as(lse))
    assert torch.equal(torch.autograd.grad(lse.sum(), sink)[0], torch.full((2,), 20.0))


@pytest.mark.parametrize("way", ["band", "key_keep", "dense", "documents", "bias"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_without_a_key_give_zeros_and_no_gradient(way, dtype):
    query, key, value = inputs(dtype=dtype)
    ids = torch.arange(20)[None]
    blocked = torch.zeros(20, 1)
    blocked[:5] = -math.inf
    mask, bias = {
        "band": (LoweredMask(band_hi=-5), None),
        "key_keep": (LoweredMask(band_hi=0, key_keep=(ids >= 5)), None),
        "dense": (LoweredMask(dense=(ids >= 5).mT), None),
        "documents": (LoweredMask(document_ids_q=ids.clamp(min=4), document_ids_kv=ids.clamp(min=5)), None),
        "bias": (FULL, blocked),
    }[way]
    with tiling(64):
        out, lse = chunked_attention(query, key, value, mask, bias=bias, block_q=8)
        grads = grads_of((out, lse), (query, key, value))
    rows = 5
    assert not out[:, :, :rows].any()
    assert (lse[:, :, :rows] == -math.inf).all()
    assert out[:, :, rows:].all()
    assert torch.isfinite(lse[:, :, rows:]).all()
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][:, :, :rows].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_scores_keep_their_precision(dtype, offset):
    query, key, value = inputs(dtype=dtype)
    bias = torch.full((1, 1), offset)
    out, lse = chunked_attention(query, key, value, CAUSAL, bias=bias)
    got = torch.autograd.grad(out.float().pow(2).sum(), (query, key, value))
    plain, plain_lse = chunked_attention(query, key, value, CAUSAL)
    want = torch.autograd.grad(plain.float().pow(2).sum(), (query, key, value))
    assert torch.isfinite(lse).all()
    assert error(lse - offset, plain_lse) < 1e-3
    for a, b in zip((out, *got), (plain, *want), strict=True):
        assert error(a, b) < 5e-3


def test_rows_at_the_lowest_float_are_uniform():
    query, key, value = inputs()
    bias = torch.full((20, 20), torch.finfo(torch.float32).min)
    out, lse = chunked_attention(query, key, value, FULL, bias=bias, block_q=8)
    assert error(out, value.mean(2, keepdim=True).expand_as(out)) < 1e-5
    assert torch.isfinite(lse).all()
    grad = torch.autograd.grad(out.sum(), value)[0]
    assert error(grad, torch.full_like(grad, 2.0)) < 1e-5


@pytest.mark.parametrize("scale", [0.0, -0.4, 3.0])
def test_any_scale(scale):
    query, key, value = inputs(dtype=torch.float64)
    out, lse = chunked_attention(query, key, value, CAUSAL, scale=scale)
    leaves = [wide(t) for t in (query, key, value)]
    want, want_lse = reference(*leaves, CAUSAL, scale=scale)
    assert error(out, want) < 1e-12
    assert error(lse, want_lse) < 1e-6
    got = grads_of((out, lse), (query, key, value))
    for a, b in zip(got, grads_of((want, want_lse), leaves), strict=True):
        assert (a - b).norm() < 1e-6


def attend_with_drop_mask(query, key, mask, dropout_p, **arguments):
    """Let `chunked` show its probabilities after dropout: those are its output for an identity value."""
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    return chunked_attention(query, key, identity, mask, dropout_p=dropout_p, **arguments)[0].detach()


def test_dropout_agrees_with_dense_attention_under_the_same_drop_mask():
    query, key, value = inputs(batch=2, heads=4, heads_kv=2, dtype=torch.float64)
    arguments = {"dropout_p": 0.3, "block_q": 7}
    with tiling(300):
        torch.manual_seed(5)
        keep = attend_with_drop_mask(query, key, CAUSAL, **arguments) != 0
        torch.manual_seed(5)
        out, lse = chunked_attention(query, key, value, CAUSAL, **arguments)
        got = grads_of((out.pow(2), lse), (query, key, value))
    leaves = [wide(t) for t in (query, key, value)]
    want, want_lse = reference(*leaves, CAUSAL, keep=keep, dropout_p=0.3)
    assert error(out, want) < 1e-12
    assert error(lse, want_lse) < 1e-6
    for a, b in zip(got, grads_of((want.pow(2), want_lse), leaves), strict=True):
        assert error(a, b) < 1e-6


def test_dropout_drops_the_stated_share_and_scales_the_rest():
    query, key, _ = inputs(heads=8, heads_kv=2, seqlen_q=64, seqlen_kv=64, dtype=torch.float64)
    torch.manual_seed(1)
    dropped = attend_with_drop_mask(query, key, FULL, 0.25, block_q=16)
    probs = attend_with_drop_mask(query, key, FULL, 0.0)
    kept = dropped != 0
    # 32768 draws: five standard deviations are 0.012.
    assert abs(kept.double().mean() - 0.75) < 0.012
    assert error(dropped[kept], probs[kept] / 0.75) < 1e-12
    # Blocks and heads must not repeat one mask.
    assert len({tuple(row.flatten().tolist()) for row in kept.unflatten(2, (4, 16)).flatten(1, 2)[0]}) == 32


def test_dropout_follows_the_seed_and_only_the_seed():
    tensors = inputs()
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(chunked_attention(*tensors, CAUSAL, dropout_p=0.5)[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(chunked_attention(*tensors, CAUSAL, dropout_p=0.5)[0], results[2])


def test_dropping_everything_gives_zeros():
    tensors = inputs()
    out, lse = chunked_attention(*tensors, CAUSAL, dropout_p=1.0)
    assert not out.any()
    assert torch.isfinite(lse).all()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_under_activation_checkpointing(dropout_p):
    tensors = inputs()

    def attend(*args):
        return chunked_attention(*args, CAUSAL, dropout_p=dropout_p, block_q=8)

    results = []
    for run in (attend, lambda *args: checkpoint(attend, *args, use_reentrant=False)):
        torch.manual_seed(9)
        result = run(*tensors)
        results.append((*result, *grads_of(result, tensors)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(mode):
    tensors = inputs()
    want = chunked_attention(*tensors, CAUSAL)
    with mode():
        got = chunked_attention(*tensors, CAUSAL)
    assert all(t.grad_fn is not None for t in want)
    assert all(t.grad_fn is None and not t.requires_grad for t in got)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_only_wanted_gradients_are_computed():
    query, key, value = inputs()
    sink = torch.zeros(2, requires_grad=True)
    full = grads_of(chunked_attention(query, key, value, CAUSAL, sink=sink), (query, key, value, sink))
    for number in range(4):
        leaves = [t.detach().requires_grad_(i == number) for i, t in enumerate((query, key, value, sink))]
        result = chunked_attention(*leaves[:3], CAUSAL, sink=leaves[3])
        assert error(grads_of(result, [leaves[number]])[0], full[number]) < 1e-6


def test_masks_changed_before_backward_are_noticed():
    tensors = inputs()
    keep = torch.ones(1, 20, dtype=torch.bool)
    out, _ = chunked_attention(*tensors, LoweredMask(key_keep=keep))
    keep[0, 3] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_refused():
    tensors = inputs()
    out, _ = chunked_attention(*tensors, CAUSAL)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), tensors[0], create_graph=True)
    with pytest.raises(AttnRouteError, match="backend='math'"):
        grad.sum().backward()


def test_autocast_does_not_narrow_the_matmuls():
    tensors = inputs()
    want = chunked_attention(*tensors, CAUSAL)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunked_attention(*tensors, CAUSAL)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize("feature", ["plain", "bias", "dropout", "softcap"])
def test_no_tensor_is_larger_than_the_budget_or_the_inputs(feature):
    length, budget = 512, 2**14
    tensors = inputs(heads=4, heads_kv=2, seqlen_q=length, seqlen_kv=length)
    bias = torch.randn(4, 1, length, requires_grad=True)
    arguments = {"bias": {"bias": bias}, "dropout": {"dropout_p": 0.1}, "softcap": {"softcap": 5.0}}
    with tiling(budget, chunked_plan.KEY_ALIGN), Largest() as largest:
        out, lse = chunked_attention(*tensors, CAUSAL, block_q=64, **arguments.get(feature, {}))
        (out.sum() + lse.sum()).backward()
    assert largest.elements <= max(budget, *(t.numel() for t in tensors))
    assert largest.elements < length * length


@pytest.mark.parametrize(
    ("capability", "fused"),
    [((7, 5), False), ((7, 0), False), ((8, 0), True), ((12, 0), True), ((13, 0), True)],
)
def test_cards_older_than_triton_compiles_for_run_torch_operators(monkeypatch, capability, fused):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: asked.append(n) or capability)
    monkeypatch.setattr(chunked_call, "fused_steps", lambda: "Triton's")
    query = SimpleNamespace(device=torch.device("cuda", 3), dtype=torch.float32)
    assert chunked_call.steps_for(query) == ("Triton's" if fused else chunked_call.EAGER_STEPS)
    assert asked == [3]
