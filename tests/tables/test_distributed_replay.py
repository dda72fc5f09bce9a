"""What is chosen for steps of rings and calls on DTensors, beside what each backend was measured to take."""

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
SAME, SAME_OF_HOST = 1.03, 1.1
"""Two measurements differ by so much, and where a call waits for the host."""


def fastest(case, before):
    """Return the times of the backends that were required, and the least."""
    taken = {
        name.removeprefix(before): times["ms"]
        for name, times in case["worst_rank"].items()
        if name.startswith(before)
    }
    assert len(taken) == 4
    return taken, min(taken.values())


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: ring["case"])
def test_the_backend_of_a_ring_is_the_one_that_was_fastest(ring):
    """Short rings wait for the host, which packages keep longer; a step's first call is as the others are."""
    batch, heads, heads_kv, tokens, dim = ring["size"]
    causal = " causal" if "causal" in ring["case"] else ""
    length = tokens // DATA["ranks"]
    call = parse(f"bf16 b{batch} hq{heads} hkv{heads_kv} sq{length} skv{length} d{dim}{causal} train ring")
    taken, least = fastest(ring, "attnroute ")
    assert taken[decide(call, HOST).selected] <= SAME * least


@pytest.mark.parametrize(
    "case", DATA["dtensors"], ids=lambda c: f"{c['size'][3]}-{c['trains']}-{c['key_heads']}"
)
def test_the_backend_of_a_call_on_dtensors_is_the_one_that_was_fastest(case):
    """DTensors keep the host besides, so that short calls take what the kernel's own host time says."""
    batch, heads, heads_kv, tokens, dim = case["size"]
    ranks = DATA["ranks"]
    own_kv = 1 if case["key_heads"] == "replicated" else heads_kv // ranks
    own = f"b{batch} hq{heads // ranks} hkv{own_kv} sq{tokens} skv{tokens} d{dim}"
    call = parse(f"bf16 {own} causal tokens_apart dtensor" + " train" * case["trains"])
    taken, least = fastest(case, "DTensors ")
    decision = decide(call, HOST)
    predicted = decision.verdict(decision.selected).prediction
    same = SAME if predicted.device_ms > predicted.host_ms else SAME_OF_HOST
    assert taken[decision.selected] <= same * least


def test_dtensors_are_what_makes_the_host_count():
    call = "bf16 b2 hq16 hkv16 sq2048 skv2048 d128 causal"
    local, spread = (decide(parse(line), HOST) for line in (call, f"{call} dtensor"))
    for verdict in spread.verdicts:
        if verdict.prediction is not None:
            own = local.verdict(verdict.backend).prediction
            assert verdict.prediction.host_ms > own.host_ms
            assert verdict.prediction.device_ms == own.device_ms


def test_both_short_and_long_rings_were_measured():
    assert len({min(r["worst_rank"], key=lambda name: r["worst_rank"][name]["ms"]) for r in RINGS}) > 1
    assert len(RINGS) == 4
