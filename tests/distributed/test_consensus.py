"""Consensus: processes that would run a call differently all say so, with the rank and the difference."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import attnroute
from attnroute import settings
from attnroute.distributed import consensus, context_parallel
from attnroute.distributed.consensus import Ballot, difference_of
from attnroute.errors import ConsensusError

SAME = Ballot(0, {"torch": "2.13.0"}, "H100", {"ATTNROUTE_STRICT": "1"}, "usual", "flash", "bf16 b2")
BEGIN = "attention() on DTensors requires "


INSTALL = "install the same everywhere"
ONE = "pass backend=, or shard evenly"


@pytest.mark.parametrize(
    ("changes", "required", "got", "to_do"),
    [
        ({"software": {"torch": "2.12.0"}}, "one version of torch", "2.12.0 2.13.0", INSTALL),
        (
            {"software": {"torch": "2.13.0", "flash-attn": "2.8.3"}},
            "one version of flash-attn",
            "2.8.3 none",
            INSTALL,
        ),
        ({"card": "A100"}, "cards of one kind", "A100 H100", "keep a mesh on one kind"),
        ({"environment": {}}, "one value of ATTNROUTE_STRICT", "unset 1", "set it for all processes"),
        ({"call": "other"}, "the same call", "other usual", "see which process took another branch"),
        ({"backend": "math"}, "one backend", "math flash", ONE),
    ],
)
def test_the_rank_and_the_difference_are_named(changes, required, got, to_do):
    ballots = [SAME, SAME._replace(rank=1), SAME._replace(rank=2, **changes), SAME._replace(rank=3)]
    odd, usual = got.split()
    said = f"{BEGIN}{required} on all processes of the mesh; got {odd} on rank 2, {usual} on rank 0; {to_do}."
    assert difference_of(ballots) == said


def test_local_calls_that_differ_are_named_where_backends_do():
    ballots = [SAME, SAME._replace(rank=1, backend="math", local="bf16 b1"), SAME._replace(rank=2)]
    said = "flash on rank 0; the local calls differ too: bf16 b1 on rank 1, bf16 b2 on rank 0;"
    assert said in difference_of(ballots)


@pytest.mark.parametrize("changes", [{}, {"local": "bf16 b1"}, {"backend": "", "local": ""}])
def test_parts_may_differ_and_may_be_empty(changes):
    assert difference_of([SAME, SAME._replace(rank=1, **changes)]) is None


def begin_anew():
    """Read the variables again, and forget about what processes agreed."""
    settings.reload()
    consensus._AGREED.forget()


def call(heads=4, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query = distribute_tensor(torch.randn(2, heads, 8, 16), mesh, [Shard(1)])
    key = distribute_tensor(torch.randn(2, heads // 2, 8, 16), mesh, [Replicate()])
    return attnroute.attention(query, key, key, **options)


def said_about(what):
    """Run calls with consensus; return what is raised on this process."""
    last = dist.get_rank() == dist.get_world_size() - 1
    variables = {"ATTNROUTE_CONSENSUS": "1"}
    if what == "environment" and last:
        variables["ATTNROUTE_BACKENDS"] = "-flash"
    os.environ.update(variables)
    begin_anew()
    try:
        steered = attnroute.override(backend="chunked") if what == "backend" and last else nullcontext()
        with steered:
            out = call(6 if what == "uneven" else 4, is_causal=what == "branch" and last)
        return tuple(out.placements)
    except ConsensusError as difference:
        return str(difference)
    finally:
        for name in variables:
            del os.environ[name]
        begin_anew()
        assert not settings.seeks_consensus()


def test_processes_that_differ_all_raise(two_ranks):
    agreed = (Shard(1),)
    assert two_ranks.run(said_about, "nothing") == [agreed, agreed]
    same = "on all processes of the mesh; got"
    environment = f"{BEGIN}one value of ATTNROUTE_BACKENDS {same} -flash on rank 1, unset on rank 0; "
    assert two_ranks.run(said_about, "environment") == [environment + "set it for all processes."] * 2
    backend = f"{BEGIN}one backend {same} chunked on rank 1, flash on rank 0; {ONE}."
    assert two_ranks.run(said_about, "backend") == [backend] * 2
    branch = two_ranks.run(said_about, "branch")
    assert branch[0] == branch[1]
    assert "the same call on all processes of the mesh; got query" in branch[0]
    assert "is_causal=True on rank 1" in branch[0]


def test_uneven_parts_and_processes_without_one_agree(four_ranks):
    assert four_ranks.run(said_about, "uneven") == [(Shard(1),)] * 4


def count_gathers():
    """Return how many objects were gathered in a first call, a second one, and one that is compiled."""
    os.environ["ATTNROUTE_CONSENSUS"] = "1"
    begin_anew()
    counts, gather = [0], dist.all_gather_object

    def counted(*args, **kwargs):
        counts[-1] += 1
        return gather(*args, **kwargs)

    dist.all_gather_object = counted
    try:
        compiled = torch.compile(attnroute.attention, fullgraph=True, backend="aot_eager")
        mesh = init_device_mesh("cpu", (2,))
        query = distribute_tensor(torch.randn(2, 4, 8, 16), mesh, [Shard(1)])
        for run in (attnroute.attention, attnroute.attention, compiled, compiled):
            run(query, query, query)
            counts.append(0)
    finally:
        dist.all_gather_object = gather
        del os.environ["ATTNROUTE_CONSENSUS"]
        begin_anew()
    return counts[:-1]


def test_only_the_first_call_of_a_kind_communicates(two_ranks):
    assert two_ranks.run(count_gathers) == [[1, 0, 1, 0]] * 2


def in_a_block(what):
    """Calls over the tokens of ranks, of which the last one is another in something; what is raised."""
    last = dist.get_rank() == dist.get_world_size() - 1
    variables = {"ATTNROUTE_CONSENSUS": "1"}
    if what == "environment" and last:
        variables["ATTNROUTE_STRICT"] = "1"
    os.environ.update(variables)
    attnroute.reset()
    gathers, gather = [], dist.all_gather_object

    def counted(*args, **kwargs):
        gathers.append(args)
        return gather(*args, **kwargs)

    dist.all_gather_object = counted
    query, key, value = (torch.randn(1, 4, 8, 16) for _ in range(3))
    options = {"is_causal": True} if what != "backend" else {"window": (3, 0)}
    run = attnroute.attention
    if what == "compiled":
        run = torch.compile(attnroute.attention, fullgraph=True, backend="aot_eager")
    try:
        steered = attnroute.override(backend="chunked") if what == "backend" and last else nullcontext()
        with context_parallel(init_device_mesh("cpu", (dist.get_world_size(),))), steered:
            for _ in range(2):
                run(query, key, value, **options)
        return len(gathers)
    except ConsensusError as difference:
        return str(difference)
    finally:
        dist.all_gather_object = gather
        for name in variables:
            del os.environ[name]
        attnroute.reset()


def test_ranks_of_a_block_compare_what_each_step_would_run(two_ranks, four_ranks):
    inside = "attention() inside of context_parallel() requires"
    for ranks in two_ranks, four_ranks:
        last = ranks.size - 1
        # Shapes first, then what is run; a second call sends nothing.
        assert ranks.run(in_a_block, "nothing") == [2] * ranks.size
        same = "on all processes of the mesh; got"
        said = f"{inside} one value of ATTNROUTE_STRICT {same} 1 on rank {last}, unset on rank 0; "
        assert ranks.run(in_a_block, "environment") == [said + "set it for all processes."] * ranks.size
        said = f"{inside} one backend {same} chunked on rank {last}, flash on rank 0; {ONE}."
        assert ranks.run(in_a_block, "backend") == [said] * ranks.size


def test_a_tracer_compares_in_a_thread(two_ranks):
    assert two_ranks.run(in_a_block, "compiled") == [1, 1]
