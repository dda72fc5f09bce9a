"""The compiled call of a structure as autograd may use it: its backward runs as often as it is asked to.

torch has no kernel of FlexAttention that trains on the CPU, so its definition stands in its place; what
compiles it and runs it is what compiles and runs the kernels of CUDA devices.
"""

from __future__ import annotations

import pytest
import torch
from support.backwards import check_again, check_some, one
from torch._functorch import config
from torch.nn.attention import flex_attention

from attnroute.executors.flex import run as flex
from attnroute.executors.protocol import Inputs, Plan
from attnroute.memory import reset


def composed(query, key, value, score_mod, block_mask, *, scale, enable_gqa, return_lse=False, **_):
    assert (score_mod, block_mask, enable_gqa) == (None, None, False)
    scores = (query @ key.transpose(-1, -2)).exp().log() * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    out = scores.softmax(-1) @ value
    return (out, flex_attention.AuxOutput(lse=scores.logsumexp(-1))) if return_lse else out


@pytest.fixture(autouse=True)
def _stands_in(monkeypatch):
    def attend(*given, return_aux=None, **rest):
        return composed(*given, return_lse=return_aux is not None, **rest)

    monkeypatch.setattr(flex_attention, "flex_attention", attend)
    reset()
    torch.compiler.reset()
    yield
    reset()
    torch.compiler.reset()


def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7)]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("backend", ["flex", "flex_fa4"])
def test_a_backward_runs_again(backend, return_lse):
    leaves = tensors()
    plan = Plan(backend, (), training=True, return_lse=return_lse, device_type="cuda")

    def run():
        return flex.run(Inputs(*leaves), plan)[0]

    # Whatever the first backward of the compiled code asks for, the next ones may ask for something else.
    one(run, leaves)
    check_again(run, leaves)
    if not return_lse:
        check_some(run, leaves)


def test_other_compilations_keep_what_their_owner_chose():
    leaves = tensors()
    before = config.donated_buffer
    assert before
    plan = Plan("flex", (), training=True, return_lse=False, device_type="cuda")
    flex.run(Inputs(*leaves), plan)[0].sum().backward()
    assert config.donated_buffer is before
