"""DTensors elsewhere: what is refused and with which words, torch's own function, explain, compiled calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.reference import TOLERANCE, attend, error
from support.spy import Spy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import attnroute
from attnroute import masks
from attnroute.api import repeats, sdpa
from attnroute.errors import ArgumentError


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes)


def randn(mesh, placements, *shape, seed=0):
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(full, mesh, placements).requires_grad_()


def by_row(batch, _head, query, key):
    return key <= query + batch


def refusals():
    """Return the message of each call that is refused."""
    mesh = mesh_of(2)
    whole, other = [Replicate()], mesh_of(2, 1)
    heads = randn(mesh, [Shard(1)], 2, 4, 8, 16)
    few = randn(mesh, [Shard(1)], 2, 1, 8, 16)
    rows = randn(mesh, [Shard(0)], 2, 4, 8, 16)
    repeated = randn(mesh, whole, 2, 4, 8, 16)
    plain = repeated.full_tensor().detach()
    partial = DTensor.from_local(plain, mesh, [Partial()])
    calls = {
        "tokens": ((randn(mesh, [Shard(2)], 2, 4, 8, 16), heads, heads), {}),
        "head_dim": ((heads, randn(mesh, [Shard(3)], 2, 4, 8, 16), heads), {}),
        "partial": ((heads, heads, partial), {}),
        "rows and heads": ((heads, rows, rows), {}),
        "heads elsewhere": ((heads, few, few), {}),
        "plain key": ((heads, plain, heads), {}),
        "plain query": ((plain, heads, heads), {}),
        "mesh": ((heads, randn(other, [*whole, *whole], 2, 4, 8, 16), heads), {}),
        "mask": ((heads, heads, heads), {"mask": distribute_tensor(plain[..., :8] > 0, mesh, [Shard(2)])}),
        "mask object": (
            (heads, heads, heads),
            {"mask": masks.KeyPadding(lengths=distribute_tensor(torch.tensor([3, 8]), mesh, [Shard(0)]))},
        ),
        "sizes": ((heads, heads, heads), {"bias": torch.zeros(1, 2, 8, 8)}),
        "plain sink": ((heads, heads, heads), {"sink": torch.zeros(4, requires_grad=True)}),
        "blocks": ((rows, rows, rows), {"mask": create_block_mask(by_row, 2, None, 8, 8, device="cpu")}),
        "dropout": ((repeated, repeated, repeated), {"dropout_p": 0.5}),
    }
    found = {}
    for name, (inputs, options) in calls.items():
        try:
            attnroute.attention(*inputs, **options)
            found[name] = "ran"
        except ArgumentError as refused:
            found[name] = str(refused)
    return found


WAYS = "Shard(0) (batch), Shard(1) (heads) or Replicate() on each dimension of the mesh"
KV_WAYS = WAYS.replace("heads", "key/value heads")
READS = "the key/value heads that its part of the call reads, or Replicate()"
ALONE = "mesh, placements), or plain tensors alone."
SAID = {
    "tokens": f"query requires {WAYS}; got Shard(2), its tokens, @; pass query.redistribute(M, [Shard(1)]).",
    "head_dim": f"key requires {KV_WAYS}; got Shard(3), its head_dim, @; pass "
    "key.redistribute(M, [Shard(1)]).",
    "partial": f"value requires {KV_WAYS}; got # @; pass value.redistribute(M, [Replicate()]).",
    "rows and heads": "key requires its heads sharded as those of the query, or Replicate(); got Shard(0), "
    "its batch, @; pass key.redistribute(M, [Shard(1)]).",
    "heads elsewhere": f"key requires on each process {READS}; got 1 key/value heads in 2 chunks beside 4 "
    "query heads; pass key.redistribute(M, [Replicate()]).",
    "plain key": f"key requires a DTensor, as the query is; got Tensor; pass DTensor.from_local(key, {ALONE}",
    "plain query": "query requires a DTensor, as the key is; got Tensor; pass DTensor.from_local(query, "
    f"{ALONE}",
    "mesh": "distribute all tensors of a call over one mesh.",
    "mask": "mask requires its heads sharded as the call's, or Replicate(); got Shard(2), its entries, @; "
    "pass mask.redistribute(M, [Replicate()]).",
    "mask object": "mask KeyPadding lengths requires its heads sharded as the call's, or Replicate(); "
    "got Shard(0), its batch, @; pass KeyPadding.lengths.redistribute(M, [Replicate()]).",
    "sizes": "bias requires size 4 in dimension 1, the heads of the whole call; got 2; pass the whole "
    "tensor, or a DTensor of it.",
    "plain sink": "sink requires a DTensor where it gets a gradient, as each process computes a part of "
    "that; got a plain tensor; pass distribute_tensor of it, with Replicate() where it is whole.",
    "blocks": "mask BlockMask requires blocks that are the same along the batch, where the call is split; "
    "got 2 of them; make it with B=None and H=None, or pass masks.Function of its mask_mod.",
    "dropout": "dropout_p requires 0.0 where processes compute the same part, as each drops weights of its "
    "own; got 0.5; shard batch or heads on each dimension.",
}


def test_what_needs_communication_is_refused_with_the_redistribution_to_ask_for(two_ranks):
    first, second = two_ranks.run(refusals)
    assert first == second
    assert first.keys() == SAID.keys()
    words = {"@": "on dimension 0 of the mesh", "#": str(Partial()), "M,": "mesh,"}
    for name, text in SAID.items():
        said = text
        for short, word in words.items():
            said = said.replace(short, word)
        assert said in first[name]


def routed():
    """Return the backends of calls of torch's function, and whether they are right."""
    mesh = mesh_of(2)
    query, key = randn(mesh, [Shard(1)], 2, 4, 8, 16), randn(mesh, [Replicate()], 2, 2, 8, 16, seed=1)
    value = randn(mesh, [Shard(1)], 2, 2, 8, 16, seed=2)
    with attnroute.route_sdpa(), attnroute.override(backend="chunked"):
        with Spy() as spy:
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        three = F.scaled_dot_product_attention(query[0], key[0], value[0], is_causal=True, enable_gqa=True)
    # What needs communication is left to torch's own function.
    assert sdpa.given_of(randn(mesh, [Shard(2)], 2, 4, 8, 16), key, value, enable_gqa=True) is None
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()
    whole = [t.full_tensor().detach().double().requires_grad_() for t in (query, key, value)]
    want = attend(*whole, allowed=allowed)[0]
    want.sum().backward()
    out.sum().full_tensor().backward()
    assert out.placements == (Shard(1),)
    assert three.placements == (Shard(0),)
    assert error(out.full_tensor(), want) < TOLERANCE[torch.float32]
    assert error(three.full_tensor(), want[0]) < TOLERANCE[torch.float32]
    for tensor, truth in zip((query, key, value), whole, strict=True):
        assert error(tensor.grad.full_tensor(), truth.grad) < TOLERANCE[torch.float32]
    return spy.backends


