"""Triton kernels in the place of operators: each against float64, and that calls that came often run them."""

from __future__ import annotations

import math

import pytest
import torch
from support import fused_standins, layouts
from support.kernel_names import names_of
from support.left_out import COUNTS, LENGTH, MEMORY, RIGHT, hold, inputs_of
from support.reference import TOLERANCE, attend, error

import attnroute
from attnroute import masks
from attnroute.executors import fused
from attnroute.executors.fused import Prebound
from attnroute.executors.prepare.kernels import CLEAR, GRADIENT, SHRINK, pieces
from attnroute.memory import reset

pytestmark = pytest.mark.gpu

BACKENDS = ("flash", "cudnn", "efficient")
SHAPES = [(2, 4, 130, 64), (1, 3, 77, 20), (2, 2, 1, 192), (1, 8, 4096, 128), (3, 5, 33, 512)]
NAMES = ("query", "key", "value", "sink")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The first call of a kind is often enough."""
    monkeypatch.setattr(fused, "OFTEN", 0)
    torch.manual_seed(0)
    reset()
    yield
    reset()


def rows(shape, memory, dtype):
    """Return an output as kernels leave it, heads or tokens outermost."""
    batch, heads, seqlen, dim = shape
    if memory == "bhsd":
        return torch.randn(shape, device="cuda", dtype=dtype)
    return torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)


def lse_of(shape, form):
    """Return log-sum-exps as kernels give them, some of rows with no key."""
    batch, heads, seqlen, _ = shape
    lse = torch.randn(batch, heads, seqlen + (32 if form == "padded" else 0), device="cuda") * 5
    if seqlen > 4:
        lse[:, :, 3], lse[:, 0, 4] = -math.inf, math.inf
    return lse.unsqueeze(-1) if form == "column" else lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["rows", "padded", "column"])
@pytest.mark.parametrize("memory", ["bhsd", "tokens outermost"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_share_of_the_keys_and_the_gradient_of_the_sink(shape, memory, form, dtype):
    out, lse = rows(shape, memory, dtype), lse_of(shape, form)
    sink = torch.randn(shape[1], device="cuda").to(dtype)
    sink[0] = -math.inf
    share, both = fused_standins.shares(out, lse, sink)
    want, beyond = out.double() * share[..., None], lse[:, :, shape[2] :].clone()
    inferred = out.clone()
    assert Prebound(SHRINK[False])(inferred, lse, sink)
    assert error(inferred, want) <= TOLERANCE[dtype]
    assert Prebound(SHRINK[True])(out, lse, sink)
    assert torch.equal(out, inferred)
    torch.testing.assert_close(fused_standins.rows_of(lse, out).double(), both, rtol=1e-6, atol=1e-5)
    assert torch.equal(lse[:, :, shape[2] :], beyond)
    dense = rows(shape, "tokens outermost", dtype)
    # Gradients lie as what comes after the call leaves them: that of a sum has one element.
    one = torch.ones((), device="cuda", dtype=dtype).expand(shape)
    for grad in (dense, one, rows((*shape[:3], 2 * shape[3]), "bhsd", dtype)[..., ::2]):
        into = torch.full((pieces(out), shape[1]), math.nan, device="cuda")
        assert Prebound(GRADIENT)(grad, out, lse, sink, into)
        wanted = torch.zeros(shape[1], device="cuda", dtype=torch.float64)
        fused_standins.gradient(grad, out, lse, sink, wanted)
        assert error(into.sum(0), wanted, floor=1.0) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", sorted(MEMORY))
def test_cleared_keys_and_values(memory, dtype):
    _, key, value = inputs_of(memory, math.nan, RIGHT.cuda(), dtype, 64)
    keep = RIGHT.cuda()[:, None, :, None].clone()
    made = torch.empty_like(key), torch.empty_like(value)
    assert Prebound(CLEAR)(key, value, *made, keep)
    for source, copy in zip((key, value), made, strict=True):
        assert torch.equal(copy, torch.where(keep, source, 0.0))


def leaves(seqlen=130, *, grad):
    """Return query, key, value and sink, the tokens outermost in memory."""
    made = [torch.randn(2, seqlen, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tensors = [t.transpose(1, 2) for t in made]
    return [t.requires_grad_(grad) for t in (*tensors, torch.randn(4, device="cuda"))]


def is_seen(kernel, on_device):
    return any(kernel in name for name in on_device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_a_call_with_a_sink_runs_one_kernel_beside_attention(backend, sink_dtype):
    *qkv, sink = leaves(grad=False)
    sink = sink.to(sink_dtype)
    want, _ = attend(*qkv, sink=sink)
    for _ in range(2):
        attnroute.attention(*qkv, sink=sink, backend=backend)
    out, on_device, names = names_of(lambda: attnroute.attention(*qkv, sink=sink, backend=backend))
    layouts.check_ran(backend, on_device, names)
    assert is_seen("shrink_kernel", on_device)
    assert not is_seen("sigmoid", on_device)
    assert error(out, want) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen", [130, 3000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trained_sink_runs_one_kernel_each_way(backend, seqlen, is_causal):
    tensors = leaves(seqlen=seqlen, grad=True)
    *qkv, sink = tensors
    given = {"sink": sink, "is_causal": is_causal, "backend": backend}
    allowed = torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").tril() if is_causal else None
    want, _ = attend(*qkv, sink=sink, allowed=allowed)
    cotangent = torch.randn_like(want).to(torch.bfloat16)
    wanted = torch.autograd.grad(want, tensors, cotangent.double())

    def step():
        out = attnroute.attention(*qkv, **given)
        return out, torch.autograd.grad(out, tensors, cotangent)

    for _ in range(2):
        step()
    (out, grads), on_device, _ = names_of(step)
    assert is_seen("shrink_kernel", on_device)
    assert is_seen("sink_gradient_kernel", on_device)
    assert error(out, want) <= TOLERANCE[torch.bfloat16]
    for name, got, expected in zip(NAMES, grads, wanted, strict=True):
        assert error(got, expected, floor=2.0) <= 2 * TOLERANCE[torch.bfloat16], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_again_gives_the_same_bits(backend):
    *qkv, sink = leaves(seqlen=3000, grad=True)
    for _ in range(3):
        out = attnroute.attention(*qkv, sink=sink, backend=backend)
    found = [torch.autograd.grad(out.sum(), sink, retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    (expected,) = torch.autograd.grad(attend(*qkv, sink=sink)[0].sum(), sink)
    assert error(found[0], expected, floor=2.0) <= 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_into_a_sink_before_the_backward_is_seen(backend):
    *qkv, sink = leaves(grad=True)
    for _ in range(3):
        out = attnroute.attention(*qkv, sink=sink, backend=backend)
    with torch.no_grad():
        sink.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_captured_launches_what_was_compiled_before(backend):
    *qkv, sink = leaves(grad=False)

    def run():
        return attnroute.attention(*qkv, sink=sink, backend=backend)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        sink.normal_()
        graph.replay()
        assert error(out, attend(*qkv, sink=sink)[0]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("memory", sorted(MEMORY))
def test_padding_that_holds_nan_is_cleared_in_one_launch(memory):
    """`efficient` has its mask padded at this length, and goes the general way."""
    keep, mask = RIGHT.cuda(), masks.KeyPadding(lengths=COUNTS.cuda())
    inputs = inputs_of(memory, math.nan, keep, torch.bfloat16, 64, LENGTH)

    def run():
        hold(inputs, mask, keep, False, TOLERANCE[torch.bfloat16], train=False, backend="cudnn")

    for _ in range(2):
        run()
    _, on_device, _ = names_of(run)
    assert is_seen("clear_kernel", on_device) == ("between words" not in memory)
