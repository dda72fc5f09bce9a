"""Edges: nothing to attend to, strange scales, transforms, checkpoints, dropout, what surrounds a call."""

from __future__ import annotations

import math

import pytest
import torch
from reference import TOLERANCE, attend, error
from spy import Spy
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import masks

CPU_BACKENDS = ("flash", "chunked", "math")
WITH_LSE = ("flash", "chunked")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normal(batch=2, heads=4, heads_kv=2, seqlen_q=6, seqlen_kv=9, head_dim=8, dtype=torch.float32):
    return (
        torch.randn(batch, heads, seqlen_q, head_dim, dtype=dtype),
        torch.randn(batch, heads_kv, seqlen_kv, head_dim, dtype=dtype),
        torch.randn(batch, heads_kv, seqlen_kv, head_dim, dtype=dtype),
    )


def close(got, want, dtype=torch.float32, floor=0.1):
    assert got.shape == want.shape
    assert error(got, want, floor) <= TOLERANCE[dtype]


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_autocast_casts_as_for_scaled_dot_product_attention(dtype, with_bias):
    query, key, value = normal(heads_kv=4, dtype=dtype)
    bias = torch.randn(6, 9, dtype=torch.float32 if dtype == torch.float16 else dtype) if with_bias else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        decision = attnroute.explain(query, key, value, bias=bias)
        out = attnroute.attention(query, key, value, bias=bias)
    assert out.dtype == want.dtype
    assert f"torch.{decision.call.dtype}" == str(want.dtype)
    close(out, want.double(), want.dtype)


def test_autocast_reaches_gradients():
    inputs = [t.requires_grad_() for t in normal()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnroute.attention(*inputs)
    assert out.dtype == torch.bfloat16
    want = gradients(attend(*inputs)[0], inputs)
    for got, wanted in zip(gradients(out, inputs), want, strict=True):
        assert got.dtype == torch.float32
        close(got, wanted, torch.bfloat16, floor=1.0)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_without_gradients_the_values_are_the_same(guard, backend):
    inputs = [t.requires_grad_() for t in normal()]
    mask = masks.KeyPadding(lengths=[9, 4])
    want, _ = attend(*inputs, allowed=mask.materialize(6, 9, batch=2))
    with guard():
        out = attnroute.attention(*inputs, mask, backend=backend)
        assert attnroute.explain(*inputs, mask).call.phase == "inference"
    assert not out.requires_grad
    close(out, want)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_mask_first_used_in_inference_mode_can_be_trained_with_later(backend):
    mask = masks.KeyPadding(lengths=[9, 4])
    with torch.inference_mode():
        attnroute.attention(*normal(), mask, backend=backend)
    inputs = [t.requires_grad_() for t in normal()]
    out = attnroute.attention(*inputs, mask, backend=backend)
    want = attend(*inputs, allowed=mask.materialize(6, 9, batch=2))[0]
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        close(got, wanted, floor=1.0)


def test_masks_made_in_inference_mode_are_right_although_nobody_looks_into_them():
    with torch.inference_mode():
        query, key, value = normal(seqlen_q=300, seqlen_kv=300)
        mask = torch.ones(300, 300, dtype=torch.bool).tril()
        for _ in range(2):
            out = attnroute.attention(query, key, value, mask)
            close(out, attend(query, key, value, allowed=mask)[0])


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def test_deterministic_algorithms(deterministic):
    inputs = [t.requires_grad_() for t in normal()]
    assert attnroute.explain(*inputs).call.deterministic
    runs = [gradients(attnroute.attention(*inputs), inputs) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, runs[0], strict=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_equal_gradients(reentrant, backend):
    inputs = [t.requires_grad_() for t in normal()]
    mask = masks.KeyPadding(lengths=[9, 4]) & masks.Causal("bottom_right")

    def run(*tensors):
        return attnroute.attention(*tensors, mask, backend=backend)

    plain = run(*inputs)
    again = checkpoint(run, *inputs, use_reentrant=reentrant)
    assert torch.equal(plain, again)
    for got, want in zip(_backward(again, inputs), _backward(plain, inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head_dim_v", [8, 4])
def test_activation_checkpointing_repeats_dropout(reentrant, head_dim_v):
    query, key, value = normal()
    inputs = [t.requires_grad_() for t in (query, key, value[..., :head_dim_v].clone())]

    def run(*tensors):
        return attnroute.attention(*tensors, dropout_p=0.5)

    torch.manual_seed(3)
    want = _backward(run(*inputs), inputs)
    torch.manual_seed(3)
    again = _backward(checkpoint(run, *inputs, use_reentrant=reentrant), inputs)
    for got, wanted in zip(again, want, strict=True):
        assert torch.equal(got, wanted)


def _backward(out, inputs):
    """Reentrant checkpoints know `backward` alone."""
    for tensor in inputs:
        tensor.grad = None
    out.backward(torch.arange(out.numel(), dtype=out.dtype).view(out.shape) / out.numel())
    return [tensor.grad for tensor in inputs]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_function_gives_the_right_answer():
    """Breaks of the graph are allowed for now; wrong answers and errors are not."""
    torch._dynamo.reset()
    query, key, value = normal(seqlen_kv=6)
    mask = masks.KeyPadding(lengths=[6, 2])

    def block(q, k, v):
        return attnroute.attention(q * 2, k, v, mask, is_causal=True) + 1

    compiled = torch.compile(block, backend="eager")
    allowed = mask.materialize(6, 6, batch=2) & torch.ones(6, 6, dtype=torch.bool).tril()
    for _ in range(2):
        close(compiled(query, key, value), attend(query * 2, key, value, allowed=allowed)[0] + 1)
    plain = torch.compile(attnroute.attention, backend="eager")
    for length in (8, 9, 10):
        query, key, value = normal(seqlen_q=length, seqlen_kv=length)
        close(plain(query, key, value), attend(query, key, value)[0])
    torch._dynamo.reset()


# Transforms.

# torch writes some forward-mode formulas in a language that it calls deprecated itself.
by_decomposition = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def doubles(**sizes):
    return normal(
        **{"seqlen_q": 3, "seqlen_kv": 4, "heads": 2, "heads_kv": 1, "head_dim": 4, **sizes},
        dtype=torch.float64,
    )


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 0)], ids=str)
def test_vmap(in_dims):
    def run(q, k, v):
        return attnroute.attention(q, k, v, is_causal=True, causal_alignment="bottom_right")

    several = list(zip(*(normal() for _ in range(3)), strict=True))
    tensors = [one[0] if d is None else torch.stack(one, d) for one, d in zip(several, in_dims, strict=True)]
    out = torch.vmap(run, in_dims=in_dims)(*tensors)
    for n in range(3):
        one = [t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True)]
        close(out[n], run(*one).double())


