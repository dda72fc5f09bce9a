"""`chunked` under torch.compile: one graph, the same numbers, fresh dropout in every call."""

from __future__ import annotations

import pytest
import torch
from support.chunked_compare import chunked_attention
from support.chunked_reference import error

from attnroute.masks.lowered.form import LoweredMask

IDS = torch.arange(40)[None] // 15
MASKS = {
    "causal": LoweredMask(band_hi=0),
    "documents": LoweredMask(
        band_lo=-9, document_ids_q=IDS, document_ids_kv=IDS, document_bounds=(0, 15, 30, 40)
    ),
    "dense": LoweredMask(key_keep=IDS < 2, dense=(IDS + IDS.mT) % 2 == 0),
}


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inputs(length=40):
    torch.manual_seed(0)
    query = torch.randn(1, 4, length, 8, requires_grad=True)
    return query, *(torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(2))


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_compiled_equals_eager(mask):
    query, key, value = inputs()
    bias = torch.randn(4, 1, 40, requires_grad=True)
    sink = torch.randn(4, requires_grad=True)
    leaves = (query, key, value, bias, sink)

    def attend(query, key, value, bias, sink):
        return chunked_attention(query, key, value, mask, bias=bias, sink=sink, softcap=4.0, block_q=16)

    results = []
    for run in (attend, compiled(attend)):
        out, lse = run(*leaves)
        results.append((out, lse, *torch.autograd.grad(out.pow(2).sum() + lse.sum(), leaves)))
    for got, want in zip(*results[::-1], strict=True):
        assert got.shape == want.shape
        assert error(got, want) < 1e-6


def test_only_wanted_gradients_come_out_of_the_graph():
    query, key, value = inputs()

    def attend(query, key, value):
        return chunked_attention(query, key, value, MASKS["causal"])[0]

    leaves = (query.detach(), key, value.detach())
    (got,) = torch.autograd.grad(compiled(attend)(*leaves).sum(), [key])
    (want,) = torch.autograd.grad(attend(*leaves).sum(), [key])
    assert error(got, want) < 1e-6


def test_lengths_may_be_dynamic():
    def attend(query, key, value):
        return chunked_attention(query, key, value, MASKS["causal"])[0]

    run = compiled(attend, dynamic=True)
    for length in (40, 56):
        tensors = inputs(length)
        assert error(run(*tensors), attend(*tensors)) < 1e-6


def test_compiled_dropout_follows_the_seed_and_changes_between_calls():
    tensors = inputs()

    def attend(query, key, value):
        return chunked_attention(query, key, value, MASKS["causal"], dropout_p=0.5)[0]

    run = compiled(attend)
    torch.manual_seed(1)
    first, second = run(*tensors), run(*tensors)
    torch.manual_seed(1)
    again = run(*tensors)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    grads = [torch.autograd.grad(out.pow(2).sum(), tensors) for out in (first, again)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_operator_keeps_torchs_rules():
    query, key, value = inputs()
    arguments = (query, key, value, *(None,) * 8, 0.3, 0.0, 0.0, None, 0, None, None, "", [], [])
    torch.library.opcheck(torch.ops.attnroute.chunked.default, arguments)
