"""Attention on DTensors: results and every gradient against one process in float64, for each placement."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import Spy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import attnroute
from attnroute import masks

SEQLEN, DIM = 10, 8
PLACEMENTS = {"R": Replicate(), "P": Partial(), **{str(dim): Shard(dim) for dim in range(4)}}


@dataclass(frozen=True)
class Case:
    """One call: placements are a letter or dimension for each dimension of the mesh.

    `extra` holds arguments: a value, or a tensor's shape with its placement, "-" for a plain tensor.
    """

    mesh: tuple[int, ...] = (2,)
    query: str = "1"
    key: str = "1"
    value: str = "1"
    out: str = "1"
    grads: tuple[str, str, str] = ("1", "1", "1")
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    layout: str = "bhsd"
    extra: dict = field(default_factory=dict)
    extra_grads: dict = field(default_factory=dict)
    mask: str | None = None


REPLICATED = Case(key="R", value="R", grads=("1", "P", "P"))
TWO = {
    "heads": Case(),
    "replicated keys and values": REPLICATED,
    "one key head": replace(REPLICATED, kv_heads=1),
    "heads that share no heads evenly": replace(REPLICATED, heads=6, kv_heads=2, batch=1),
    "replicated query": Case(query="R", grads=("P", "1", "1")),
    "batch": Case(query="0", key="0", value="0", out="0", grads=("0", "0", "0")),
    "uneven batch": Case(query="0", key="0", value="R", out="0", grads=("0", "0", "P"), batch=3),
    "one row for two": Case(query="0", key="0", value="R", out="0", grads=("0", "0", "P"), batch=1),
    "nothing split": Case(query="R", key="R", value="R", out="R", grads=("R", "R", "R")),
    "bshd": Case(query="2", key="2", value="R", out="2", grads=("2", "2", "P"), layout="bshd"),
    "thd": Case(layout="thd"),
    "thd replicated keys": replace(REPLICATED, layout="thd", extra={"cu_seqlens_q": "R"}),
    "padding": replace(REPLICATED, mask="padding"),
    "padding of split rows": Case(
        query="0", key="0", value="0", out="0", grads=("0", "0", "0"), batch=3, mask="padding"
    ),
    "padding as a DTensor": Case(
        query="0", key="0", value="0", out="0", grads=("0", "0", "0"), mask="sharded padding"
    ),
    "counts of rows": Case(query="0", key="0", value="0", out="0", grads=("0", "0", "0"), mask="counts"),
    "documents": Case(query="0", key="0", value="0", out="0", grads=("0", "0", "0"), mask="documents"),
    "dense mask": Case(mask="dense"),
    "dense mask as a DTensor": Case(mask="sharded dense"),
    "bias": Case(extra={"bias": ((2, 4, SEQLEN, SEQLEN), "1")}, extra_grads={"bias": "1"}),
    "replicated bias": Case(extra={"bias": ((1, 4, SEQLEN, SEQLEN), "R")}, extra_grads={"bias": "P"}),
    "bias of all heads": Case(extra={"bias": ((1, 1, SEQLEN, SEQLEN), "R")}, extra_grads={"bias": "P"}),
    "sink": Case(extra={"sink": ((4,), "0")}, extra_grads={"sink": "0"}),
    "replicated sink": Case(extra={"sink": ((4,), "R")}, extra_grads={"sink": "P"}),
    "slopes": Case(extra={"alibi_slopes": ((4,), "0")}),
    "plain slopes": Case(extra={"alibi_slopes": ((2, 4), "-"), "softcap": 2.0}),
}
FOUR = {
    "two dimensions": Case(
        mesh=(2, 2), query="01", key="01", value="0R", out="01", grads=("01", "01", "0P"), mask="padding"
    ),
    "replicated on both": Case(
        mesh=(2, 2), query="01", key="RR", value="RR", out="01", grads=("01", "PP", "PP"), mask="dense"
    ),
    "repeated on one": Case(
        mesh=(2, 2), query="R1", key="R1", value="RR", out="R1", grads=("R1", "R1", "RP")
    ),
    "heads twice": Case(
        mesh=(2, 2), query="11", key="1R", value="RR", out="11", grads=("11", "1P", "PP"), heads=8
    ),
    "one rank without heads": Case(mesh=(4,), heads=6, kv_heads=3, extra={"sink": ((6,), "R")}),
    "no even heads": replace(REPLICATED, mesh=(4,), heads=6, kv_heads=2),
}


def place(full, letters, mesh):
    """Distribute a tensor, tokens outermost in memory where it has heads."""
    made = distribute_tensor(full, mesh, [PLACEMENTS[letter] for letter in letters])
    local = made.to_local()
    if local.dim() == 4 and local.numel():
        local = local.transpose(1, 2).contiguous().transpose(1, 2)
    made = DTensor.from_local(local, mesh, made.placements, shape=full.shape, stride=full.stride())
    return made.detach()


def mask_of(case, mesh):
    """Return the mask of a case, and the same of plain tensors."""
    rows = [SEQLEN - 3 * (row % 3) for row in range(case.batch)]
    lengths = torch.tensor(rows)
    if case.mask == "counts":
        return masks.KeyPadding(lengths=rows), masks.KeyPadding(lengths=rows)
    if case.mask == "padding":
        return (masks.KeyPadding(lengths=lengths) & masks.Causal(),) * 2
    if case.mask == "sharded padding":
        keep = torch.arange(SEQLEN) < lengths[:, None]
        return masks.KeyPadding(keep=place(keep, case.query, mesh)), masks.KeyPadding(keep=keep)
    if case.mask == "documents":
        ids = torch.stack([torch.arange(SEQLEN) // (3 + row) for row in range(case.batch)])
        return masks.Documents(ids=place(ids, "R", mesh)) & masks.Causal(), masks.Documents(
            ids=ids
        ) & masks.Causal()
    dense = torch.rand(case.batch, case.heads, SEQLEN, SEQLEN) > 0.3
    dense[..., 0] = True
    return (place(dense, case.query, mesh) if case.mask == "sharded dense" else dense), masks.Dense(dense)


def inputs_of(case, mesh):
    """Return the arguments as DTensors, the same whole in float64, and the mask of the latter."""
    torch.manual_seed(3)
    shapes = {"query": case.heads, "key": case.kv_heads, "value": case.kv_heads}
    given, whole = {}, {}
    for name, heads in shapes.items():
        shape = {
            "bhsd": (case.batch, heads, SEQLEN, DIM),
            "bshd": (case.batch, SEQLEN, heads, DIM),
            "thd": (2 * SEQLEN, heads, DIM),
        }[case.layout]
        whole[name] = torch.randn(shape)
        given[name] = place(whole[name], getattr(case, name), mesh).requires_grad_()
    for name, value in case.extra.items():
        if name == "cu_seqlens_q":
            continue
        if not isinstance(value, tuple):
            given[name] = whole[name] = value
            continue
        whole[name] = torch.rand(value[0])
        given[name] = whole[name] if value[1] == "-" else place(whole[name], value[1], mesh)
        given[name].requires_grad_(name in case.extra_grads)
    allowed = None
    if case.layout == "thd":
        sums = torch.tensor([0, 3, 11, 2 * SEQLEN])
        given["cu_seqlens_q"] = place(sums, "R", mesh) if "cu_seqlens_q" in case.extra else sums
        given["layout"], allowed = "thd", masks.Documents(cu_seqlens=sums)
    elif case.mask is not None:
        given["mask"], allowed = mask_of(case, mesh)
    if case.layout == "bshd":
        given["layout"] = "bshd"
    whole = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in whole.items()}
    for name in (*shapes, *case.extra_grads):
        whole[name].requires_grad_()
    return given, whole, allowed


def reference(case, whole, allowed):
    """Return output and log-sum-exp in the layout of the case."""
    turn = {
        "bhsd": lambda t: t,
        "bshd": lambda t: t.transpose(1, 2),
        "thd": lambda t: t.transpose(0, 1)[None],
    }
    inputs = {n: turn[case.layout](whole[n]) for n in ("query", "key", "value")}
    others = {n: t for n, t in whole.items() if n not in inputs}
    seqlen = inputs["query"].shape[2]
    if allowed is not None:
        allowed = allowed.materialize(seqlen, seqlen, batch=len(inputs["query"]), num_heads_q=case.heads)
    out, lse = attend(**inputs, **others, allowed=allowed)
    if case.layout == "thd":
        return out[0].transpose(0, 1), lse[0]
    return turn[case.layout](out), lse


def placements(letters):
    return tuple(PLACEMENTS[letter] for letter in letters)


def check_kernels(given, want):
    """Fail unless the backend that `explain()` names ran on this process, and one that is required."""
    is_empty = 0 in given["query"].to_local().shape
    for options in ({}, {"backend": "chunked"}):
        with Spy() as spy:
            out = attnroute.attention(**given, **options)
            chosen = None if is_empty else attnroute.explain(**given, **options).selected
        assert spy.backends == (set() if is_empty else {chosen})
        assert chosen in (None, options.get("backend", chosen))
        assert error(out.full_tensor(), want) < TOLERANCE[torch.float32]


def check(name, compiled=False):
    case = {**TWO, **FOUR}[name]
    mesh = init_device_mesh("cpu", case.mesh)
    given, whole, allowed = inputs_of(case, mesh)
    want, want_lse = reference(case, whole, allowed)
    run = attnroute.attention
    if compiled:
        run = torch.compile(attnroute.attention, fullgraph=True, backend="aot_eager")
    else:
        check_kernels(given, want)
    out = run(**given)
    assert out.placements == placements(case.out)
    assert error(out.full_tensor(), want) < TOLERANCE[torch.float32]
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(5))
    want.backward(weights.double())
    out.backward(place(weights, case.out, mesh))
    expected = dict(zip(("query", "key", "value"), case.grads, strict=True)) | case.extra_grads
    for tensor, letters in expected.items():
        grad = given[tensor].grad
        assert grad.placements == placements(letters), f"{tensor}: {grad.placements}"
        assert error(grad.full_tensor(), whole[tensor].grad) < TOLERANCE[torch.float32], tensor
    again, lse = run(**given, return_lse=True)
    heads_first = {"bhsd": None, "bshd": {"2": "1"}, "thd": {"1": "0"}}[case.layout] or {}
    assert lse.placements == placements([heads_first.get(letter, letter) for letter in case.out])
    assert error(again.full_tensor(), want) < TOLERANCE[torch.float32]
    got_lse = lse.full_tensor()
    assert error(got_lse.where(want_lse.isfinite(), 0), want_lse.where(want_lse.isfinite(), 0)) < 1e-5


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_compute_what_one_does(two_ranks, name):
    two_ranks.run(check, name)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_compute_what_one_does(four_ranks, name):
    four_ranks.run(check, name)


@pytest.mark.parametrize("name", ["replicated keys and values", "padding of split rows", "replicated sink"])
def test_two_ranks_compiled(two_ranks, name):
    two_ranks.run(check, name, True)


@pytest.mark.parametrize("name", ["two dimensions", "one rank without heads"])
def test_four_ranks_compiled(four_ranks, name):
    four_ranks.run(check, name, True)