@pytest.mark.parametrize("beside", [None, "mask", "bias"])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_vmap_over_a_mask_or_bias(kind, beside):
    query, key, value = normal()
    batched = torch.randn(3, 2, 1, 6, 9)
    batched = batched > -0.5 if kind == "mask" else batched
    other = (
        {}
        if beside in (None, kind)
        else {beside: torch.randn(6, 9) if beside == "bias" else torch.ones(9).bool()}
    )

    def run(extra):
        return attnroute.attention(query, key, value, **{kind: extra}, **other)

    out = torch.vmap(run)(batched)
    for n in range(3):
        close(out[n], run(batched[n]).double())


@by_decomposition
def test_the_gradient_of_a_gradient_by_functorch():
    query, key, value = doubles()

    def loss(function):
        return lambda q: function(q, key, value).square().sum()

    def own(q, k, v):
        return attnroute.attention(q, k, v)

    def wanted(q, k, v):
        return attend(q, k, v)[0]

    hessians = [torch.func.hessian(loss(f))(query) for f in (own, wanted)]
    close(*hessians, dtype=torch.float64)
    twice = [torch.func.grad(lambda q, f=f: torch.func.grad(loss(f))(q).sum())(query) for f in (own, wanted)]
    close(*twice, dtype=torch.float64)


def test_gradients_per_sample():
    query, key, value = doubles(batch=3)

    def loss(q, k, v):
        return attnroute.attention(q[None], k[None], v[None]).square().sum()

    got = torch.vmap(torch.func.grad(loss))(query, key, value)
    whole = query.clone().requires_grad_()
    want = torch.autograd.grad(attend(whole, key, value)[0].square().sum(), whole)[0]
    close(got, want, dtype=torch.float64)


@by_decomposition
def test_jvp_and_dual_numbers():
    primals, tangents = doubles(), doubles()
    want_out, want = torch.func.jvp(lambda *t: attend(*t)[0], primals, tangents)
    out, tangent = torch.func.jvp(attnroute.attention, primals, tangents)
    close(out, want_out, dtype=torch.float64)
    close(tangent, want, dtype=torch.float64)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        assert attnroute.explain(*duals).call.context.transform == "forward_ad"
        close(forward_ad.unpack_dual(attnroute.attention(*duals)).tangent, want, dtype=torch.float64)
        plain = attnroute.explain(*primals)
    assert plain.call.context.transform is None


