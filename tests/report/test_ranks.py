"""Ranks side by side: those that are alike share a row, and every difference is named with its ranks."""

from __future__ import annotations

import pytest

from attnroute.question.host import Host
from attnroute.report.ranks import Rank, differences, ranks_data, render_ranks

VERSIONS = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"}
H200 = Host(arch="sm_90", device_name="NVIDIA H200", versions=VERSIONS)


def ranks(*hosts, machines="aabb", settings=None):
    return [
        Rank(
            rank=number,
            machine=machines[number],
            attnroute="1.0",
            host=host,
            settings=(settings or {}).get(number, {}),
        )
        for number, host in enumerate(hosts)
    ]


def test_ranks_that_are_alike_share_a_row():
    assert render_ranks(ranks(H200, H200, H200, H200)) == (
        "ranks  machine  device               torch         cuda  cudnn\n"
        "0-1    a        NVIDIA H200 (sm_90)  2.11.0+cu130  13.0  9.19.0\n"
        "2-3    b        NVIDIA H200 (sm_90)  2.11.0+cu130  13.0  9.19.0\n"
        "\n"
        "All 4 ranks are alike: device, packages and settings."
    )


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (H200.model_copy(update={"device_name": "NVIDIA H100"}), "device"),
        (H200.model_copy(update={"arch": "sm_100"}), "architecture"),
        (H200.with_versions({"cudnn": "9.20.0"}), "cudnn"),
        (H200.with_versions({"flash-attn-3": "3.0.0"}), "flash-attn-3"),
        (H200.model_copy(update={"broken": {"triton": "no C compiler"}}), "triton"),
    ],
)
def test_each_difference_is_named(other, named):
    found = differences(ranks(H200, other, H200, other))
    assert [name for name, _ in found] == [named]
    assert list(found[0][1].values()) == [[0, 2], [1, 3]]
    assert f"{named}:" in render_ranks(ranks(H200, other, H200, other)).replace(f"{named:<10} ", f"{named}:")


def test_settings_differ_and_places_do_not():
    found = ranks(H200, H200, H200, settings={1: {"ATTNROUTE_BACKEND": "flash"}}, machines="abc")
    assert differences(found) == [("ATTNROUTE_BACKEND", {"nothing": [0, 2], "flash": [1]})]
    assert "ATTNROUTE_BACKEND: nothing on ranks 0, 2; flash on rank 1" in render_ranks(found)


def test_a_rank_that_could_not_be_probed_differs():
    found = [*ranks(H200), Rank(rank=1, machine="b", attnroute="1.0", problem="RuntimeError: no driver")]
    data = ranks_data(found)
    assert {
        "name": "problem",
        "values": [{"value": "nothing", "ranks": [0]}, {"value": "RuntimeError: no driver", "ranks": [1]}],
    } in data["differences"]
    assert data["ranks"][1]["host"] is None
    assert "RuntimeError: no driver on rank 1" in render_ranks(found)
