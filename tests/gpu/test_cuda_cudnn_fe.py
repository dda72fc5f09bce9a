"""CUDNN_FE on a CUDA device: the cuDNN frontend's operators run where they are named, and equal float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import package_runs
from support.cuda_problems import band, problem
from support.kernel_names import names_of
from support.package_runs import check, check_packed
from support.reference import attend, error

from attnroute import attention, masks
from attnroute.memory import remembered, reset

pytestmark = pytest.mark.gpu
BACKEND = "cudnn_fe"
GRAPHS = ("_forward_graph", "_backward_graph")
LENGTHS = [50, 1, 0, 279, 0, 128]


@pytest.fixture(autouse=True)
def _package():
    package_runs.require("cudnn", "nvidia-cudnn-frontend")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_causal_grouped_heads(head_dim, dtype):
    inputs = problem(head_dim=head_dim, dtype=dtype)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0), tolerance=2e-2)


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_wide_heads_forward(head_dim, heads_kv):
    """Beyond 256 this is the fastest forward there is on Hopper; no kernel has a backward."""
    inputs = problem(head_dim=head_dim, heads_kv=heads_kv, seqlen_q=257, seqlen_kv=257)
    check(BACKEND, inputs, is_causal=True, allowed=band(257, 257, None, 0), train=False)


@pytest.mark.parametrize("case", package_runs.BANDS)
def test_bands(case):
    package_runs.check_band(BACKEND, case)


@pytest.mark.parametrize("scale", [0.02, 1.5])
def test_scale_without_a_mask(scale):
    check(BACKEND, problem(seqlen_q=130, seqlen_kv=256), scale=scale)


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_very_negative_scores(length):
    """Every score lies near -250: what a kernel adds to or divides by must not vanish."""
    inputs = problem(heads_kv=4, seqlen_q=length, seqlen_kv=length, mean=4.0)
    check(BACKEND, inputs, is_causal=True, allowed=band(length, length, None, 0))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"window": (20, 0)}], ids=str)
def test_sequences(arguments, train):
    check_packed(BACKEND, LENGTHS, heads=(8, 2), train=train, **arguments)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=str)
def test_sequences_with_keys_of_their_own(arguments):
    """Among them queries without keys, keys without queries, and more queries than keys."""
    lengths = ([200, 3, 70, 0, 0, 150, 1], [60, 290, 0, 40, 0, 150, 77])
    check_packed(BACKEND, *lengths, heads=(4, 4), **arguments)


def test_documents():
    ids = torch.repeat_interleave(torch.arange(4, device="cuda"), torch.tensor([50, 1, 0, 79], device="cuda"))
    allowed = (ids[:, None] == ids) & band(130, 130, None, 0)
    mask = masks.Causal() & masks.Documents(lengths=[50, 1, 0, 79])
    check(BACKEND, problem(batch=3), mask, allowed=allowed)


@pytest.mark.parametrize("padded", [False, True])
def test_decoding(padded):
    package_runs.check_decode(BACKEND, padded=padded)


@pytest.mark.parametrize("train", [True, False])
def test_sinks(train):
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda", requires_grad=train)
    check(BACKEND, problem(), is_causal=True, allowed=band(130, 130, None, 0), train=train, sink=sink)


def test_padded_batches_run_graphs_without_the_operators():
    """A graph that was built is executed again: with other values, on another stream, by another thread."""
    given = {"is_causal": True, "backend": BACKEND}
    reset()

    def step(size=1.0):
        inputs = [(t.detach() * size).requires_grad_() for t in problem()]
        want, _ = attend(*inputs, allowed=band(130, 130, None, 0))
        out = attention(*inputs, **given)
        cotangent = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, cotangent)
        wanted = torch.autograd.grad(want, inputs, cotangent.double())
        torch.cuda.current_stream().synchronize()
        assert error(out, want) <= 2e-2
        for got, true in zip(grads, wanted, strict=True):
            assert error(got, true.double(), floor=2.0) <= 4e-2

    def on_a_stream():
        with torch.cuda.stream(torch.cuda.Stream()):
            step()

    for size in (1.0, 0.5):
        step(size)
    _, _, names = names_of(step)
    assert f"attnroute::{BACKEND}_backward" in names
    assert not any(name.startswith("cudnn::") for name in names), sorted(names)
    on_a_stream()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(on_a_stream) for _ in range(4)]:
            future.result()
    kept = {memory.owner: memory.size() for memory in remembered()}
    assert [kept[f"executors.packages.cudnn_graph.{name}"] for name in GRAPHS] == [1, 1]


@pytest.mark.parametrize("form", ["row gap", "bshd"])
def test_storage(form):
    def stored(tensor):
        if form == "bshd":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    check(BACKEND, [stored(t.detach()) for t in problem()], is_causal=True, allowed=band(130, 130, None, 0))


def test_calls_outside_the_rows_are_rejected():
    inputs = [t.detach() for t in problem()]
    package_runs.rejected(BACKEND, inputs, softcap=20.0)
    package_runs.rejected(BACKEND, inputs, dropout_p=0.1)
    package_runs.rejected(BACKEND, [t.float() for t in inputs])


def test_compiled():
    package_runs.check_compiled(BACKEND)


@pytest.mark.parametrize("given", [{"is_causal": True}, {}], ids=str)
def test_captured_in_a_cuda_graph(given):
    mask = None if given else masks.Documents(lengths=[100, 0, 156])
    package_runs.check_captured(BACKEND, mask, **given)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    package_runs.check_checkpoint(BACKEND, use_reentrant=use_reentrant)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_backwards_run_again_and_together():
    package_runs.check_again(BACKEND, together=True)
