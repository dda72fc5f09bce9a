"""What is chosen for the steps of rings, beside what was measured of whole rings on each backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnroute import decide
from attnroute.question.host import Host
from attnroute.question.line import parse

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200x2-torch2.11-distributed.json"
DATA = json.loads(RESULTS.read_text(encoding="utf-8"))
HOST = Host.model_validate_json(
    (Path(__file__).parents[1] / "hosts/probed/h200-packages.json").read_text(encoding="utf-8")
)
RINGS = [ring for ring in DATA["rings"] if "worst_rank" in ring]


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring["case"])
def test_the_backend_of_a_ring_is_the_one_that_was_fastest(ring):
    """Short rings wait for the host, which packages keep longer; a step's first call is as the others are."""
    batch, heads, heads_kv, tokens, dim = ring["size"]
    causal = " causal" if "causal" in ring["case"] else ""
    length = tokens // DATA["ranks"]
    call = parse(f"bf16 b{batch} hq{heads} hkv{heads_kv} sq{length} skv{length} d{dim}{causal} train ring")
    ours = {
        name.removeprefix("attnroute "): t["ms"]
        for name, t in ring["worst_rank"].items()
        if name.startswith("attnroute ")
    }
    assert len(ours) == 4
    assert ours[decide(call, HOST).selected] <= 1.03 * min(ours.values())


def test_both_short_and_long_rings_were_measured():
    assert len({min(r["worst_rank"], key=lambda name: r["worst_rank"][name]["ms"]) for r in RINGS}) > 1
    assert len(RINGS) == 4
