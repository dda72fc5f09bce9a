"""A kernel's forward with chunked's backward on a CUDA device, at head dimensions no fused kernel trains."""

from __future__ import annotations

import pytest
import torch
from support.cuda_problems import TOLERANCE, band, problem
from support.kernel_names import names_of
from support.package_runs import require
from support.reference import attend, error

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu
BACKEND = "cudnn_fe"


@pytest.fixture(autouse=True)
def _package():
    require("cudnn", "nvidia-cudnn-frontend")


def step(inputs, call, cotangent):
    out = call(*inputs)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


CASES = {
    "causal": ({"is_causal": True}, (None, 0)),
    "full": ({}, (None, None)),
    "window": ({"window": (40, 0)}, (-40, 0)),
}


@pytest.mark.parametrize("length", [257, 512])
@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_of_two_kernels_equal_float64(case, head_dim, length):
    given, sides = CASES[case]
    inputs = problem(seqlen_q=length, seqlen_kv=length, head_dim=head_dim)
    decision = attnroute.explain(*inputs, backend=BACKEND, **given)
    assert decision.selected == BACKEND, str(decision)
    assert "backward_from_chunked" in decision.verdict(BACKEND).repairs
    want, _ = attend(*inputs, allowed=band(length, length, *sides))
    cotangent = torch.randn_like(want)

    def run():
        return step(inputs, lambda *t: attnroute.attention(*t, backend=BACKEND, **given), cotangent)

    run()
    found, on_device, names = names_of(run)
    assert f"attnroute::{BACKEND}" in names
    assert any("cudnn" in name for name in on_device), sorted(on_device)
    wanted = (want, *torch.autograd.grad(want, inputs, cotangent.to(inputs[0].dtype).double()))
    for name, got, true in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[got.dtype], name


def test_documents():
    ids = torch.arange(512, device="cuda") // 200
    allowed = (ids[:, None] == ids) & band(512, 512, None, 0)
    inputs = problem(seqlen_q=512, seqlen_kv=512, head_dim=512)
    want, _ = attend(*inputs, allowed=allowed)
    cotangent = torch.randn_like(want)
    mask = masks.Causal() & masks.Documents(lengths=[200, 200, 112])
    found = step(inputs, lambda *t: attnroute.attention(*t, mask, backend=BACKEND), cotangent)
    wanted = (want, *torch.autograd.grad(want, inputs, cotangent.to(inputs[0].dtype).double()))
    for name, got, true in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[got.dtype], name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_of_a_graph(backend):
    inputs = problem(seqlen_q=384, seqlen_kv=384, head_dim=512)

    def call(query, key, value):
        return attnroute.attention(query, key, value, is_causal=True, backend=BACKEND)

    cotangent = torch.randn_like(call(*inputs))
    want = step(inputs, call, cotangent)
    got = step(inputs, torch.compile(call, fullgraph=True, backend=backend), cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
