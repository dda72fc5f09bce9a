"""Sinks on CUDA kernels that have none: outputs, log-sum-exps and every gradient equal float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.reference import attend, error
from support.spy import ran

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
BACKENDS = ("flash", "cudnn", "efficient")
BACKWARD = {
    "flash": "aten::_scaled_dot_product_flash_attention_backward",
    "flash below": "aten::_flash_attention_backward",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention_backward",
    "efficient": "aten::_scaled_dot_product_efficient_attention_backward",
    "efficient below": "aten::_efficient_attention_backward",
}
PACKAGES = ("fa4", "fa3", "fa2", "cudnn_fe", "te")
"""Kept away where torch's own kernels are the subject; each has sinks among its own tests."""
NAMES = ("query", "key", "value", "sink", "bias")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def problem(
    heads=4, heads_kv=2, seqlen_q=130, seqlen_kv=130, head_dim=64, *, batch=2, head_dim_v=None, **rest
):
    """Return query, key, value and sink; `mean` moves all scores far below zero."""
    dtype, mean = rest.get("dtype", torch.bfloat16), rest.get("mean", 0.0)

    def make(count, length, width, shift):
        return (torch.randn(batch, count, length, width, device="cuda") + shift).to(dtype).requires_grad_()

    return [
        make(heads, seqlen_q, head_dim, mean),
        make(heads_kv, seqlen_kv, head_dim, -mean),
        make(heads_kv, seqlen_kv, head_dim_v or head_dim, 0.0),
        torch.randn(heads, device="cuda").requires_grad_(),
    ]


