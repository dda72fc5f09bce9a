"""The ring on gloo ranks: outputs and gradients of sharded tokens equal those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from support.context_parallel import Kernels, attended, drawn, mesh, reference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute.distributed import context_parallel

TOKENS = 16
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()


def check(found, expected, block, tolerance=1e-6):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), block.shard(want, 2), atol=tolerance, rtol=tolerance)
    whole = block.unshard(found[0], 2).double()
    torch.testing.assert_close(whole, expected[0], atol=tolerance, rtol=tolerance)


def ring(causal, load_balance, layout, dtype, sizes):
    block = context_parallel(mesh(), load_balance=load_balance)
    tensors = drawn(tokens=TOKENS, dtype=dtype, **sizes)
    found, kernels = attended(block, tensors, layout=layout, is_causal=causal)
    check(found, reference(tensors, CAUSAL if causal else None), block, 1e-6 if dtype.itemsize > 4 else 2e-5)
    steps = dist.get_rank() + 1 if causal and not load_balance else dist.get_world_size()
    assert kernels.seen == ["flash_attention_for_cpu"] * steps + ["flash_attention_for_cpu_backward"] * steps


@pytest.mark.parametrize("load_balance", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_ring_equals_one_process(four_ranks, causal, load_balance):
    for layout, dtype, sizes in (
        ("bhsd", torch.float64, {}),
        ("bshd", torch.float32, {"heads": 3, "heads_kv": 1}),
        ("bhsd", torch.float32, {"batch": 1, "heads_kv": 4}),
    ):
        four_ranks.run(ring, causal, load_balance, layout, dtype, sizes)


def of_a_sum():
    block = context_parallel(mesh(), load_balance=True)
    tensors = drawn(tokens=TOKENS)
    leaves = [block.shard(t, 2).detach().requires_grad_() for t in tensors[:3]]
    with block:
        attnroute.attention(*leaves, is_causal=True).sum().backward()  # A gradient without memory of its own.
    expected = reference([*tensors[:3], torch.ones_like(tensors[3])], CAUSAL)[2:]
    for leaf, want in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, block.shard(want, 2))


def test_a_gradient_may_lie_anyhow(two_ranks):
    two_ranks.run(of_a_sum)


def other_keys():
    block = context_parallel(mesh())
    tensors = drawn(tokens=TOKENS, tokens_kv=24)
    found, kernels = attended(block, tensors)
    check(found[:3], reference(tensors)[:3], block)
    assert kernels.seen[:2] == ["flash_attention_for_cpu"] * 2


def test_keys_of_another_sequence_go_round_too(two_ranks):
    two_ranks.run(other_keys)


def with_heads():
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    block = context_parallel(both["cp"], load_balance=True)
    tensors = drawn(tokens=TOKENS)
    own = [distribute_tensor(block.shard(t, 2), both["tp"], [Shard(1)]) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in own[:3]]
    with block, Kernels() as kernels:
        out = attnroute.attention(*leaves, is_causal=True)
    out.backward(own[3])
    expected = reference(tensors, CAUSAL)
    for got, want in zip([out, *[t.grad for t in leaves]], [expected[0], *expected[2:]], strict=True):
        torch.testing.assert_close(got.full_tensor(), block.shard(want, 2))
    return [shape[1:3] for shape in kernels.shapes]


def test_heads_of_dtensors_are_spread_besides(four_ranks):
    first, second, *_ = four_ranks.run(with_heads)
    assert first == second == [(2, 8), (2, 4)]


def recomputed(use_reentrant, load_balance):
    block = context_parallel(mesh(), load_balance=load_balance)
    tensors = drawn(tokens=TOKENS)
    own = [block.shard(t, 2).detach() for t in tensors]
    leaves = [t.requires_grad_() for t in own[:3]]
    attend = functools.partial(attnroute.attention, is_causal=True)
    with block:
        out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(own[3])
    expected = reference(tensors, CAUSAL)
    check([out.detach(), *[t.grad for t in leaves]], [expected[0], *expected[2:]], block)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_outside_of_the_block_goes_round_too(two_ranks, use_reentrant):
    two_ranks.run(recomputed, use_reentrant, True)


def routed():
    block = context_parallel(mesh())
    tensors = drawn(tokens=TOKENS, heads_kv=4)
    query, key, value, _ = (block.shard(t, 2) for t in tensors)
    with attnroute.route_sdpa(), block:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    shared = query[:, :1], key[:, :1], value
    with (
        attnroute.route_sdpa(),
        block,
        pytest.raises(attnroute.ArgumentError, match="on this rank's tokens alone"),
    ):
        torch.nn.functional.scaled_dot_product_attention(*shared)
    outside = attnroute.attention(query, key, value, is_causal=True)
    check([out], reference(tensors, CAUSAL)[:1], block)
    assert dist.get_rank() == 0 or not torch.allclose(out, outside)


def test_stock_calls_that_are_routed_go_round_too(two_ranks):
    two_ranks.run(routed)


def inside_of_torchs(load_balance):
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = load_balance
    tensors = drawn(tokens=TOKENS)
    block = context_parallel(mesh(), load_balance=load_balance)
    query, key, value = leaves = [t.clone() for t in tensors[:3]]
    # A call of the same kind, with as many tokens as a rank has, took the short way before.
    for _ in range(3):
        attnroute.attention(*(block.shard(leaf, 2).clone() for leaf in leaves), is_causal=True)
    with torchs_context_parallel(mesh(), buffers=leaves, buffer_seq_dims=[2, 2, 2]):
        for leaf in leaves:
            leaf.requires_grad_()
        found = attnroute.attention(query, key, value, is_causal=True)
        again = attnroute.attention(query, key, value, is_causal=True)
        grads = torch.autograd.grad(found, leaves, block.shard(tensors[3], 2))
        for leaf in leaves:
            leaf.requires_grad_(False)
    expected = reference(tensors, CAUSAL)
    check([found.detach(), *grads], [expected[0], *expected[2:]], block)
    assert torch.equal(found, again)
    after = attnroute.attention(*leaves, is_causal=True)
    torch.testing.assert_close(after, expected[0])


@pytest.mark.parametrize("load_balance", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_calls_inside_of_torchs_context_parallel_take_part(two_ranks, load_balance):
    two_ranks.run(inside_of_torchs, load_balance)


def compiled(load_balance):
    block = context_parallel(mesh(), load_balance=load_balance)
    tensors = drawn(tokens=TOKENS)
    attend = functools.partial(attnroute.attention, is_causal=True)
    own = [block.shard(t, 2).detach() for t in tensors]
    leaves = [t.requires_grad_() for t in own[:3]]
    graph = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with block:
        out = graph(*leaves)
    out.backward(own[3])
    expected = reference(tensors, CAUSAL)
    check([out.detach(), *[t.grad for t in leaves]], [expected[0], *expected[2:]], block)
    # Outside of the block the graph does not fit.
    torch.testing.assert_close(graph(*tensors[:3]), expected[0])


def test_a_graph_goes_round_too(two_ranks):
    two_ranks.run(compiled, True)


def explained():
    query = torch.zeros(1, 2, 4, 8)
    with context_parallel(mesh(), load_balance=True):
        ring = attnroute.explain(query, query, query, is_causal=True)
        exchange = attnroute.explain(query, query, query, window=(1, 0))
    return [
        (d.selected, str(d.call.context.distributed), d.call.seqlen_q, d.text(verbose=True))
        for d in (ring, exchange)
    ]


def test_explanations_say_which_way_and_why(two_ranks):
    ring, exchange = two_ranks.run(explained)[0]
    assert ring[:3] == ("flash", "ring", 4)
    assert (
        "context parallel ring over 2 ranks (group 0), tokens head-tail (distributed.context_parallel())"
        in flat(ring[3])
    )
    assert exchange[:3] == ("flash", "None", 8)
    assert (
        "ulysses over 2 ranks (group 0), tokens head-tail (distributed.context_parallel(); the ring requires"
        in flat(exchange[3])
    )


def flat(text):
    return " ".join(text.split())


def uneven():
    rank, said = dist.get_rank(), []
    query, odd = torch.zeros(1, 2, 4 + 2 * rank, 8), torch.zeros(1, 2, 4 + rank, 8)
    alike = torch.zeros(1, 2, 8, 8)
    banned = {"ban": "flash"} if rank else {"ban": "math"}
    for tensor, load_balance, settings in ((query, False, {}), (odd, True, {}), (alike, False, banned)):
        block = context_parallel(mesh(), load_balance=load_balance)
        with block, attnroute.override(**settings), pytest.raises(attnroute.AttnRouteError) as error:
            attnroute.attention(tensor, tensor, tensor, is_causal=True)
        said.append(str(error.value))
    return said


def test_what_differs_between_ranks_is_refused_on_all(two_ranks):
    first, last = two_ranks.run(uneven)
    for said in first[0], last[0]:
        assert said.startswith(
            "query requires the same (batch, num_heads, tokens, head_dim) on each rank; got"
        )
        assert "(1, 2, 4, 8) on rank 0 of 2, (1, 2, 6, 8) on rank 1; pad sequences" in said
    assert "(1, 2, 4, 8) on rank 0 of 2, (1, 2, 5, 8) on rank 1" in first[1]
    assert last[1].startswith("query requires an even number of tokens on each of the 2 ranks")
    for said in first[2], last[2]:
        assert "requires the same way on each rank; got ring on rank 0 of 2, ulysses on rank 1" in said


def refused():
    said = []

    def tell(function, *args, **arguments):
        with pytest.raises((attnroute.AttnRouteError, ValueError)) as error:
            function(*args, **arguments)
        said.append(str(error.value).splitlines()[0])

    block = context_parallel(mesh(), load_balance=True)
    query = torch.zeros(1, 2, 3, 8)
    tell(block.shard, torch.zeros(6, 3), 0)
    tell(context_parallel, mesh(), method="rings")
    tell(context_parallel, mesh(), load_balance=1)
    sums = torch.tensor([0, 2])
    with block:
        tell(attnroute.attention, query, query, query)
        tell(attnroute.attention, query[0], query[0], query[0], layout="thd", cu_seqlens_q=sums)
    with context_parallel(mesh(), method="ring"):
        tell(attnroute.attention, query, query, query, window=(1, 0))
        tell(attnroute.attention, query, query, query, is_causal=True, backend="chunked")
    return said


def test_what_cannot_be_done_is_refused_in_a_sentence(two_ranks):
    said, _ = two_ranks.run(refused)
    for got, part in zip(
        said,
        (
            "tensor requires a multiple of 4 tokens over 2 ranks with load_balance; got 6 tokens;",
            'method requires None, "ring" or "ulysses"',
            "load_balance requires True or False; got 1",
            "query requires an even number of tokens on each of the 2 ranks with load_balance; got 3; pad",
            'layout requires "bhsd" or "bshd" inside of context_parallel(); got thd, whose',
            "no backend may run this call: fp32 b1 hq2 hkv2 sq6 skv6 d8 window=1,0 lse unpacked ring",
            "chunked is required by attention() and may not run this call: fp32 b1 hq2 hkv2 sq3 skv3",
        ),
        strict=True,
    ):
        assert part in got
