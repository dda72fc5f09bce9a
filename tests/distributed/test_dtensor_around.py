"""What surrounds DTensors: checkpoints, pending communication, masks that change, the short way."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import torch
from support.reference import TOLERANCE, attend, error
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import biases, masks
from attnroute.api import dispatch
from attnroute.integrations.transformers.attention import attention_function

SHAPE = (2, 4, 8, 16)


def tensors(mesh, placements, *shapes):
    """Distribute random tensors; return them, and the same whole in float64."""
    torch.manual_seed(1)
    whole = [torch.randn(shape) for shape in shapes]
    made = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in whole]
    return made, [tensor.double().requires_grad_() for tensor in whole]


def compare(out, made, want, whole):
    """Compare an output, and the gradients of its sum."""
    assert error(out.full_tensor(), want) < TOLERANCE[torch.float32]
    out.sum().full_tensor().backward()
    want.sum().backward()
    for tensor, truth in zip(made, whole, strict=True):
        assert error(tensor.grad.full_tensor(), truth.grad) < TOLERANCE[torch.float32]


def recompute():
    mesh = init_device_mesh("cpu", (2,))
    made, whole = tensors(mesh, [Shard(1)], SHAPE, SHAPE, SHAPE)
    out = checkpoint(attnroute.attention, *made, use_reentrant=False)
    compare(out, made, attend(*whole)[0], whole)


def test_a_checkpoint_recomputes(two_ranks):
    two_ranks.run(recompute)


def pending():
    mesh = init_device_mesh("cpu", (2,))
    made, whole = tensors(mesh, [Shard(0)], SHAPE, SHAPE, SHAPE)
    query = made[0].redistribute(mesh, [Shard(1)])
    # What is gathered along the first dimension stays as it comes.
    with torch.no_grad():
        moved = [tensor.redistribute(mesh, [Replicate()], async_op=True) for tensor in made[1:]]
        kind = type(moved[0].to_local()).__name__
        out = attnroute.attention(query, *moved)
    assert error(out.full_tensor(), attend(*whole)[0]) < TOLERANCE[torch.float32]
    moved = [tensor.redistribute(mesh, [Replicate()], async_op=True) for tensor in made[1:]]
    compare(attnroute.attention(query, *moved), made, attend(*whole)[0], whole)
    return kind


def test_a_redistribution_that_is_pending_is_waited_for(two_ranks):
    assert two_ranks.run(pending) == ["AsyncCollectiveTensor"] * 2


def changing():
    mesh = init_device_mesh("cpu", (2,))
    made, whole = tensors(mesh, [Shard(0)], SHAPE, SHAPE, SHAPE)
    lengths, dense = torch.tensor([8, 5]), torch.ones(2, 1, 8, 8, dtype=torch.bool)
    sharded = distribute_tensor(dense, mesh, [Shard(0)])
    padding = masks.KeyPadding(lengths=lengths)
    for step in range(3):
        shown = padding.materialize(8, 8, batch=2)
        for mask, allowed in ((padding, shown), (dense, dense), (sharded, dense)):
            for _ in range(2):
                out = attnroute.attention(*made, mask)
                want = attend(*whole, allowed=allowed)[0]
                assert error(out.full_tensor(), want) < TOLERANCE[torch.float32], (step, mask)
        lengths.sub_(1)
        dense[..., step + 1] = False
        sharded.to_local()[..., step + 1] = False


def test_masks_that_are_written_into_are_read_again(two_ranks):
    two_ranks.run(changing)


def integrated():
    mesh = init_device_mesh("cpu", (2,))
    run = attention_function(frozenset())
    module = SimpleNamespace(is_causal=True)
    key_shape = (2, 2, 8, 16)
    made, whole = tensors(mesh, [Shard(1)], SHAPE, key_shape, key_shape)
    out, _ = run(module, *made, None)
    want = attend(*whole, allowed=torch.ones(8, 8, dtype=torch.bool).tril())[0].transpose(1, 2)
    assert out.placements == (Shard(2),)
    compare(out, made, want, whole)
    made, whole = tensors(mesh, [Shard(1)], (2, 4, 1, 16), key_shape, key_shape)
    keep = torch.arange(8) < torch.tensor([8, 5])[:, None, None, None]
    out, _ = run(module, *made, keep)
    want = attend(*whole, allowed=keep)[0].transpose(1, 2)
    assert error(out.full_tensor(), want) < TOLERANCE[torch.float32]


def test_the_function_of_transformers_takes_dtensors(two_ranks):
    two_ranks.run(integrated)


def by_row_and_head(batch, head, query, key):
    return key <= query + 2 * batch - head


def moved(score, batch, head, query, key):
    return score + batch - head * (query - key) / 4


def asked():
    """Functions of indices are asked about the rows and heads of the whole call."""
    mesh = init_device_mesh("cpu", (2, 2))
    made, whole = tensors(mesh, [Shard(0), Shard(1)], SHAPE, SHAPE, SHAPE)
    mask, bias = masks.Function(by_row_and_head), biases.Function(moved)
    out = attnroute.attention(*made, mask, bias=bias, backend="chunked")
    at = torch.meshgrid(*map(torch.arange, (2, 4, 8, 8)), indexing="ij")
    want = attend(*whole, allowed=by_row_and_head(*at), bias=moved(0.0, *at))[0]
    compare(out, made, want, whole)
    free = masks.Function(lambda _b, _h, q, k: k <= q, per_batch=False, per_head=False)
    out = attnroute.attention(*made, free, backend="chunked")
    assert error(out.full_tensor(), attend(*whole, allowed=at[3] <= at[2])[0]) < TOLERANCE[torch.float32]


def test_functions_are_asked_about_the_whole_call(four_ranks):
    four_ranks.run(asked)


def outside():
    """A mesh of the first two ranks: on the others everything is empty."""
    mesh = DeviceMesh("cpu", [0, 1])
    made, whole = tensors(mesh, [Shard(1)], SHAPE, SHAPE, SHAPE)
    out = attnroute.attention(*made)
    assert out.shape == SHAPE
    if mesh.get_coordinate() is None:
        return tuple(out.to_local().shape)
    out.sum().backward()
    assert error(out.full_tensor(), attend(*whole)[0]) < TOLERANCE[torch.float32]
    return tuple(made[0].grad.to_local().shape)


def test_ranks_outside_of_the_mesh_do_nothing(four_ranks):
    assert four_ranks.run(outside) == [(2, 2, 8, 16)] * 2 + [(0,)] * 2


def short():
    mesh = init_device_mesh("cpu", (2,))
    made, _ = tensors(mesh, [Shard(1)], SHAPE, SHAPE, SHAPE)
    first = attnroute.attention(*made, is_causal=True)
    taken, dispatch.take = dispatch.take, None
    try:
        # On the long way this would be called.
        assert torch.equal(attnroute.attention(*made, is_causal=True).to_local(), first.to_local())
    finally:
        dispatch.take = taken


def test_the_local_call_goes_the_short_way_when_it_repeats(two_ranks):
    two_ranks.run(short)


def test_plain_tensors_import_nothing_of_dtensors():
    """Only what says whether a block of context parallel is open."""
    code = (
        "import sys, torch, attnroute\n"
        "q = torch.randn(1, 2, 8, 16)\n"
        "attnroute.attention(q, q.clone(), q.clone()), attnroute.explain(q, q, q)\n"
        "few = ('attnroute.distributed', 'attnroute.distributed.context', 'attnroute.distributed.torchs')\n"
        "parts = ('attnroute.distributed', 'torch.distributed.tensor')\n"
        "print([name for name in sys.modules if name.startswith(parts) and name not in few])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def beside():
    mesh = init_device_mesh("cpu", (2,))
    query = torch.randn(2, 2, 8, 16)
    said = []
    for name, tensor in {"sink": torch.zeros(2), "bias": torch.zeros(2, 8, 8)[None]}.items():
        try:
            attnroute.attention(query, query, query, **{name: distribute_tensor(tensor, mesh, [Replicate()])})
            said.append("ran")
        except attnroute.ArgumentError as refused:
            said.append(str(refused))
    return said


def test_a_dtensor_beside_plain_tensors_is_refused(two_ranks):
    said = "{} requires a plain tensor beside plain query, key and value; got DTensor; pass {}.to_local()."
    assert two_ranks.run(beside) == [[said.format(name, name) for name in ("sink", "bias")]] * 2
