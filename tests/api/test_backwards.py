"""Backwards of `attention()`: twice, of some inputs, of several outputs at once; each backward of ours."""

from __future__ import annotations

import pytest
import torch
from support.backwards import CHECKS, near
from support.reference import attend

import attnroute
from attnroute import masks

HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_KV = 4, 2, 7, 9
BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}


def tensors():
    torch.manual_seed(0)
    shapes = ((HEADS, SEQLEN_Q), (HEADS_KV, SEQLEN_KV), (HEADS_KV, SEQLEN_KV))
    return [torch.randn(2, *shape, 8, requires_grad=True) for shape in shapes]


def extra(name):
    torch.manual_seed(1)
    if name == "mask":
        return torch.rand(2, 1, SEQLEN_Q, SEQLEN_KV) > 0.3
    shape = (HEADS, SEQLEN_Q, SEQLEN_KV) if name == "bias" else (HEADS,)
    return torch.rand(1, *shape).requires_grad_() if name == "bias" else torch.rand(shape).requires_grad_()


def scored(score, b, h, i, j):
    return score * 0.5 + (i - j)


CASES = {
    "flash": ("flash", (), {}),
    "flash, mask": ("flash", ("mask",), BOTTOM_RIGHT),
    "flash, sink": ("flash", ("sink",), BOTTOM_RIGHT),
    "flash, sink and mask": ("flash", ("sink", "mask"), {}),
    "chunked": ("chunked", (), BOTTOM_RIGHT),
    "chunked, bias and sink": ("chunked", ("bias", "sink"), {"softcap": 3.0}),
    "chunked, slopes": ("chunked", ("alibi_slopes", "mask"), {}),
    "chunked, dropout": ("chunked", (), {"dropout_p": 0.4}),
    "chunked, function": ("chunked", (), {"bias": attnroute.biases.Function(scored)}),
    "chunked, padding": ("chunked", ("sink",), {"mask": masks.KeyPadding(lengths=[9, 4])}),
}


def call(case):
    """Return a function that runs one call, and what it trains."""
    backend, names, rest = CASES[case]
    qkv, given = tensors(), {name: extra(name) for name in names}
    leaves = [*qkv, *(t for t in given.values() if t.requires_grad)]

    def run():
        torch.manual_seed(2)
        return attnroute.attention(*qkv, backend=backend, **given, **rest)

    return run, leaves


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES)
def test_what_autograd_may_ask(case, check):
    check(*call(case))


def test_packed_sequences():
    query, key, value = (
        torch.randn(9, heads, 8, requires_grad=True) for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    sums = torch.tensor([0, 4, 9], dtype=torch.int32)

    def run():
        packed = attnroute.attention(
            query, key, value, layout="thd", cu_seqlens_q=sums, sink=torch.ones(HEADS), is_causal=True
        )
        return packed[None]

    for check in CHECKS:
        check(run, [query, key, value])


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.0, "backend": "chunked"}, {"sink": torch.ones(HEADS)}]
)
def test_jacobians(vectorize, options):
    query, key, value = (t.detach()[:1] for t in tensors())

    def own(*inputs):
        return attnroute.attention(*inputs, **options)

    def wanted(*inputs):
        return attend(*inputs, sink=options.get("sink"))[0].float()

    of = torch.autograd.functional.jacobian
    near(of(own, (query, key, value), vectorize=vectorize), of(wanted, (query, key, value)))
    if not options:
        near(torch.func.jacrev(own, (0, 1, 2))(query, key, value), of(wanted, (query, key, value)))


def test_gradients_of_the_log_sum_exp_alone():
    query, key, value = tensors()
    _, lse = attnroute.attention(query, key, value, backend="chunked", return_lse=True)
    want = torch.autograd.grad(attend(query, key, value)[1].sum(), [query, key])
    near(torch.autograd.grad(lse.sum(), [query, key], retain_graph=True), want)
    each = torch.eye(lse.numel()).view(-1, *lse.shape)
    rows = torch.autograd.grad(lse, [query, key], each, is_grads_batched=True)
    near([part.sum(0) for part in rows], want)


def test_no_sample_at_all():
    run, leaves = call("chunked")
    out = run()
    grads = torch.vmap(lambda cotangent: torch.autograd.grad(out, leaves, cotangent))(
        out.new_empty(0, *out.shape)
    )
    assert [g.shape for g in grads] == [(0, *leaf.shape) for leaf in leaves]
