"""The short way on a GPU: torch's own function runs the kernel that was decided, and gradients fit it."""

from __future__ import annotations

import pytest
import torch
from support.kernel_names import backend_seen, names_of
from support.reference import TOLERANCE, attend, error
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnroute
from attnroute import masks
from attnroute.api import dispatch
from attnroute.api.records import Given
from attnroute.memory import reset

pytestmark = pytest.mark.gpu

STOCK = "aten::scaled_dot_product_attention"
N = 96
FLAGS = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7
CALLS = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "bool mask": lambda: {"mask": FLAGS.cuda()},
    "window": lambda: {"window": (20, 0)},
    "padding": lambda: {"mask": masks.KeyPadding(lengths=torch.tensor([N, 50], device="cuda"))},
    "bias": lambda: {"bias": torch.randn(1, 4, N, N, device="cuda", dtype=torch.bfloat16)},
}
KERNELS = ("cudnn", "flash", "efficient")
PAIRS = [(b, c) for b in ("cudnn", "efficient") for c in CALLS] + [("flash", "plain"), ("flash", "causal")]


@pytest.fixture(autouse=True)
def fresh():
    reset()
    yield
    reset()


def tensors(*, grad=False):
    shape = (2, N, 4, 64)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    return [t.requires_grad_(grad) for t in made]


def a_bias(seqlen, *, grad):
    bias = torch.randn(1, 4, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)
    return {"bias": bias.requires_grad_(grad)}


@pytest.mark.parametrize(
    ("backend", "shape", "arguments"),
    [
        ("efficient", (2, 49, 4, 32), lambda: a_bias(49, grad=True)),
        ("efficient", (2, 49, 4, 32), lambda: a_bias(49, grad=False)),
        ("efficient", (2, 64, 4, 32), lambda: a_bias(64, grad=True)),
        ("flash", (2, 49, 4, 20), dict),
    ],
)
def test_torch_makes_its_own_preparations(backend, shape, arguments):
    """What torch would do itself is not done twice, and a bias that trains goes the short way too."""
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    inputs, given = [t.requires_grad_() for t in made], arguments()
    leaves = [*inputs, *(t for t in given.values() if t.requires_grad)]
    grad = torch.randn_like(made[0])
    want = dispatch.run(Given(*inputs, **given, backend=backend))[0]
    wanted = torch.autograd.grad(want, leaves, grad)
    attnroute.attention(*inputs, **given, backend=backend)
    choice = SDPBackend.EFFICIENT_ATTENTION if backend == "efficient" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(choice):
        # The short way is bound to these switches of torch.
        reset()
        attnroute.attention(*inputs, **given, backend=backend)
        out, on_device, names = names_of(lambda: attnroute.attention(*inputs, **given, backend=backend))
        assert STOCK in names
        assert backend_seen(on_device, names) == {backend}
    assert error(out, want) <= TOLERANCE[torch.bfloat16]
    for got, right in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        assert error(got, right) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_the_kernel_that_was_decided_runs_whatever_torch_would_select(backend, name):
    """Also where torch selects another one, or would once a switch of the process is moved."""
    inputs, arguments = tensors(), CALLS[name]()
    want = dispatch.run(Given(*inputs, **arguments, backend=backend))[0]
    for _ in range(2):
        attnroute.attention(*inputs, **arguments, backend=backend)
    for choice in (None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel([choice] if choice else list(SDPBackend.__members__.values())[1:]):
            out, on_device, names = names_of(
                lambda: attnroute.attention(*inputs, **arguments, backend=backend)
            )
        assert backend_seen(on_device, names) == {backend}, choice
        assert error(out, want) <= TOLERANCE[torch.bfloat16]


def test_torchs_function_runs_where_it_selects_what_was_decided():
    inputs = tensors()
    selected = [b for b in KERNELS if torch._fused_sdp_choice(*inputs) == torch_name(b).value]
    for _ in range(2):
        attnroute.attention(*inputs, backend=selected[0])
    _, on_device, names = names_of(lambda: attnroute.attention(*inputs, backend=selected[0]))
    assert STOCK in names
    assert backend_seen(on_device, names) == set(selected)


def torch_name(backend):
    return getattr(SDPBackend, f"{backend.upper()}_ATTENTION")


@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_in_any_memory_are_right(backend):
    """Those that lie as the output does come first: kernels keep a plan for what they saw first."""
    inputs = tensors(grad=True)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want, _ = attend(*wide)
    plain = torch.randn(2, 4, N, 64, device="cuda", dtype=torch.bfloat16)
    forms = (
        plain.transpose(1, 2).contiguous().transpose(1, 2),
        plain,
        plain.repeat_interleave(2, -1)[..., ::2],
        torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view_as(plain),
    )
    for grad in forms:
        for _ in range(3):
            out = attnroute.attention(*inputs, backend=backend)
        got = torch.autograd.grad(out, inputs, grad)
        wanted = torch.autograd.grad(want, wide, plain.double(), retain_graph=True)
        for one, other in zip(got, wanted, strict=True):
            assert error(one, other) <= 4 * TOLERANCE[torch.bfloat16]


def test_a_captured_graph_reads_a_mask_that_changes():
    query, key, value = tensors()
    mask = FLAGS.cuda()
    for _ in range(3):
        attnroute.attention(query, key, value, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnroute.attention(query, key, value, mask)
    mask.copy_(torch.ones(N, N, dtype=torch.bool).tril())
    graph.replay()
    want, _ = attend(query, key, value, allowed=mask)
    assert error(out, want) <= TOLERANCE[torch.bfloat16]


def wide_of(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


def hold(out, want, leaves, wide):
    assert error(out, want) <= TOLERANCE[torch.bfloat16]
    grad = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16)
    wanted = torch.autograd.grad(want, wide, grad.double())
    for got, right in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        assert error(got, right) <= 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [None, (20, 0)], ids=["no window", "window"])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_trained_sink_is_right(backend, window):
    """The kernel's own backward reads output and log-sum-exp, with the sink in them."""
    leaves = [*tensors(grad=True), torch.randn(4, device="cuda", requires_grad=True)]
    wide = wide_of(leaves)
    distance = torch.arange(N, device="cuda")[:, None] - torch.arange(N, device="cuda")
    allowed = None if window is None else (distance >= 0) & (distance <= window[0])
    want, _ = attend(*wide[:3], allowed=allowed, sink=wide[3])

    def call():
        return attnroute.attention(*leaves[:3], window=window, sink=leaves[3], backend=backend)

    for _ in range(2):
        call()
    out, on_device, names = names_of(call)
    assert backend_seen(on_device, names) == {backend}
    hold(out, want, leaves, wide)


@pytest.mark.parametrize("backend", KERNELS)
def test_sequences_are_right(backend):
    sums = torch.tensor([0, 30, 30, 71, N], device="cuda", dtype=torch.int32)
    whole = torch.randn(N, 12, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in whole.split(4, 1)]
    wide = wide_of(leaves)
    documents = masks.Documents(cu_seqlens=sums) & masks.Causal()
    allowed = documents.materialize(N, N, device=torch.device("cuda"))
    want, _ = attend(*(t.transpose(0, 1)[None] for t in wide), allowed=allowed)

    def call():
        return attnroute.attention(
            *leaves, layout="thd", cu_seqlens_q=sums, max_seqlen_q=41, is_causal=True, backend=backend
        )

    for _ in range(2):
        call()
    out, on_device, names = names_of(call)
    assert backend_seen(on_device, names) == {backend}
    hold(out, want[0].transpose(0, 1), leaves, wide)
