"""FA4 on a CUDA device: flash-attn-4's kernels run where they are named, and equal float64.

Every configuration is compiled at its first call, for seconds, so there are few.
"""

from __future__ import annotations

import math

import pytest
import torch
from support import package_runs
from support.cuda_problems import band, problem
from support.package_runs import check, check_packed

from attnroute import masks

pytestmark = pytest.mark.gpu
BACKEND = "fa4"
LENGTHS = [50, 1, 0, 279, 0, 128]


@pytest.fixture(autouse=True)
def _package():
    package_runs.require("flash_attn.cute", "flash-attn-4")


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)]
)
def test_causal_grouped_heads(head_dim, dtype):
    inputs = problem(head_dim=head_dim, dtype=dtype)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0), tolerance=2e-2)


def test_unequal_head_dims():
    inputs = problem(heads_kv=4, head_dim=192, head_dim_v=128)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("head_dim", [72, 104])
def test_head_dims_whose_gradient_is_wrong_run_forward_alone(head_dim):
    inputs = problem(head_dim=head_dim)
    check(BACKEND, inputs, is_causal=True, allowed=band(130, 130, None, 0), train=False)
    package_runs.rejected(BACKEND, inputs, is_causal=True)


@pytest.mark.parametrize("case", ["bottom right", "window", "both sides"])
def test_bands(case):
    package_runs.check_band(BACKEND, case)


@pytest.mark.parametrize("length", [257, 1024])
def test_very_negative_scores(length):
    inputs = problem(heads_kv=4, seqlen_q=length, seqlen_kv=length, mean=4.0)
    check(BACKEND, inputs, is_causal=True, allowed=band(length, length, None, 0))


def test_softcap():
    check(BACKEND, problem(), is_causal=True, allowed=band(130, 130, None, 0), softcap=15.0)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"window": (20, 0)}], ids=str)
def test_sequences(arguments):
    check_packed(BACKEND, LENGTHS, heads=(8, 2), **arguments)


def test_sequences_with_keys_of_their_own():
    check_packed(BACKEND, [200, 3, 70, 0, 0, 150, 1], [60, 290, 0, 40, 0, 150, 77], is_causal=True)


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
    """Of float32: rounded to bfloat16, 9.98 would show in the log-sum-exp."""
    sink = torch.tensor([0.3, -1.7, 9.98, -math.inf], device="cuda", requires_grad=train)
    check(BACKEND, problem(), is_causal=True, allowed=band(130, 130, None, 0), train=train, sink=sink)


@pytest.mark.parametrize("form", ["row gap", "bshd"])
def test_storage(form):
    def stored(tensor):
        if form == "bshd":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]

    check(BACKEND, [stored(t.detach()) for t in problem()], is_causal=True, allowed=band(130, 130, None, 0))


def test_calls_outside_the_rows_are_rejected():
    inputs = [t.detach() for t in problem()]
    package_runs.rejected(BACKEND, inputs, dropout_p=0.1)
    package_runs.rejected(BACKEND, [t.float() for t in inputs])
    package_runs.rejected(BACKEND, [t.detach() for t in problem(head_dim=320)])


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
