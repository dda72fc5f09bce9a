"""`route_sdpa()` and torch.compile: one graph, and none is used on the other side of a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attnroute


@pytest.fixture(autouse=True)
def fresh():
    """Compile anew, and without the fused operators of modules, which no mode around a graph sees."""
    torch.compiler.reset()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)
    torch.compiler.reset()


QUERY = torch.randn(2, 4, 8, 16)
TOKENS = torch.randn(2, 8, 32)
PADDING = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(8)
KEEP = torch.rand(2, 1, 8, 8) > 0.3


def plain(query):
    return F.scaled_dot_product_attention(query, query + 1, query, is_causal=True)


def masked(query):
    return F.scaled_dot_product_attention(query, query[:, :2], query[:, :2], KEEP, scale=0.2, enable_gqa=True)


def without_batch(query):
    return F.scaled_dot_product_attention(query[0], query[0] + 1, query[0])


def more_dims(query):
    return F.scaled_dot_product_attention(query[None], query[None] + 1, query[None], KEEP)


def split_heads(query):
    tokens = query.transpose(1, 2).flatten(2) * 2
    return plain(tokens.unflatten(-1, (-1, 16)).transpose(1, 2))


def unknown(query):
    return F.scaled_dot_product_attention(query, query[:1], query[:1])


def multi_head():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    return lambda tokens: module(tokens, tokens, tokens, need_weights=False)[0]


def evaluated():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    return lambda tokens: module(tokens, tokens, tokens, key_padding_mask=PADDING, need_weights=False)[0]


def encoder(**named):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **named)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def causal_encoder():
    module = encoder()
    return lambda tokens: module(tokens, mask=CAUSAL, is_causal=True)


def padded_encoder():
    module = encoder()
    return lambda tokens: module(tokens, src_key_padding_mask=PADDING)


CODE = {
    "plain": (lambda: plain, QUERY, 1),
    "mask and gqa": (lambda: masked, QUERY, 1),
    "3-D": (lambda: without_batch, QUERY, 1),
    "5-D": (lambda: more_dims, QUERY, 1),
    "heads split by unflatten": (lambda: split_heads, QUERY, 1),
    "unknown": (lambda: unknown, QUERY, 0),
    "multi-head": (multi_head, TOKENS, 1),
    "multi-head, eval": (evaluated, TOKENS, 1),
    "encoder": (encoder, TOKENS, 2),
    "encoder, norm first": (lambda: encoder(norm_first=True, activation="gelu"), TOKENS, 2),
    "encoder, causal": (causal_encoder, TOKENS, 2),
    "encoder, padding": (padded_encoder, TOKENS, 2),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("make", "given", "calls"), CODE.values(), ids=CODE)
def test_routed_code_is_one_graph_that_calls_the_decided_kernel(make, given, calls, grad):
    code = make()
    given = given.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        want = code(given)
        compiled = torch.compile(code, backend="aot_eager", fullgraph=True)
        with attnroute.trace() as trace, attnroute.route_sdpa(), attnroute.override(backend="chunked"):
            got = compiled(given)
    assert {(call.how, call.backend) for call in trace.calls} == (
        {("compiled", "chunked")} if calls else set()
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    if grad:
        pair = [torch.autograd.grad(out.square().sum(), given)[0] for out in (got, want)]
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_checkpoint_in_a_graph_is_routed(dynamic):
    def step(query):
        inner = checkpoint(split_heads, query / 8, use_reentrant=False)
        return checkpoint(masked, inner, use_reentrant=False)

    given = QUERY.clone().requires_grad_()
    want = step(given)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with attnroute.trace() as trace, attnroute.route_sdpa(), attnroute.override(backend="chunked"):
        got = compiled(given)
    assert [(call.how, call.backend) for call in trace.calls] == [("compiled", "chunked")] * 2
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    pair = [torch.autograd.grad(out.square().sum(), given)[0] for out in (got, want)]
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [lambda: plain, multi_head, encoder], ids=["plain", "multi-head", "encoder"])
def test_a_graph_is_used_on_its_own_side_of_a_block_only(make):
    code = make()
    given = QUERY if code is plain else TOKENS
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(code, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            compiled(given)
            assert counter.frame_count in (1, 2)
            with attnroute.trace() as trace, attnroute.route_sdpa():
                compiled(given)
            assert counter.frame_count == 2
            if _ == 0:
                assert {call.how for call in trace.calls} == {"compiled"}


def test_a_block_inside_of_compiled_code_routes_it():
    @torch.compile(backend="aot_eager")
    def function(query):
        with attnroute.route_sdpa():
            return plain(query) * 2

    with attnroute.trace() as trace:
        got = function(QUERY)
    assert trace.calls
    torch.testing.assert_close(got, plain(QUERY) * 2)
