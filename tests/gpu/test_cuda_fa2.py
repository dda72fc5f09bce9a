"""FA2 on a CUDA device: flash-attn's kernels run where they are named, and equal float64.

The package takes long to compile: a build for these tests may hold head_dim 64 and, in bfloat16, 128 alone,
and ALiBi without softcap and dropout.
"""

from __future__ import annotations

import pytest
import torch
from support import layouts, package_runs
from support.cuda_problems import TOLERANCE, band, problem
from support.package_runs import check, check_packed, hold_lse
from support.reference import attend, error

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu
BACKEND = "fa2"
LENGTHS = [50, 1, 0, 279, 0, 128]


@pytest.fixture(autouse=True)
def _package():
    package_runs.require("flash_attn_2_cuda", "flash-attn")


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (60, torch.bfloat16)],
)
def test_causal_grouped_heads(head_dim, dtype):
    """The last one is padded to 64."""
    inputs = problem(head_dim=head_dim, dtype=dtype)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0), tolerance=2e-2)


@pytest.mark.parametrize("case", ["causal", "bottom right", "window", "window, bottom right", "both sides"])
def test_bands(case):
    package_runs.check_band(BACKEND, case)


@pytest.mark.parametrize("window", [(20, None), (None, 250), (30, 250), (20, 7), (None, 0)], ids=str)
def test_more_queries_than_keys(window):
    """Sides that the function for padded batches would end too early, among others."""
    left, right = window
    sides = (None if left is None else -200 - left, None if right is None else right - 200)
    inputs = problem(seqlen_q=300, seqlen_kv=100)
    mask = masks.Window(left, right, "bottom_right")
    check(BACKEND, inputs, mask, allowed=band(300, 100, *sides))


@pytest.mark.parametrize("length", [128, 257, 1024])
def test_very_negative_scores(length):
    inputs = problem(heads_kv=4, seqlen_q=length, seqlen_kv=length, mean=4.0)
    check(BACKEND, inputs, is_causal=True, allowed=band(length, length, None, 0))


@pytest.mark.parametrize("given", [{}, {"is_causal": True}], ids=str)
def test_softcap(given):
    check(BACKEND, problem(), allowed=band(130, 130, None, 0 if given else None), softcap=15.0, **given)


@pytest.mark.parametrize("slopes", [(4,), (2, 4)])
@pytest.mark.parametrize("sides", [(None, None), (None, 0), (20, 7)], ids=str)
@pytest.mark.parametrize("lengths", [(130, 130), (100, 300), (300, 100)])
def test_alibi(lengths, sides, slopes):
    """The log-sum-exp too, which the kernel gives for other scores where the mask is causal."""
    left, right = sides
    offset = lengths[1] - lengths[0]
    low, high = (None if left is None else offset - left), (None if right is None else offset + right)
    alibi_slopes = torch.rand(slopes, device="cuda") * 0.2
    inputs = problem(seqlen_q=lengths[0], seqlen_kv=lengths[1])
    mask = None if sides == (None, None) else masks.Window(left, right, "bottom_right")
    want, want_lse = attend(*inputs, allowed=band(*lengths, low, high), alibi_slopes=alibi_slopes)
    given = {"alibi_slopes": alibi_slopes, "backend": BACKEND, "return_lse": True}
    assert attnroute.explain(*inputs, mask, **given).selected == BACKEND
    out, lse = attnroute.attention(*inputs, mask, **given)
    assert error(out, want) <= TOLERANCE[out.dtype]
    hold_lse(lse, want_lse)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, cotangent)
    for got, true in zip(grads, torch.autograd.grad(want, inputs, cotangent.double()), strict=True):
        assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[out.dtype]


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


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("train", [True, False])
def test_sinks(train, softcap):
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda", requires_grad=train)
    given = {"is_causal": True, "softcap": softcap, "sink": sink}
    check(BACKEND, problem(), allowed=band(130, 130, None, 0), train=train, **given)


def test_dropout_keeps_the_mean_and_its_gradients_are_of_the_same_weights():
    """With values of one the output is the share of weights kept; it is linear in the values."""
    query, key, value = problem(seqlen_q=512, seqlen_kv=512, batch=8)
    ones = torch.ones_like(value).requires_grad_()
    out = attnroute.attention(query, key, ones, dropout_p=0.25, backend=BACKEND)
    assert abs(out.float().mean().item() - 1.0) < 1e-2
    assert out.float().std().item() > 1e-3
    (grad,) = torch.autograd.grad(out, ones, torch.ones_like(out))
    assert abs(grad.float().sum().item() / out.float().sum().item() - 1.0) < 1e-2


@pytest.fixture
def strictly():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_deterministic_backward_repeats_itself(strictly):
    inputs = problem(seqlen_q=1024, seqlen_kv=1024, heads_q=8, heads_kv=8)
    cotangent = torch.randn_like(inputs[0])
    found = []
    for _ in range(3):
        out = attnroute.attention(*inputs, is_causal=True, deterministic=True, backend=BACKEND)
        found.append(torch.autograd.grad(out, inputs, cotangent))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("form", ["row gap", "bshd"])
def test_storage(form):
    def stored(tensor):
        if form == "bshd":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    check(BACKEND, [stored(t.detach()) for t in problem()], is_causal=True, allowed=band(130, 130, None, 0))


def test_calls_outside_the_rows_are_rejected():
    inputs = [t.detach() for t in problem()]
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


@pytest.mark.parametrize("kind", ["everything", "causal", "documents", "sequences"])
def test_layouts(kind):
    layouts.check(BACKEND, kind)