@by_decomposition
@pytest.mark.parametrize("masked", [False, True])
def test_tangents_of_a_bias(masked):
    query, key, value = doubles()
    bias, tangent = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    mask = torch.tensor([True, True, False, True]) if masked else None

    def own(b):
        return attnroute.attention(query, key, value, mask, bias=b)

    def wanted(b):
        return attend(query, key, value, allowed=mask, bias=b)[0]

    _, want = torch.func.jvp(wanted, (bias,), (tangent,))
    close(torch.func.jvp(own, (bias,), (tangent,))[1], want, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = own(forward_ad.make_dual(bias, tangent))
        close(forward_ad.unpack_dual(dual).tangent, want, dtype=torch.float64)


@pytest.mark.parametrize("how", ["override", "backend"])
@pytest.mark.parametrize("kind", ["plain", "causal", "padding", "bias"])
def test_gradients_of_gradients(how, kind):
    inputs = [t.requires_grad_() for t in doubles(batch=1)]
    arguments = {
        "plain": {},
        "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
        "padding": {"mask": masks.KeyPadding(lengths=[3])},
        "bias": {"bias": torch.randn(3, 4, dtype=torch.float64).requires_grad_()},
    }[kind]
    trained = [*inputs, *(t for t in arguments.values() if isinstance(t, torch.Tensor))]

    def run(*tensors):
        extra = {"bias": tensors[3]} if kind == "bias" else arguments
        if how == "backend":
            return attnroute.attention(*tensors[:3], backend="math", **extra)
        with attnroute.override(double_backward=True):
            return attnroute.attention(*tensors[:3], **extra)

    assert torch.autograd.gradcheck(run, trained)
    assert torch.autograd.gradgradcheck(run, trained)


def test_what_only_the_slow_tier_can_do_is_refused_where_that_is_not_allowed():
    with (
        attnroute.override(double_backward=True, strict=True),
        pytest.raises(attnroute.NoBackendError, match="strict"),
    ):
        attnroute.attention(*normal())


def test_a_second_derivative_that_nobody_announced_is_an_error_and_never_a_wrong_number():
    inputs = [t.requires_grad_() for t in doubles()]
    for backend in ("chunked", "flash"):
        out = attnroute.attention(*inputs, backend=backend)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError if backend == "flash" else attnroute.AttnRouteError):
            torch.autograd.grad(first[0].sum(), inputs)


# Dropout.


@pytest.mark.parametrize("backend", ["chunked", "math"])
def test_dropout_changes_nothing_on_average(backend):
    query, key, value = normal(seqlen_q=64, seqlen_kv=64, batch=4)
    value = value + 1
    want, _ = attend(query, key, value)
    runs = [attnroute.attention(query, key, value, dropout_p=0.25, backend=backend) for _ in range(50)]
    assert not torch.equal(runs[0], runs[1])
    mean = torch.stack(runs).double().mean(0)
    spread = torch.stack(runs).double().std(0) / math.sqrt(len(runs))
    assert ((mean - want) / spread).mean().abs() < 0.05
    assert ((mean - want) / spread).abs().max() < 7


@pytest.mark.parametrize("backend", [None, "chunked", "math"])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_follows_the_seed_and_is_applied_in_inference_too(backend, grad):
    inputs = [t.requires_grad_(grad) for t in normal()]

    def run():
        torch.manual_seed(7)
        return attnroute.attention(*inputs, dropout_p=0.5, backend=backend)

    first, again = run(), run()
    assert torch.equal(first, again)
    assert not torch.allclose(first, attnroute.attention(*inputs))
    assert not torch.equal(first, attnroute.attention(*inputs, dropout_p=0.5, backend=backend))


@pytest.mark.parametrize("backend", ["chunked", "math"])
def test_gradients_see_the_same_dropout_as_the_output(backend):
    query, key, value = doubles(seqlen_q=5, seqlen_kv=7)
    value = value.requires_grad_()

    def run(v):
        torch.manual_seed(7)
        return attnroute.attention(query, key, v, dropout_p=0.5, backend=backend)

    # The output is linear in the values, so the gradient is the same at any of them.
    assert torch.autograd.gradcheck(run, (value,))
