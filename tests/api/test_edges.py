"""Edges: nothing to attend to, strange scales, transforms, checkpoints, dropout, what surrounds a call."""

from __future__ import annotations

import math

import pytest
import torch
from support.edge_inputs import CPU_BACKENDS, WITH_LSE, close, gradients, normal
from support.reference import attend
from support.spy import Spy

import attnroute
from attnroute import masks


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Nothing to attend to.

SIZES = [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_kv": 0}, {"seqlen_q": 0, "seqlen_kv": 0}]
CAUSAL = [
    {},
    {"is_causal": True, "causal_alignment": "top_left"},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"window": (2, 1), "causal_alignment": "bottom_right"},
]


@pytest.mark.parametrize("causal", CAUSAL, ids=["plain", "top_left", "bottom_right", "window"])
@pytest.mark.parametrize("sizes", SIZES, ids=" ".join)
@pytest.mark.parametrize("backend", [None, *CPU_BACKENDS])
def test_empty_sizes_give_zeros_and_zero_gradients(backend, sizes, causal):
    inputs = [t.requires_grad_() for t in normal(**sizes)]
    if attnroute.explain(*inputs, backend=backend, **causal).selected is None:
        assert backend == "flash"
        assert "seqlen_q" in sizes or "seqlen_kv" in sizes
        return
    out = attnroute.attention(*inputs, backend=backend, **causal)
    assert out.shape == inputs[0].shape
    assert not out.any()
    for gradient, tensor in zip(gradients(out, inputs), inputs, strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


@pytest.mark.parametrize("sizes", SIZES, ids=" ".join)
def test_the_log_sum_exp_of_nothing_is_minus_infinity(sizes):
    inputs = normal(**sizes)
    _, lse = attnroute.attention(*inputs, return_lse=True)
    assert lse.shape == inputs[0].shape[:3]
    assert (lse == -math.inf).all()


def row_without_key(kind):
    """A mask under which query 3 of the second batch row attends nothing, and the arguments that say it."""
    allowed = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    allowed[1, 0, 3] = False
    if kind == "dense":
        return allowed, {"mask": allowed}
    if kind == "bias":
        return allowed, {"bias": torch.zeros(2, 1, 6, 9).masked_fill(~allowed, -math.inf)}
    if kind == "float mask":
        return allowed, {"mask": torch.zeros(2, 1, 6, 9).masked_fill(~allowed, -math.inf)}
    if kind == "padding":
        allowed[1] = False
        return allowed, {"mask": masks.KeyPadding(lengths=[9, 0])}
    if kind == "padding on the device":
        allowed[1] = False
        return allowed, {"mask": masks.KeyPadding(lengths=torch.tensor([9, 0]))}
    allowed = torch.ones(2, 1, 9, 6, dtype=torch.bool).tril(-3)
    return allowed, {"is_causal": True, "causal_alignment": "bottom_right"}


KINDS = ["dense", "bias", "float mask", "padding", "padding on the device", "causal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_query_without_a_key_gives_zeros_and_zero_gradients(backend, kind):
    allowed, arguments = row_without_key(kind)
    inputs = [t.requires_grad_() for t in normal(seqlen_q=allowed.shape[2], seqlen_kv=allowed.shape[3])]
    with Spy() as spy:
        out = attnroute.attention(*inputs, backend=backend, **arguments)
    assert spy.backends == {backend}
    want, lse = attend(*inputs, allowed=allowed)
    empty = lse == -math.inf
    assert empty.any()
    assert (out[empty] == 0).all()
    close(out, want)
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        close(got, wanted, floor=1.0)
    dq = gradients(attnroute.attention(*inputs, backend=backend, **arguments), inputs)[0]
    assert (dq[empty] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("backend", WITH_LSE)
def test_the_log_sum_exp(backend, kind, dtype):
    allowed, arguments = (None, {}) if kind is None else row_without_key(kind)
    sizes = {} if allowed is None else {"seqlen_q": allowed.shape[2], "seqlen_kv": allowed.shape[3]}
    inputs = normal(**sizes, dtype=dtype)
    out, lse = attnroute.attention(*inputs, return_lse=True, backend=backend, **arguments)
    want, want_lse = attend(*inputs, allowed=allowed)
    assert (lse.dtype, lse.shape) == (torch.float32, inputs[0].shape[:3])
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = want_lse > -math.inf
    assert (lse.double() - want_lse)[finite].abs().max() <= (1e-5 if dtype != torch.bfloat16 else 3e-2)
    close(out, want, dtype)


def test_a_backend_without_a_log_sum_exp_says_so():
    with pytest.raises(attnroute.NoBackendError, match="any/math/feature-return-lse"):
        attnroute.attention(*normal(), return_lse=True, backend="math")


# Scales.


@pytest.mark.parametrize("causal", CAUSAL, ids=["plain", "top_left", "bottom_right", "window"])
@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0, 3, 1e-3])
@pytest.mark.parametrize("backend", [None, *CPU_BACKENDS])
def test_any_scale_is_right_with_and_without_a_mask(backend, scale, causal):
    inputs = [t.requires_grad_() for t in normal()]
    out = attnroute.attention(*inputs, scale=scale, backend=backend, **causal)
    want, _ = attend(*inputs, allowed=_allowed(causal), scale=scale)
    close(out, want)
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        close(got, wanted, floor=1.0)


def _allowed(causal):
    distance = torch.arange(9) - torch.arange(6)[:, None]
    if causal.get("causal_alignment") == "bottom_right":
        distance = distance - 3
    if "window" in causal:
        return (distance >= -2) & (distance <= 1)
    return distance <= 0 if causal else None


@pytest.mark.parametrize("sizes", [(5, 1), (1, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("backend", [None, *CPU_BACKENDS])
def test_a_strange_scale_beside_a_diagonal_of_one(backend, alignment, scale, sizes):
    """Where a diagonal rules nothing out there is no mask to prepare, whatever a table asks for."""
    inputs = normal(seqlen_q=sizes[0], seqlen_kv=sizes[1])
    out = attnroute.attention(
        *inputs, is_causal=True, causal_alignment=alignment, scale=scale, backend=backend
    )
    offset = sizes[1] - sizes[0] if alignment == "bottom_right" else 0
    allowed = torch.ones(sizes, dtype=torch.bool).tril(offset)
    close(out, attend(*inputs, allowed=allowed, scale=scale)[0])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_scores_far_below_zero_are_as_good_as_others(backend):
    query, key, value = normal(heads_kv=4, seqlen_kv=6)
    query, key = torch.zeros_like(query), torch.zeros_like(key)
    query[..., 0], key[..., 0] = 1.0, -480.0 + torch.arange(6.0)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    out, (want, _) = attnroute.attention(*inputs, scale=1.0, backend=backend), attend(*inputs, scale=1.0)
    close(out, want)
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        assert torch.isfinite(got).all()
        close(got, wanted, floor=500.0)


def test_softcap_sink_and_slopes_together():
    inputs = [t.requires_grad_() for t in (*normal(seqlen_kv=6), torch.randn(4))]
    slopes = torch.rand(4)
    features = {"softcap": 5.0, "alibi_slopes": slopes}
    with Spy() as spy:
        out = attnroute.attention(*inputs[:3], is_causal=True, sink=inputs[3], **features)
    assert spy.backends == {"chunked"}
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    want, _ = attend(*inputs[:3], allowed=allowed, sink=inputs[3], **features)
    close(out, want)
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        close(got, wanted, floor=1.0)


# Masks beside masks.


@pytest.mark.parametrize("kind", ["tensor", "object", "float"])
def test_a_mask_and_is_causal_mean_both(kind):
    query, key, value = normal(seqlen_kv=6)
    dense = torch.rand(2, 1, 6, 6) < 0.6
    mask = {
        "tensor": dense,
        "object": masks.Dense(dense),
        "float": torch.zeros(2, 1, 6, 6).masked_fill(~dense, -math.inf),
    }[kind]
    for backend in (None, *CPU_BACKENDS):
        out = attnroute.attention(query, key, value, mask, is_causal=True, backend=backend)
        close(out, attend(query, key, value, allowed=dense.tril())[0])


def test_is_causal_and_a_window_mean_both():
    query, key, value = normal(seqlen_kv=6)
    out = attnroute.attention(query, key, value, is_causal=True, window=(2, 5))
    allowed = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
    close(out, attend(query, key, value, allowed=allowed)[0])


def test_a_float_mask_is_a_bias_and_both_add_up():
    query, key, value = normal()
    one, other = torch.randn(6, 9), torch.randn(2, 4, 1, 9)
    as_mask = attnroute.attention(query, key, value, one)
    assert torch.equal(as_mask, attnroute.attention(query, key, value, bias=one))
    close(as_mask, attend(query, key, value, bias=one)[0])
    close(
        attnroute.attention(query, key, value, one, bias=other),
        attend(query, key, value, bias=one + other)[0],
    )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    "shape", [(), (1,), (9,), (6, 1), (1, 9), (2, 1, 1, 1), (1, 4, 6, 1), (2, 4, 6, 9)], ids=str
)
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_masks_and_biases_of_every_shape_that_broadcasts(kind, shape, backend):
    query, key, value = normal()
    if kind == "bias":
        bias = torch.randn(shape)
        out = attnroute.attention(query, key, value, bias=bias, backend=backend)
        close(out, attend(query, key, value, bias=bias)[0])
    else:
        mask = torch.rand(shape) < 0.7
        out = attnroute.attention(query, key, value, mask, backend=backend)
        close(out, attend(query, key, value, allowed=mask)[0])


def test_a_bias_of_one_number_in_another_dtype():
    query, key, value = normal(dtype=torch.float64)
    bias = torch.tensor(0.5)
    close(attnroute.attention(query, key, value, bias=bias), attend(query, key, value, bias=bias)[0])


# Layouts and heads.


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_bshd_equals_bhsd(backend):
    inputs = normal()
    turned = [t.transpose(1, 2).contiguous() for t in inputs]
    mask = torch.rand(2, 4, 6, 9) < 0.7
    plain = attnroute.attention(*inputs, mask, backend=backend)
    out = attnroute.attention(*turned, mask, layout="bshd", backend=backend)
    assert out.shape == turned[0].shape
    close(out.transpose(1, 2), plain.double())


@pytest.mark.parametrize("backend", WITH_LSE)
def test_the_log_sum_exp_has_heads_first_in_either_layout(backend):
    inputs = normal()
    turned = [t.transpose(1, 2) for t in inputs]
    _, plain = attnroute.attention(*inputs, return_lse=True, backend=backend)
    _, lse = attnroute.attention(*turned, layout="bshd", return_lse=True, backend=backend)
    close(lse, plain.double())


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_shared_heads_equal_repeated_heads(backend, heads_kv):
    query, key, value = normal(heads_kv=heads_kv)
    repeated = [t.repeat_interleave(4 // heads_kv, 1) for t in (key, value)]
    shared = attnroute.attention(
        query, key, value, is_causal=True, causal_alignment="bottom_right", backend=backend
    )
    apart = attnroute.attention(
        query, *repeated, is_causal=True, causal_alignment="bottom_right", backend=backend
    )
    close(shared, apart.double())


def test_heads_that_are_one_head_with_stride_zero():
    query, key, value = normal(heads_kv=1)
    out = attnroute.attention(query, key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1))
    close(out, attend(query, key, value)[0])


# What surrounds a call.


# Transforms.


# Dropout.
