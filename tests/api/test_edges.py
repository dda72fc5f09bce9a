"""Empty inputs, rows with no key, transforms, autocast, checkpoints, compilation: what surrounds a call."""

from __future__ import annotations

import math

import pytest
import torch
from reference import TOLERANCE, attend, error
from spy import Spy
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import attention, masks
from attnroute.errors import NoBackendError, QuadraticAttentionWarning

BACKENDS = ("flash", "chunked", "math")


def tensors(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=8, seqlen_kv=8, head_dim=16, dtype=torch.float32, grad=False
):
    torch.manual_seed(0)
    query = torch.randn(batch, heads_q, seqlen_q, head_dim).to(dtype).requires_grad_(grad)
    key = torch.randn(batch, heads_kv, seqlen_kv, head_dim).to(dtype).requires_grad_(grad)
    return query, key, torch.randn(batch, heads_kv, seqlen_kv, head_dim).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_kv": 0},
        {"batch": 0, "seqlen_q": 0},
        {"seqlen_q": 0, "seqlen_kv": 0},
    ],
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_to_attend(sizes, grad, masked):
    inputs = tensors(**sizes, grad=grad)
    query, key, _ = inputs
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if masked else None
    out, lse = attention(*inputs, mask, return_lse=True)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    if grad:
        out.sum().backward()
        assert all((t.grad == 0).all() and t.grad.shape == t.shape for t in inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["bool", "float", "padding"])
def test_a_row_with_no_key_is_zero_and_passes_no_gradient(backend, form):
    inputs = tensors(grad=True)
    allowed = torch.rand(2, 1, 8, 8) < 0.7
    allowed[0, :, 3] = False
    mask = allowed
    if form == "float":
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    if form == "padding":
        mask = masks.KeyPadding(lengths=[0, 5])
        allowed = (torch.arange(8) < torch.tensor([0, 5])[:, None])[:, None, None].expand(2, 1, 8, 8)
    with Spy() as spy:
        out = attention(*inputs, mask, backend=backend)
    assert spy.backends == {backend}
    empty = ~allowed.any(-1).expand(2, 4, 8)
    assert (out[empty] == 0).all()
    got = torch.autograd.grad(out.square().sum(), inputs)
    want = torch.autograd.grad(attend(*inputs, allowed=allowed)[0].square().sum(), inputs)
    assert all(error(a, b, 1.0) <= 5 * TOLERANCE[torch.float32] for a, b in zip(got, want, strict=True))
    assert (got[0][empty] == 0).all()


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-3, 4.0])
@pytest.mark.parametrize("causal", [False, True])
def test_any_scale(backend, scale, causal):
    inputs = tensors()
    decision = attnroute.explain(*inputs, scale=scale, is_causal=causal, backend=backend)
    allowed = torch.ones(8, 8, dtype=torch.bool).tril() if causal else None
    if decision.selected is None:
        pytest.fail(str(decision))
    with Spy() as spy:
        out = attention(*inputs, scale=scale, is_causal=causal, backend=backend)
    assert spy.backends == {decision.selected}
    assert error(out, attend(*inputs, allowed=allowed, scale=scale)[0]) <= TOLERANCE[torch.float32]


def test_autocast_casts_as_scaled_dot_product_attention_does():
    query, key, value = tensors(heads_kv=4)
    mask = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, stock = attention(query, key, value, mask), sdpa(query, key, value, attn_mask=mask)
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert error(ours, stock.double()) <= TOLERANCE[torch.bfloat16]


def test_inference_mode_with_masks_made_inside():
    with torch.inference_mode():
        query, key, value = tensors(seqlen_q=300, seqlen_kv=300)
        mask = torch.ones(300, 300, dtype=torch.bool).tril()
        for _ in range(2):
            out = attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_vmap_runs_where_it_is_right():
    query, key, value = (torch.randn(3, 2, 4, 8, 16) for _ in range(3))
    out = torch.vmap(lambda q, k, v: attention(q, k, v, is_causal=True))(query, key, value)
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()
    for i in range(3):
        assert (
            error(out[i], attend(query[i], key[i], value[i], allowed=allowed)[0]) <= TOLERANCE[torch.float32]
        )


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch scripts its own formulas.
def test_forward_mode_derivatives():
    query, key, value = (t.double() for t in tensors(heads_kv=4))
    tangent = torch.randn_like(query)
    _, got = torch.func.jvp(lambda q: attention(q, key, value), (query,), (tangent,))
    _, want = torch.func.jvp(lambda q: attend(q, key, value)[0], (query,), (tangent,))
    assert error(got, want) <= 1e-9
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, tangent)
        again = torch.autograd.forward_ad.unpack_dual(attention(dual, key, value)).tangent
    assert error(again, want) <= 1e-9


def test_second_derivatives_where_they_were_announced():
    inputs = tuple(
        t.detach().double().requires_grad_()
        for t in tensors(batch=1, heads_q=2, heads_kv=1, seqlen_q=3, seqlen_kv=4)
    )
    with attnroute.override(double_backward=True), Spy() as spy:
        assert torch.autograd.gradgradcheck(lambda *t: attention(*t), inputs)
    assert spy.backends == {"math"}
    with attnroute.override(double_backward=True, strict=True), pytest.raises(NoBackendError, match="strict"):
        attention(*inputs)


