"""Heads without features, and tensors without values: the shapes and numbers that stock gives."""

from __future__ import annotations

import pytest
import torch
from support.compile_cases import CASES, problem
from support.reference import attend, error
from torch.nn.functional import scaled_dot_product_attention as stock
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import biases, masks

DIMS = {"none": (0, 0), "no scores": (0, 8), "no values": (8, 0), "odd": (0, 5)}
SIZES = {
    "usual": (2, 4, 5),
    "no batch": (0, 4, 5),
    "no queries": (2, 0, 5),
    "no keys": (2, 4, 0),
    "long": (1, 300, 300),
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2}


def tensors(dims, sizes, dtype=torch.float32, device="cpu", layout="bhsd"):
    """Of two query heads and one key head, tokens outermost where the layout is bshd."""
    torch.manual_seed(0)
    (narrow, narrow_v), (batch, queries, keys) = dims, sizes
    made = []
    for heads, length, size in ((2, queries, narrow), (1, keys, narrow), (1, keys, narrow_v)):
        shape = (batch, length, heads, size) if layout == "bshd" else (batch, heads, length, size)
        made.append(torch.randn(shape, dtype=dtype, device="cpu").to(device).requires_grad_())
    return made


def as_bhsd(tensor, layout):
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_heads_without_features_are_as_stock(dims, sizes, layout, causal, dtype):
    inputs = tensors(dims, sizes, dtype, layout=layout)
    given = {"is_causal": True, "causal_alignment": "top_left"} if causal else {}
    tolerance = TOLERANCES[dtype]
    for train in (True, False):
        with torch.set_grad_enabled(train):
            out, lse = attnroute.attention(*inputs, layout=layout, return_lse=True, **given)
        assert out.requires_grad == train
        bhsd = [as_bhsd(t, layout).detach().requires_grad_() for t in inputs]
        want = stock(*bhsd, is_causal=causal, enable_gqa=True)
        assert out.dtype == want.dtype
        torch.testing.assert_close(as_bhsd(out, layout), want, rtol=tolerance, atol=tolerance)
        if 0 not in sizes:
            allowed = torch.ones(sizes[1:], dtype=torch.bool).tril() if causal else None
            _, true_lse = attend(*bhsd, scale=None if dims[0] else 1.0, allowed=allowed)
            assert error(lse, true_lse) < 1e-5
        if train:
            grad = torch.randn(want.shape, dtype=torch.float64).to(dtype)
            got = torch.autograd.grad(out, inputs, as_bhsd(grad, layout), allow_unused=True)
            true = torch.autograd.grad(want, bhsd, grad, allow_unused=True)
            for a, b, source in zip(got, true, inputs, strict=True):
                assert a.shape == source.shape
                assert a.dtype == dtype
                assert error(as_bhsd(a, layout), b) < 3e-2


FEATURES = {
    "mask": {"mask": masks.KeyPadding(lengths=[3, 1])},
    "bias": {"bias": torch.randn(4, 5)},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 3.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
}


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("backend", [None, "chunked"])
def test_beside_every_feature(dims, feature, backend):
    inputs = [t.detach() for t in tensors(dims, (2, 4, 5))]
    given = dict(feature)
    out = attnroute.attention(*inputs, backend=backend, **given)
    if "mask" in given:
        given["allowed"] = given.pop("mask").materialize(4, 5, batch=2)
    want, _ = attend(*inputs, **{"scale": None if dims[0] else 1.0, **given})
    assert out.shape == want.shape
    assert error(out, want) < 1e-5


def test_packed_sequences_and_compiled_calls_without_features():
    inputs = [torch.randn(9, 2, size) for size in (0, 0, 8)]
    sums = torch.tensor([0, 4, 9])
    out = attnroute.attention(*inputs, layout="thd", cu_seqlens_q=sums)
    torch.testing.assert_close(out[:4], inputs[2][:4].mean(0).expand(4, 2, 8))
    run = torch.compile(attnroute.attention, backend="aot_eager", fullgraph=True)
    for dims in DIMS.values():
        given = [t.detach() for t in tensors(dims, (2, 4, 5))]
        torch.testing.assert_close(run(*given), attnroute.attention(*given))


def alike(got, want):
    assert got.is_meta
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert got.requires_grad == want.requires_grad


