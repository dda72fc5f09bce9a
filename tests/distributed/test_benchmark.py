"""The benchmark of many GPUs measures rings and DTensors on gloo ranks too, and what it compares agrees."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(what):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import distributed_calls as calls
    finally:
        sys.path.remove(str(BENCHMARKS))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with patch.multiple(calls, ROUNDS=1, WARM_UP=1, CALLS=1):
        if what == "right":
            return calls.right(mesh, "cpu")
        if what == "rings":
            return [calls.ring(case, mesh, "cpu", ["flash", "fa3"]) for case in calls.TINY_RINGS]
        (case,) = calls.TINY_SPREAD
        ways = [(trains, replicated) for trains in (False, True) for replicated in (False, True)]
        return [
            calls.spread(case, mesh, "cpu", trains=one, replicated=other, backends=["flash", "chunked"])
            for one, other in ways
        ]


def test_rings_on_each_backend_beside_by_hand(two_ranks, four_ranks):
    for ranks in two_ranks, four_ranks:
        for found in ranks.run(measured, "rings")[0]:
            assert set(found["worst_rank"]) == {"by hand cpu", "attnroute", "attnroute flash"}
            assert set(found["over_by_hand"]) == {"attnroute", "attnroute flash"}
            assert max(found["apart"].values()) < 1e-6
            assert found["backends"] == [{"attnroute": ["flash"], "attnroute flash": ["flash"]}] * ranks.size
            assert "fa3 is required" in found["left_out"]["fa3"]


def test_a_ring_is_right(two_ranks):
    assert max(two_ranks.run(measured, "right")[0].values()) < 1e-6


@pytest.mark.parametrize("size", ["two_ranks", "four_ranks"])
def test_calls_on_dtensors_beside_by_hand(size, request):
    ranks = request.getfixturevalue(size)
    for found in ranks.run(measured, "dtensors")[0]:
        assert found["apart"] < 1e-6
        assert set(found["worst_rank"]) == {
            "DTensors",
            "DTensors flash",
            "DTensors chunked",
            "by hand on stock",
            "by hand on attention()",
        }
        assert found["backends"] == [["flash"]] * ranks.size
        assert found["over_stock"] > 0
