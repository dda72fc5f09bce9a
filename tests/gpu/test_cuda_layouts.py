"""Every backend in every memory layout of its inputs and of the output's gradient, against float64."""

from __future__ import annotations

import pytest
import torch
from support import layouts
from support.cuda_problems import band
from support.package_runs import DISTRIBUTIONS, require
from support.reference import attend, error
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnroute

pytestmark = pytest.mark.gpu
BACKENDS = ("flash", "cudnn", "efficient", "flex", "chunked", "math", *DISTRIBUTIONS)
"""All but te and fa2, whose builds have files of their own; these run `layouts.check` as well."""
ONE_QUERY = ("flash", "efficient", "flex", "chunked", "math", "fa3", "fa4")
"""Those that train a single query."""


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(b, k) for b in BACKENDS for k in layouts.KINDS if k != "one query" or b in ONE_QUERY],
)
def test_layouts(backend, kind):
    if backend in DISTRIBUTIONS:
        require(*DISTRIBUTIONS[backend])
    layouts.check(backend, kind)


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize("how", ["eager", "compiled", "torch's function after it"])
def test_torch_ran_the_call_before_with_a_gradient_of_other_strides(how, heads_kv):
    """torch keeps one plan of the backward for all gradients of a call; ours is apart from that of others."""
    torch.manual_seed(0)
    sizes = ((2, 136, 8, 64), (2, 136, heads_kv, 64), (2, 136, heads_kv, 64))
    of_card = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [torch.randn(size, **of_card).transpose(1, 2).requires_grad_() for size in sizes]
    grads = {
        "contiguous": torch.randn(2, 8, 136, 64, **of_card),
        "tokens outermost": torch.randn(2, 136, 8, 64, **of_card).transpose(1, 2),
    }
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = attend(*wide, allowed=band(136, 136, None, 0))[0]

    def stock():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(*leaves, is_causal=True, enable_gqa=heads_kv != 8)

    def ours():
        return attnroute.attention(*leaves, is_causal=True, backend="cudnn")

    def held(run, lies):
        got = torch.autograd.grad(run(), leaves, grads[lies])
        true = torch.autograd.grad(want, wide, grads[lies].double(), retain_graph=True)
        for one, expected in zip(got, true, strict=True):
            assert error(one, expected) < 0.02, lies

    if how == "torch's function after it":
        held(ours, "tokens outermost")
        held(stock, "contiguous")
        return
    torch.autograd.grad(stock(), leaves, grads["contiguous"])
    run = torch.compile(ours) if how == "compiled" else ours
    for _ in range(3):
        for lies in grads:
            held(run, lies)
