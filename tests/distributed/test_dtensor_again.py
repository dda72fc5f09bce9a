"""Calls on DTensors that repeat an earlier one: the short way gives what torch's own functions give."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import attnroute
from attnroute.distributed import dtensors

SHAPE = (2, 4, 6, 8)


HEADS = (Shard(1),)


def drawn(mesh, kv=HEADS, heads_kv=4, trained=(True, True, True)):
    generator = torch.Generator().manual_seed(2)
    made = []
    for heads, placements, trains in zip(
        (4, heads_kv, heads_kv), ((Shard(1),), kv, kv), trained, strict=True
    ):
        whole = torch.randn(2, heads, 6, 8, generator=generator)
        made.append(distribute_tensor(whole, mesh, placements).requires_grad_(trains))
    return made


def by_hand(mesh, query, key, value, kv_grad):
    """What users write: local tensors, a plain call, and a DTensor of the result."""
    local = query.to_local(), key.to_local(grad_placements=kv_grad), value.to_local(grad_placements=kv_grad)
    if key.placements != HEADS:  # Two key heads are whole on each rank, whose query heads share one.
        at = torch.distributed.get_rank() * local[0].shape[1] // 2
        local = local[0], *(t.narrow(1, at, 1) for t in local[1:])
    out = attnroute.attention(*local, is_causal=True)
    return DTensor.from_local(
        out, mesh, [Shard(1)], run_check=False, shape=query.shape, stride=query.stride()
    )


class Calls:
    """How often torch's functions to and from local tensors are called."""

    def __enter__(self):
        self.seen = []
        to_local, from_local = DTensor.to_local, DTensor.from_local

        def leave(*args, **kwargs):
            self.seen.append("to_local")
            return to_local(*args, **kwargs)

        def enter(*args, **kwargs):
            self.seen.append("from_local")
            return from_local(*args, **kwargs)

        self._patches = patch.object(DTensor, "to_local", leave), patch.object(DTensor, "from_local", enter)
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_):
        for one in self._patches:
            one.stop()


def again(kv, heads_kv, kv_grad):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    qkv = drawn(mesh, kv, heads_kv)
    weights = distribute_tensor(
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), mesh, [Shard(1)]
    )
    hand = by_hand(mesh, *qkv, kv_grad)
    expected = torch.autograd.grad(hand, qkv, weights)
    for _ in range(2):
        first = attnroute.attention(*qkv, is_causal=True)
        torch.autograd.grad(first, qkv, weights)
    with Calls() as calls:
        out = attnroute.attention(*qkv, is_causal=True)
        grads = torch.autograd.grad(out, qkv, weights)
    # The gradient of the output is the one tensor that still goes torch's way.
    assert calls.seen == ["to_local"]
    for got, want in zip([out, *grads], [hand, *expected], strict=True):
        if torch.distributed.get_world_size() == 2:  # Of one head it cannot be seen how heads lie.
            assert got._spec == want._spec
        assert (got.placements, got.shape, got.dtype) == (want.placements, want.shape, want.dtype)
        assert got.requires_grad == want.requires_grad
        assert torch.equal(got.to_local(), want.to_local())


@pytest.mark.parametrize(
    ("kv", "heads_kv", "kv_grad"), [((Shard(1),), 4, (Shard(1),)), ((Replicate(),), 2, (Partial(),))]
)
def test_a_repeated_call_is_what_one_writes_by_hand(two_ranks, four_ranks, kv, heads_kv, kv_grad):
    for ranks in (two_ranks, four_ranks):
        ranks.run(again, kv, heads_kv, kv_grad)


def some_train(trained):
    attnroute.reset()  # The first call goes the long way.
    mesh = init_device_mesh("cpu", (2,))
    qkv = drawn(mesh, trained=trained)
    wanted = [tensor for tensor in qkv if tensor.requires_grad]
    seen = []
    run = dtensors.Calls.run

    def watched(self, given, attend):
        def seeing(local):
            seen.append(tuple(tensor.requires_grad for tensor in local[:3]))
            return attend(local)

        return run(self, given, seeing)

    with patch.object(dtensors.Calls, "run", watched):
        outs = [attnroute.attention(*qkv, is_causal=True) for _ in range(3)]
        with torch.no_grad():
            plain = attnroute.attention(*qkv, is_causal=True)
    assert seen == [trained, trained, (False, False, False)]
    assert outs[2].requires_grad == any(trained)
    assert not plain.requires_grad
    assert torch.equal(plain.to_local(), outs[0].to_local())
    if wanted:
        first, *_, last = (torch.autograd.grad(out, wanted, torch.ones_like(out)) for out in outs)
        for got, want in zip(last, first, strict=True):
            assert torch.equal(got.to_local(), want.to_local())


