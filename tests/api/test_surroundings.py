"""Autocast, inference mode, determinism, checkpoints, compilation and dropout around a call."""

from __future__ import annotations

import math

import pytest
import torch
from support.edge_inputs import CPU_BACKENDS, close, doubles, gradients, normal
from support.reference import attend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import masks


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


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


# torch writes some forward-mode formulas in a language that it calls deprecated itself.


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


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"dropout_p": 0.4},
        {"window": (3, 1)},
        {"alibi_slopes": torch.rand(2)},
        {"sink": torch.rand(2)},
        {"mask": masks.KeyPadding(lengths=[5, 9])},
        {"mask": masks.Documents(lengths=[4, 5]) | masks.Window(1)},
    ],
)
def test_a_default_device_without_memory_changes_nothing(options):
    """What is made on the way of a call lies where its tensors lie, whatever new tensors get by default."""
    inputs = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]

    def run():
        torch.manual_seed(0)
        out = attnroute.attention(*inputs, **options)
        return out, *torch.autograd.grad(out.sum(), inputs)

    want = run()
    with torch.device("meta"):
        got = run()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