def band(seqlen_q, seqlen_kv, low, high):
    distance = torch.arange(seqlen_kv, device="cuda")[None] - torch.arange(seqlen_q, device="cuda")[:, None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    allowed = allowed if low is None else allowed & (distance >= low)
    return allowed if high is None else allowed & (distance <= high)


def check(leaves, backend, mask=None, *, allowed=None, bias=None, backward=None, **rest):
    """Run forward and backward, see which operators ran, and hold everything against the definition."""
    query, key, value, sink = leaves
    arguments = {"mask": mask, "bias": bias, "sink": sink, "backend": backend, **rest}
    decision = attnroute.explain(query, key, value, **arguments)
    assert "sink_from_lse" in decision.verdict(decision.selected).repairs, str(decision)
    trained = [*leaves, bias] if bias is not None and bias.requires_grad else leaves
    want, want_lse = attend(query, key, value, allowed=allowed, bias=bias, sink=sink, scale=rest.get("scale"))
    cotangent = torch.randn_like(want).to(query.dtype)
    with ran(decision.selected) as spy:
        out, lse = attnroute.attention(query, key, value, return_lse=True, **arguments)
        grads = torch.autograd.grad(out, trained, cotangent)
    assert spy.seen.count(BACKWARD[backward or decision.selected]) == 1, sorted(set(spy.seen))
    tolerance = TOLERANCE[query.dtype]
    assert error(out, want) <= tolerance
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = want_lse > -math.inf
    assert (lse.double() - want_lse)[finite].abs().max() < 1e-3 * max(
        1.0, want_lse[finite].abs().max().item()
    )
    wanted = torch.autograd.grad(want, trained, cotangent.double())
    for name, got, expected in zip(NAMES, grads, wanted, strict=False):
        assert error(got, expected, floor=2.0) <= 2 * tolerance, name


@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_grouped_heads(backend, head_dim):
    leaves = problem(head_dim=head_dim)
    check(leaves, backend, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_key(backend, dtype):
    check(problem(seqlen_q=77, seqlen_kv=256, dtype=dtype), backend)


def test_float32():
    check(problem(dtype=torch.float32), "efficient", is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_value_head_differs(backend):
    leaves = problem(head_dim=192, head_dim_v=128)
    check(leaves, backend, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(130, 130), (100, 300), (300, 100)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_window(backend, seqlen_q, seqlen_kv):
    offset = seqlen_kv - seqlen_q
    check(
        problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv),
        backend,
        window=(20, 3),
        causal_alignment="bottom_right",
        allowed=band(seqlen_q, seqlen_kv, offset - 20, offset + 3),
        backward="flash below" if backend == "flash" else None,
    )


@pytest.mark.parametrize("backend", ["flash", "efficient"])
def test_causal_from_the_bottom_right(backend):
    check(
        problem(seqlen_q=100, seqlen_kv=300),
        backend,
        is_causal=True,
        causal_alignment="bottom_right",
        allowed=band(100, 300, None, 200),
        backward="efficient below" if backend == "efficient" else None,
    )


def test_leading_queries_without_a_key():
    rest = {"is_causal": True, "causal_alignment": "bottom_right"}
    leaves = problem(seqlen_q=300, seqlen_kv=100)
    check(leaves, "flash", allowed=band(300, 100, None, -200), **rest)
    out, lse = attnroute.attention(*leaves[:3], sink=leaves[3], backend="flash", return_lse=True, **rest)
    assert not out[:, :, :200].any()
    assert torch.equal(lse[:, :, :200], leaves[3][None, :, None].expand(2, 4, 200))


@pytest.mark.parametrize("band_of", [None, masks.Causal(), masks.Window(10, 0)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_documents_are_a_ragged_batch(batch, band_of):
    lengths = [50, 1, 0, 79]
    mask = masks.Documents(lengths=lengths)
    mask = mask if band_of is None else mask & band_of
    allowed = mask.materialize(130, 130, batch=batch, device="cuda")
    check(problem(batch=batch), "flash", mask, allowed=allowed, backward="flash below")


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_dense_mask_with_rows_of_nothing(backend):
    mask = torch.rand(2, 1, 128, 128, device="cuda") < 0.5
    mask[:, :, 3] = False
    mask[1, :, 40:70] = False
    check(problem(seqlen_q=128, seqlen_kv=128), backend, mask, allowed=mask)


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_no_key_and_no_sink(backend):
    mask = torch.rand(128, 128, device="cuda") < 0.5
    mask[40:70] = False
    leaves = problem(seqlen_q=128, seqlen_kv=128)
    leaves[3] = torch.tensor([-math.inf, 0.0, -math.inf, 2.0], device="cuda", requires_grad=True)
    check(leaves, backend, mask, allowed=mask)


@pytest.mark.parametrize("shape", [(130, 130), (1, 4, 130, 130), (2, 1, 1, 130)])
def test_a_bias_gets_its_gradient(shape):
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    check(problem(), "efficient", bias=bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("logit", [-60.0, 0.0, 60.0])
def test_scores_far_below_zero(backend, logit):
    leaves = problem(heads_kv=4, seqlen_q=256, seqlen_kv=256, mean=2.0)
    leaves[3] = torch.full((4,), logit, device="cuda", requires_grad=True)
    check(leaves, backend)


@pytest.mark.parametrize("backend", ["flash", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_dropped_weights_are_the_same_in_the_backward(backend, causal):
    """With the identity as value the output is the dropped weights themselves, so they can be read off."""
    query, key, value, sink = problem(heads_kv=4, seqlen_q=128, seqlen_kv=128, head_dim=128)
    rest = {"sink": sink, "dropout_p": 0.25, "backend": backend, "is_causal": causal}
    query, key = ((t.detach() * 0.3).requires_grad_() for t in (query, key))
    one = (
        torch.eye(128, device="cuda", dtype=query.dtype).expand(2, 4, 128, 128).contiguous().requires_grad_()
    )
    torch.manual_seed(1)
    kept = attnroute.attention(query, key, one, **rest) != 0
    torch.manual_seed(1)
    out = attnroute.attention(query, key, value, **rest)
    allowed = band(128, 128, None, 0) if causal else torch.ones_like(kept[0, 0])
    dropped = 1 - kept.sum() / (allowed.sum() * 8)
    assert abs(dropped.item() - 0.25) < 0.02
    weights, _ = attend(query, key, one, allowed=allowed, sink=sink)
    want = (weights * kept / 0.75) @ value.double()
    assert error(out, want) <= TOLERANCE[out.dtype]
    cotangent, leaves = torch.randn_like(out), (query, key, value, sink)
    wanted = torch.autograd.grad(want, leaves, cotangent.double())
    for name, got, expected in zip(NAMES, torch.autograd.grad(out, leaves, cotangent), wanted, strict=False):
        assert error(got, expected.double(), floor=2.0) <= 2 * TOLERANCE[out.dtype], name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_inference(backend, seqlen_q):
    leaves = [t.detach() for t in problem(seqlen_q=seqlen_q, seqlen_kv=300)]
    want, want_lse = attend(*leaves[:3], sink=leaves[3])
    with ran(backend):
        out, lse = attnroute.attention(*leaves[:3], sink=leaves[3], backend=backend, return_lse=True)
    assert not out.requires_grad
    assert error(out, want) <= TOLERANCE[out.dtype]
    assert (lse.double() - want_lse).abs().max() < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_follows_its_sink(backend):
    leaves = [t.detach() for t in problem()]

    def run():
        return attnroute.attention(*leaves[:3], sink=leaves[3], is_causal=True, backend=backend)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        leaves[3].normal_()
        graph.replay()
        want, _ = attend(*leaves[:3], allowed=band(130, 130, None, 0), sink=leaves[3])
        assert error(out, want) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("backend", ["flash", "efficient"])
def test_deterministic_gradients(backend):
    leaves = problem(seqlen_q=1024, seqlen_kv=1024)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (
            torch.autograd.grad(
                attnroute.attention(*leaves[:3], sink=leaves[3], backend=backend).float().square().sum(),
                leaves,
            )
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("sliding", [False, True])
def test_layers_of_gpt_oss_train_on_a_fused_kernel(sliding):
    leaves = problem(64, 8, 512, 512, 64, batch=1)
    leaves[3] = torch.randn(64, device="cuda").bfloat16().requires_grad_()
    window = (127, 0) if sliding else (None, 0)
    allowed = band(512, 512, -127 if sliding else None, 0)
    with attnroute.override(ban=PACKAGES):
        decision = attnroute.explain(*leaves[:3], sink=leaves[3], window=window)
        assert decision.selected in (("flash",) if sliding else ("flash", "cudnn")), str(decision)
        below = "flash below" if sliding else None
        check(leaves, None, window=window, allowed=allowed, backward=below)
