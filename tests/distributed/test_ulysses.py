"""Ulysses on gloo ranks: what the ring does not take exchanges tokens for heads and equals one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.context_parallel import attended, drawn, mesh, reference

import attnroute
from attnroute import biases, masks
from attnroute.distributed import context_parallel

TOKENS, HEADS = 16, 8
QUERIES, KEYS = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
CAUSAL = KEYS <= QUERIES
DOCUMENTS = CAUSAL & (QUERIES // 5 == KEYS // 5)
LENGTHS = torch.tensor([9, 13])
GENERATOR = torch.Generator().manual_seed(6)
PER_HEAD = torch.randn(1, HEADS, TOKENS, TOKENS, generator=GENERATOR, dtype=torch.float64)
PER_LAYER = PER_HEAD[0, 0]
ALLOWED = (PER_HEAD > -0.5) | (QUERIES == KEYS)
VECTOR = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
SLOPES = VECTOR.abs().float()

CASES = {
    "window": ({"window": (3, 0)}, {"allowed": CAUSAL & (QUERIES - KEYS <= 3)}),
    "documents": ({"mask": masks.Causal() & masks.Documents(lengths=(5, 5, 5, 1))}, {"allowed": DOCUMENTS}),
    "padding": ({"mask": masks.KeyPadding(LENGTHS)}, {"allowed": (LENGTHS[:, None] > KEYS)[:, None, None]}),
    "mask": ({"mask": ALLOWED}, {"allowed": ALLOWED}),
    "mask and causal": ({"mask": masks.Dense(ALLOWED), "is_causal": True}, {"allowed": ALLOWED & CAUSAL}),
    "bias": ({"bias": PER_LAYER}, {"change": lambda scores: scores + PER_LAYER}),
    "softcap": ({"softcap": 0.5}, {"change": lambda scores: 0.5 * torch.tanh(scores / 0.5)}),
    "slopes": (
        {"alibi_slopes": SLOPES},
        {"change": lambda scores: scores - SLOPES[:, None, None] * (QUERIES - KEYS).abs()},
    ),
    "head by head": (
        {"bias": biases.Dense(PER_HEAD), "mask": masks.Function(lambda _b, _h, q, k: k <= q, per_head=False)},
        {"change": lambda scores: scores + PER_HEAD, "allowed": CAUSAL},
    ),
}


def exchanged(name, heads_kv, load_balance, layout):
    arguments, meaning = CASES[name]
    tensors = drawn(heads=HEADS, heads_kv=heads_kv, tokens=TOKENS)
    expected = reference(tensors, **meaning)
    block = context_parallel(mesh(), load_balance=load_balance)
    found, kernels = attended(block, tensors, layout, **arguments)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), block.shard(want, 2), atol=1e-6, rtol=1e-6)
    return kernels.seen, kernels.shapes


@pytest.mark.parametrize("name", CASES)
def test_an_exchange_equals_one_process(four_ranks, name):
    kernels = ["flash_attention_for_cpu", "flash_attention_for_cpu_backward"], [(2, HEADS // 4, TOKENS, 8)]
    if name == "softcap":
        kernels = ["attnroute::chunked"], []
    for heads_kv, load_balance, layout in ((8, False, "bhsd"), (2, True, "bshd"), (1, False, "bhsd")):
        assert four_ranks.run(exchanged, name, heads_kv, load_balance, layout) == [kernels] * 4


def with_sink():
    tensors = drawn(heads=HEADS, heads_kv=4, tokens=TOKENS)
    sink = VECTOR.clone().requires_grad_()
    one_process = [t.clone().requires_grad_() for t in tensors[:3]]
    attnroute.attention(*one_process, is_causal=True, sink=sink, backend="chunked").backward(tensors[3])
    expected, sink.grad = sink.grad, None
    block = context_parallel(mesh())
    query, key, value, grad = (block.shard(t, 2) for t in tensors)
    with block:
        out = attnroute.attention(query, key, value, is_causal=True, sink=sink)
    out.backward(grad)
    torch.testing.assert_close(block.unshard(out, 2), reference(tensors, CAUSAL, sink=VECTOR)[0])
    # As for parameters, each rank has its share.
    dist.all_reduce(sink.grad)
    torch.testing.assert_close(sink.grad, expected)


def test_shares_of_a_sinks_gradient_add_up(two_ranks):
    two_ranks.run(with_sink)


def forced():
    tensors = drawn(heads=HEADS, tokens=TOKENS)
    block = context_parallel(mesh(), method="ulysses", load_balance=True)
    query, key, value, _ = (block.shard(t, 2) for t in tensors)
    with block, attnroute.trace() as trace:
        out = attnroute.attention(query, key, value, is_causal=True, backend="chunked")
    torch.testing.assert_close(block.unshard(out, 2), reference(tensors, CAUSAL)[0])
    (call,) = trace.calls
    return call.backend, call.call.seqlen_q


def test_the_exchange_can_be_forced_and_keeps_the_backend(two_ranks):
    assert two_ranks.run(forced) == [("chunked", TOKENS)] * 2


def compiled():
    tensors = drawn(heads=HEADS, tokens=TOKENS)
    block = context_parallel(mesh(), load_balance=True)
    own = [block.shard(t, 2).detach() for t in tensors]
    leaves = [t.requires_grad_() for t in own[:3]]
    graph = torch.compile(
        lambda q, k, v: attnroute.attention(q, k, v, window=(3, 0)), backend="aot_eager", fullgraph=True
    )
    with block:
        out = graph(*leaves)
    out.backward(own[3])
    expected = reference(tensors, **CASES["window"][1])
    for got, want in zip(
        [out.detach(), *[t.grad for t in leaves]], [expected[0], *expected[2:]], strict=True
    ):
        torch.testing.assert_close(got, block.shard(want, 2), atol=1e-6, rtol=1e-6)


def test_a_graph_exchanges_too(two_ranks):
    two_ranks.run(compiled)


def refused():
    said = []

    def tell(*tensors, **arguments):
        with pytest.raises(attnroute.ArgumentError) as error:
            attnroute.attention(*tensors, **arguments)
        said.append(str(error.value))

    query, three = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 4, 8)
    by_head = masks.Function(lambda _, h, q, k: h > q - k)
    with context_parallel(mesh()):
        tell(three, three, three, window=(1, 0))
        tell(query, query, query, mask=by_head)
        tell(query, query, query, bias=biases.Function(lambda score, _b, h, _q, _k: score + h))
        tell(query, query, query, mask=torch.ones(4, 4, dtype=torch.bool))
    return said


def test_what_cannot_be_exchanged_names_the_argument(two_ranks):
    for said in two_ranks.run(refused):
        assert said[0].startswith(
            "query requires a number of heads that the 2 ranks of the mesh divide; got 3;"
        )
        assert said[1].startswith(
            "mask requires what is the same for all heads, as each rank has some of them"
        )
        assert said[2].startswith("bias requires what is the same for all heads")
        assert said[3].startswith("mask requires a shape that broadcasts")
