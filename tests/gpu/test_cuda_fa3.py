"""FA3 on a CUDA device: FlashAttention-3's kernels run where they are named, and equal float64."""

from __future__ import annotations

import pytest
import torch
from support import package_runs
from support.cuda_problems import band, problem
from support.kernel_names import names_of
from support.package_runs import check, check_packed

import attnroute
from attnroute import masks
from attnroute.executors.packages import fa3

pytestmark = pytest.mark.gpu
BACKEND = "fa3"
LENGTHS = [50, 1, 0, 279, 0, 128]


@pytest.fixture(autouse=True)
def _package():
    try:
        fa3._operators()
    except ImportError as error:
        pytest.fail(f"{error} Put one of them on PYTHONPATH to run this test.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 104, 128, 192, 256])
def test_causal_grouped_heads(head_dim, dtype):
    inputs = problem(head_dim=head_dim, dtype=dtype)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0), tolerance=2e-2)


@pytest.mark.parametrize("head_dim", [60, 20])
def test_head_dims_are_padded(head_dim):
    check(BACKEND, problem(head_dim=head_dim), is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("head_dims", [(192, 128), (64, 256), (64, 512)])
def test_value_head_differs(head_dims):
    head_dim, head_dim_v = head_dims
    inputs = problem(head_dim=head_dim, head_dim_v=head_dim_v)
    allowed = band(130, 130, None, 0)
    check(BACKEND, inputs, is_causal=True, allowed=allowed, train=head_dim_v <= 256)


@pytest.mark.parametrize("case", ["causal", "bottom right", "window", "window, bottom right", "both sides"])
def test_bands(case):
    package_runs.check_band(BACKEND, case)


@pytest.mark.parametrize("window", [(20, None), (None, 250), (30, 250), (20, 7), (None, 0)], ids=str)
def test_more_queries_than_keys(window):
    left, right = window
    sides = (None if left is None else -200 - left, None if right is None else right - 200)
    inputs = problem(seqlen_q=300, seqlen_kv=100)
    mask = masks.Window(left, right, "bottom_right")
    check(BACKEND, inputs, mask, allowed=band(300, 100, *sides))


@pytest.mark.parametrize("length", [128, 257, 1024])
def test_very_negative_scores(length):
    inputs = problem(heads_kv=4, seqlen_q=length, seqlen_kv=length, mean=4.0)
    check(BACKEND, inputs, is_causal=True, allowed=band(length, length, None, 0))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"window": (20, 0)}], ids=str)
def test_sequences(arguments, train):
    check_packed(BACKEND, LENGTHS, heads=(8, 2), train=train, **arguments)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"window": (20, 3)}], ids=str)
def test_sequences_with_keys_of_their_own(arguments):
    """Among them queries without keys, keys without queries, and more queries than keys."""
    check_packed(BACKEND, [200, 3, 70, 0, 0, 150, 1], [60, 290, 0, 40, 0, 150, 77], **arguments)


def test_sequences_of_at_most_one_query():
    check_packed(BACKEND, [1, 0, 1, 1], [60, 290, 1, 0], heads=(8, 2), train=False)


def test_documents():
    ids = torch.repeat_interleave(torch.arange(4, device="cuda"), torch.tensor([50, 1, 0, 79], device="cuda"))
    allowed = (ids[:, None] == ids) & band(130, 130, None, 0)
    mask = masks.Causal() & masks.Documents(lengths=[50, 1, 0, 79])
    check(BACKEND, problem(batch=3), mask, allowed=allowed)


@pytest.mark.parametrize("counts", [[130, 0], [77, 130]], ids=str)
def test_key_padding(counts):
    kept = torch.arange(130, device="cuda") < torch.tensor(counts, device="cuda")[:, None]
    check(BACKEND, problem(), masks.KeyPadding(lengths=counts), allowed=kept[:, None, None])


@pytest.mark.parametrize("padded", [False, True])
def test_decoding(padded):
    package_runs.check_decode(BACKEND, padded=padded)


def test_decoding_splits_the_keys():
    """The rows let the kernel choose, and so few blocks leave the card idle: a second kernel sums up."""
    inputs = [t.detach() for t in problem(heads_q=8, seqlen_q=1, seqlen_kv=8192, head_dim=128)]
    _, on_device, _ = names_of(lambda: attnroute.attention(*inputs, backend=BACKEND))
    assert any("Combine" in name for name in on_device), sorted(on_device)


@pytest.mark.parametrize("train", [True, False])
def test_sinks(train):
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda", requires_grad=train)
    check(BACKEND, problem(), is_causal=True, allowed=band(130, 130, None, 0), train=train, sink=sink)


@pytest.fixture
def strictly():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("heads_kv", [8, 2])
def test_a_deterministic_backward_repeats_itself(strictly, heads_kv):
    inputs = problem(seqlen_q=1024, seqlen_kv=1024, heads_q=8, heads_kv=heads_kv)
    cotangent = torch.randn_like(inputs[0])
    found = []
    for _ in range(3):
        out = attnroute.attention(*inputs, is_causal=True, deterministic=True, backend=BACKEND)
        found.append(torch.autograd.grad(out, inputs, cotangent))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("form", ["row gap", "bshd", "last stride", "shifted"])
def test_storage(form):
    def stored(tensor):
        if form == "bshd":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if form == "last stride":
            return tensor.transpose(2, 3).contiguous().transpose(2, 3)
        if form == "shifted":
            return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    check(BACKEND, [stored(t.detach()) for t in problem()], is_causal=True, allowed=band(130, 130, None, 0))


def test_calls_outside_the_rows_are_rejected():
    inputs = [t.detach() for t in problem()]
    package_runs.rejected(BACKEND, inputs, dropout_p=0.1)
    package_runs.rejected(BACKEND, [t.float() for t in inputs])
    package_runs.rejected(BACKEND, [t.detach() for t in problem(head_dim=264)])
    package_runs.rejected(BACKEND, [t.detach() for t in problem(head_dim=128, head_dim_v=64)])
    top_left = [t.detach() for t in problem(seqlen_q=100, seqlen_kv=300)]
    package_runs.rejected(BACKEND, top_left, is_causal=True, causal_alignment="top_left")


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