def test_torchs_function_takes_the_same_way_inside_route_sdpa(two_ranks):
    assert two_ranks.run(routed) == [{"chunked"}, {"chunked"}]


def explained():
    mesh = mesh_of(4)
    query, key = randn(mesh, [Shard(1)], 2, 6, 8, 16), randn(mesh, [Replicate()], 2, 3, 8, 16)
    try:
        call = attnroute.explain(query, key, key, is_causal=True).call
    except ArgumentError as refused:
        return str(refused)
    assert call.context.distributed == "dtensor"
    return call.num_heads_q, call.num_heads_kv


def told_apart():
    """Run DTensors and their local tensors in turns: on the short way, and on the long one for a trace."""
    mesh = mesh_of(2)
    qkv = [randn(mesh, [Shard(1)], 2, 4, 8, 16) for _ in range(3)]
    local = [tensor.to_local().clone() for tensor in qkv]
    repeats.forget()
    for _ in range(3):
        attnroute.attention(*qkv)
        attnroute.attention(*local)
    assert len(repeats._REPEATS) == 2
    with attnroute.trace() as seen:
        for _ in range(3):
            whole = attnroute.attention(*qkv)
            part = attnroute.attention(*local)
            torch.testing.assert_close(whole.to_local(), part, rtol=0, atol=0)
    return sorted((call.line.endswith(" dtensor"), call.count) for call in seen.calls)


def test_a_part_of_dtensors_is_another_kind_of_call_than_plain_tensors(two_ranks):
    """The host has more to do for it, so its kernel may be another one."""
    assert two_ranks.run(told_apart) == [[(False, 3), (True, 3)]] * 2


def test_explain_speaks_of_the_call_of_this_process(four_ranks):
    empty = (
        "query requires at least one batch row and one head for this process; got none; ask on another one."
    )
    assert four_ranks.run(explained) == [(2, 1)] * 3 + [empty]