def on_meta(*given):
    return [t.detach().to("meta").requires_grad_(t.requires_grad) for t in given]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tensors_without_values_get_what_the_cpu_gives(case, dtype, train):
    inputs = [t.detach().to(dtype).requires_grad_(train) for t in problem(70)]
    extras = case.tensors(70, "cpu")
    want = case.call(*inputs, *extras)
    without = on_meta(*inputs)
    got = case.call(*without, *on_meta(*extras))
    alike(got, want)
    if train:
        got.sum().backward()
        assert all(alike.grad.is_meta and alike.grad.shape == alike.shape for alike in without)
        assert all(t.grad.dtype == dtype for t in without)


def kept(b, h, i, j):
    return i >= j


def shifted(score, b, h, i, j):
    return score + (i - j)


PROGRAMS = {
    "a function": {"mask": masks.Function(kept)},
    "a score function": {"bias": biases.Function(shifted)},
    "a tree": {"mask": ~(masks.Function(kept) & masks.Causal()) | masks.Window(3)},
}


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("given", PROGRAMS.values(), ids=PROGRAMS)
def test_functions_beside_tensors_without_values(given, backend):
    inputs = problem(40, train=True)
    want, want_lse = attnroute.attention(*inputs, **given, backend=backend, return_lse=True)
    got, lse = attnroute.attention(*on_meta(*inputs), **given, backend=backend, return_lse=True)
    alike(got, want)
    assert (lse.shape, lse.dtype, lse.is_meta) == (want_lse.shape, want_lse.dtype, True)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_neither_features_nor_values(dims):
    inputs = tensors(dims, (2, 4, 5))
    alike(attnroute.attention(*on_meta(*inputs)), attnroute.attention(*inputs))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        out = attnroute.attention(query, key, value, is_causal=True, layout="bshd", dropout_p=0.1)
        return out.flatten(2)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_model_under_the_device_meta(keeps):
    with torch.device("meta"):
        model, x = Block(), torch.randn(2, 30, 16, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if keeps else model(x)
        out.sum().backward()
    assert out.is_meta
    assert out.shape == (2, 30, 16)
    assert x.grad.shape == x.shape
    assert model.project.weight.grad.is_meta


@pytest.fixture
def default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


REAL = {
    "positions": {"mask": masks.Documents(position_ids=torch.arange(300) % 100)},
    "sums": {"mask": masks.Documents(cu_seqlens=torch.tensor([0, 100, 300]))},
    "ids": {"mask": masks.Documents(ids=torch.arange(300) // 100)},
    "padding": {"mask": masks.KeyPadding(lengths=[7, 300])},
    "counts": {"mask": masks.KeyPadding(left=torch.tensor([7, 100]))},
    "prefix": {"mask": masks.PrefixLM([7, 300])},
    "a look": {"mask": torch.ones(300, 300).tril().bool()},
    "no look": {"mask": torch.rand(300, 300) > 0.5},
    "a tree": {"mask": (masks.Causal() | masks.Window(3)) & ~masks.KeyPadding(lengths=[1, 2])},
    "function": {"mask": masks.Function(kept)},
    "biases": {"mask": torch.zeros(300, 300), "bias": torch.zeros(300, 300).half()},
    "sink": {"sink": torch.zeros(2)},
    "slopes": {"alibi_slopes": torch.ones(2)},
}
QUERY = torch.randn(2, 2, 300, 8)


@pytest.mark.parametrize("backend", [None, "chunked", "math"])
@pytest.mark.parametrize("given", REAL.values(), ids=REAL)
def test_real_tensors_beside_a_default_device_of_meta(given, backend, default_device):
    try:
        out = attnroute.attention(QUERY, QUERY, QUERY, **given, backend=backend)
    except attnroute.NoBackendError:
        assert backend == "math"
        return
    torch.set_default_device(None)
    torch.testing.assert_close(out, attnroute.attention(QUERY, QUERY, QUERY, **given, backend=backend))


def test_dropout_beside_a_default_device_of_meta(default_device):
    out = attnroute.attention(QUERY, QUERY, QUERY, dropout_p=0.5, backend="chunked")
    assert out.is_cpu


def test_a_mask_with_values_beside_tensors_without_is_refused():
    query = QUERY.to("meta")
    with pytest.raises(attnroute.ArgumentError, match=r"mask requires query's device \(meta\); got cpu"):
        attnroute.attention(query, query, query, torch.ones(300, 300).bool())
    assert attnroute.explain(query, query, query).host.arch == "cpu"