@pytest.mark.parametrize(
    "trained", [(True, False, False), (False, True, True), (False, False, False)], ids=str
)
def test_what_does_not_train_trains_in_no_local_call(two_ranks, trained):
    two_ranks.run(some_train, trained)


def gradients_that_lie_otherwise():
    mesh = init_device_mesh("cpu", (2,))
    qkv = drawn(mesh)
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    found = []
    for attend in (attnroute.attention,) * 3 + (lambda *t, **_: by_hand(mesh, *t, (Shard(1),)),):
        out = attend(*qkv, is_causal=True)
        given = distribute_tensor(weights, mesh, [Replicate()])
        found.append(torch.autograd.grad(out, qkv, given))
    for last, hand in zip(found[2], found[3], strict=True):
        assert last.placements == (Shard(1),)
        assert torch.equal(last.to_local(), hand.to_local())


def test_a_gradient_on_other_placements_is_redistributed(two_ranks):
    two_ranks.run(gradients_that_lie_otherwise)


def second_derivative():
    mesh = init_device_mesh("cpu", (2,))
    qkv = drawn(mesh)

    def twice(attend):
        out = attend(*qkv)
        (grad,) = torch.autograd.grad(out, qkv[0], torch.ones_like(out), create_graph=True)
        assert grad.placements == (Shard(1),)
        return torch.autograd.grad(grad, qkv, torch.ones_like(grad))

    for _ in range(2):
        found = twice(lambda *t: attnroute.attention(*t, backend="math"))

    def hand(*tensors):
        out = attnroute.attention(*(t.to_local() for t in tensors), backend="math")
        return DTensor.from_local(out, mesh, [Shard(1)], run_check=False)

    for got, want in zip(found, twice(hand), strict=True):
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())


def test_second_derivatives_go_on(two_ranks):
    two_ranks.run(second_derivative)


def other_results():
    """Other dtypes and orders in memory of a result, under one key."""
    mesh = init_device_mesh("cpu", (2,))
    qkv = drawn(mesh)
    plain = [attnroute.attention(*qkv) for _ in range(2)][1]
    with torch.autocast("cpu", torch.bfloat16):
        cast = [attnroute.attention(*qkv) for _ in range(2)][1]
    chunked, lse = [attnroute.attention(*qkv, backend="chunked", return_lse=True) for _ in range(2)][1]
    assert (plain.dtype, cast.dtype, lse.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert cast._spec.tensor_meta.dtype is torch.bfloat16
    assert lse.placements == (Shard(1),)
    assert lse.shape == SHAPE[:3]
    for got in (plain, cast, chunked):
        assert got.stride() == DTensor.from_local(got.to_local(), mesh, [Shard(1)]).stride()
    torch.testing.assert_close(cast.to_local().float(), plain.to_local(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(chunked.to_local(), plain.to_local())


def test_results_of_other_dtypes_and_orders_have_their_own(two_ranks):
    two_ranks.run(other_results)


def nothing_stays_alive():
    mesh = init_device_mesh("cpu", (2,))
    qkv = drawn(mesh)
    for _ in range(3):
        out = attnroute.attention(*qkv, is_causal=True)
        out.sum().backward()
    held = [weakref.ref(tensor) for tensor in (*qkv, out)] + [weakref.ref(out.to_local())]
    del qkv, out
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    attnroute.reset()
    assert not len(dtensors._CALLS)


def test_no_tensor_is_kept(two_ranks):
    two_ranks.run(nothing_stays_alive)


def refused():
    mesh = init_device_mesh("cpu", (2,))
    whole = [distribute_tensor(torch.randn(SHAPE), mesh, [Replicate()]) for _ in range(3)]
    for _ in range(2):
        attnroute.attention(*whole)
    with pytest.raises(attnroute.ArgumentError, match=r"dropout_p requires 0\.0 where processes"):
        attnroute.attention(*whole, dropout_p=0.5)


def test_a_repeated_call_is_checked_for_dropout(two_ranks):
    two_ranks.run(refused)


def on_another_mesh():
    """Equal meshes may have other process groups: what is made on one is of no use on another."""
    first, second = (init_device_mesh("cpu", (2,)) for _ in range(2))
    assert first == second
    for mesh in (first, first, second, second, first):
        inputs = drawn(mesh)
        out = attnroute.attention(*inputs)
        assert out.device_mesh is mesh
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert all(grad.device_mesh is mesh for grad in grads)


def test_an_equal_mesh_is_another_one(two_ranks):
    two_ranks.run(on_another_mesh)