def test_the_slow_tier_names_its_bytes_when_they_are_many():
    query = torch.randn(1, 1, 9000, 8)
    with attnroute.override(double_backward=True), pytest.warns(QuadraticAttentionWarning, match="309 MiB"):
        attention(query, query, query)


def test_strictly_deterministic_algorithms():
    inputs = tensors(grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        decision = attnroute.explain(*inputs)
        assert decision.call.deterministic
        first = torch.autograd.grad(attention(*inputs).sum(), inputs)
        again = torch.autograd.grad(attention(*inputs, deterministic=True).sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head_dim_v", [16, 8])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpoints(reentrant, head_dim_v, dropout_p):
    query, key, value = tensors(grad=True)
    value = value[..., :head_dim_v].detach().requires_grad_()

    def block(q, k, v):
        return attention(q * 2, k, v, is_causal=True, dropout_p=dropout_p)

    torch.manual_seed(5)
    want = torch.autograd.grad(block(query, key, value).square().sum(), (query, key, value))
    torch.manual_seed(5)
    with Spy() as spy:
        checkpoint(block, query, key, value, use_reentrant=reentrant).square().sum().backward()
    assert len(spy.backends) == 1
    for got, expected in zip((query.grad, key.grad, value.grad), want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["chunked", "math"])
def test_dropout(backend):
    query, key, _ = tensors(batch=4, seqlen_q=64, seqlen_kv=64)
    value = torch.ones(4, 2, 64, 16)
    torch.manual_seed(1)
    first = attention(query, key, value, dropout_p=0.3, backend=backend)
    torch.manual_seed(1)
    assert torch.equal(first, attention(query, key, value, dropout_p=0.3, backend=backend))
    assert not torch.equal(first, attention(query, key, value, dropout_p=0.3, backend=backend))
    assert abs(first.mean().item() - 1.0) < 0.02
    assert first.std() > 0.01


def test_mask_and_is_causal_mean_both():
    inputs = tensors()
    mask = torch.rand(2, 1, 8, 8) < 0.7
    out = attention(*inputs, mask, is_causal=True)
    allowed = mask & torch.ones(8, 8, dtype=torch.bool).tril()
    assert error(out, attend(*inputs, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


def test_a_float_mask_is_a_bias_and_adds_to_it():
    inputs = tensors()
    first, second = torch.randn(8, 8), torch.randn(2, 1, 1, 8)
    want = attend(*inputs, bias=first + second)[0]
    assert error(attention(*inputs, first, bias=second), want) <= TOLERANCE[torch.float32]
    assert error(attention(*inputs, bias=first + second), want) <= TOLERANCE[torch.float32]


def test_grouped_heads_equal_repeated_ones():
    query, key, value = tensors(heads_q=6, heads_kv=2)
    repeated = (t.repeat_interleave(3, 1) for t in (key, value))
    torch.testing.assert_close(attention(query, key, value), attention(query, *repeated))


@pytest.mark.parametrize("head_dim_v", [16, 8])
def test_bshd_equals_bhsd(head_dim_v):
    query, key, value = tensors(seqlen_q=5)
    value = value[..., :head_dim_v]
    turned = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    out, lse = attention(*turned, layout="bshd", return_lse=True)
    want, want_lse = attention(query, key, value, return_lse=True)
    torch.testing.assert_close(out.transpose(1, 2), want)
    torch.testing.assert_close(lse, want_lse)


def test_score_features_run_on_chunked():
    inputs = tensors(grad=True)
    sink, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    with Spy() as spy:
        out = attention(*inputs, is_causal=True, softcap=5.0, sink=sink, alibi_slopes=slopes)
    assert spy.backends == {"chunked"}
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()
    want = attend(*inputs, allowed=allowed, softcap=5.0, sink=sink, alibi_slopes=slopes)[0]
    assert error(out, want) <= TOLERANCE[torch.float32]
    got = torch.autograd.grad(out.sum(), (*inputs, sink))
    expected = torch.autograd.grad(want.sum(), (*inputs, sink))
    assert all(error(a, b, 1.0) <= 5 * TOLERANCE[torch.float32] for a, b in zip(got, expected, strict=True))


def test_a_compiled_function_stops_at_the_call_and_is_right():
    def block(q, k, v):
        return attention(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(block, backend="eager")
    for length in (8, 9, 10):
        inputs = tensors(seqlen_q=length, seqlen_kv=length)
        torch.testing.assert_close(compiled(*inputs), block(*inputs))


def test_very_negative_scores():
    query, key, value = tensors(heads_kv=4, grad=True)
    query, key = (torch.zeros_like(query) for _ in range(2))
    query[..., 0], key[..., 0] = 1.0, -480.0 + torch.arange(8.0)
    query.requires_grad_()
    for backend in BACKENDS:
        out = attention(query, key, value, backend=backend)
        assert error(out, attend(query, key, value)[0]) <= TOLERANCE[torch.float32]
        assert torch.isfinite(torch.autograd.grad(out.sum(), query)[0]).all()
