"""What a call becomes on a mesh: bytes that can be counted by hand, times of links, what is lost."""

from __future__ import annotations

import json

import pytest

from attnroute.cli import main
from attnroute.engine.collectives import Fabric, Group, fabric_of
from attnroute.engine.mesh import plan
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.mesh import mesh_of
from attnroute.question.policy import Policy
from attnroute.report.mesh import render_plan
from attnroute.tables.load import load

TABLES = load()
VERSIONS = {"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": "9.20.0", "triton": "3.7.1"}
H200 = Host(arch="sm_90", device_name="NVIDIA H200", versions=VERSIONS)
CPU = Host(arch="cpu", versions={"torch": "2.13.0"})
LONG = "bf16 b1 hq32 hkv8 sq8192 d128 causal"
MIB = 2**20


def planned(line, mesh, host=H200, **policy):
    return plan(parse(line), mesh_of(mesh), host, TABLES, Policy(**policy))


def text_of(line, mesh, host=H200):
    return " ".join(render_plan(planned(line, mesh, host)).split())


def test_heads_and_rows_move_nothing():
    (way,) = planned(f"{LONG} train", "tp=4").ways
    assert (way.name, way.transfers) == ("local", ())
    assert way.ms == way.attention_ms > 0
    # 8 query and 2 key/value heads: 16 + 4 + 4 + 16 MiB, and their gradients.
    assert way.memory_bytes == 80 * MIB


def test_a_ring_passes_keys_and_values_on():
    way = planned(f"{LONG} train", "cp=4").ways[0]
    (moved,) = way.transfers
    own = 2 * 8 * 2048 * 128 * 2
    assert (moved.how, moved.over, moved.ranks) == ("passed_on", "cp", 4)
    assert moved.forward_bytes == 3 * own
    # Keys and values again, and four times their gradients in float32.
    assert moved.backward_bytes == 3 * own + 4 * 2 * own
    assert planned(LONG, "cp=4").ways[0].transfers[0].backward_bytes == 0


def test_ulysses_moves_all_but_its_own_part():
    ring, ulysses = planned(f"{LONG} train", "cp=4").ways
    (moved,) = ulysses.transfers
    own = (32 + 8) * 2 * 2048 * 128 * 2
    assert moved.forward_bytes == moved.backward_bytes == own * 3 // 4
    assert ulysses.parts[0].steps[0].decision.call.seqlen_q == 8192
    assert [step.times for step in ring.parts[0].steps] == [1, 3]


def test_key_heads_are_copied_where_ranks_are_more():
    way = planned(LONG, "cp=16").ways[1]
    assert way.kv_copies == 2
    assert "key/value heads are copied 2 times" in text_of(LONG, "cp=16")


def test_gradients_of_shared_key_heads_are_summed():
    (way,) = planned(f"{LONG} train", "tp=32").ways
    (moved,) = way.transfers
    one_head = 2 * 8192 * 128 * 2
    assert (moved.how, moved.ranks, moved.backward_bytes) == ("summed", 4, 2 * one_head * 3 // 4)
    assert planned(LONG, "tp=32").ways[0].transfers == ()


def test_whole_key_heads_are_held_and_summed_by_all():
    line = "bf16 b4 hq12 hkv6 sq4096 d128 train"
    (way,) = planned(line, "tp=4").ways
    (moved,) = way.transfers
    head = 4 * 4096 * 128 * 2
    assert (moved.how, moved.ranks, moved.backward_bytes) == ("summed", 4, 2 * (6 * 2 * head) * 3 // 4)
    # Query and output of 3 heads, as many copies of keys and values, and these whole; all with gradients.
    assert way.memory_bytes == 2 * (3 + 3 + 2 * 3 + 2 * 6) * head
    assert "all 6 are on each rank, and copied for each query head" in text_of(line, "tp=4")


def test_what_a_ring_loses_has_the_reason_of_its_row():
    told = text_of("bf16 b4 hq32 hkv8 sq8192 d128 window=1023,0 train", "cp=4")
    assert "no backend may run this call" in told
    assert "no longer flash: requires window = false" in told
    assert "the only one possible" in told


def test_uneven_heads_are_said():
    told = text_of("bf16 b4 hq8 sq4096 d128 causal", "tp=3")
    assert "- 2 ranks: bf16 b4 hq3 hkv3" in told
    assert "- 1 rank: bf16 b4 hq2 hkv2" in told
    assert "uneven: every rank waits for those with the most" in told


def test_steps_hide_what_is_passed_on():
    ring = planned("bf16 b4 hq32 hkv8 sq65536 d128 causal train", "cp=4").ways[0]
    assert ring.transfers[0].ms > 1
    assert ring.waiting_ms == 0
    short = planned("bf16 b1 hq32 hkv8 sq512 d128 causal train", "cp=4").ways[0]
    hidden = short.attention_ms * 3 / 4
    assert short.waiting_ms == pytest.approx(max(0.0, short.transfers[0].ms - hidden))


def test_where_no_link_is_known_bytes_are_still_said():
    ring, ulysses = planned("fp32 b1 hq8 sq512 d64", "cp=2", CPU).ways
    assert ulysses.transfers[0].forward_bytes > 0
    assert ulysses.transfers[0].ms is None
    assert ring.is_possible
    assert "no time of communication" in text_of("fp32 b1 hq8 sq512 d64", "cp=2", CPU)


@pytest.mark.parametrize(
    ("card", "arch", "link", "gpus"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90", "NVLink 4", 8),
        ("NVIDIA H100 PCIe", "sm_90", "PCIe 5 x16", 8),
        ("NVIDIA GH200 480GB", "sm_90", "InfiniBand NDR", 1),
        ("NVIDIA GB200", "sm_100", "NVLink 5 of a rack", 72),
        ("NVIDIA L4", "sm_89", "PCIe 4 x16", 8),
    ],
)
def test_a_card_has_its_link(card, arch, link, gpus):
    fabric = fabric_of(TABLES, Host(arch=arch, device_name=card))
    assert (fabric.inside.title, fabric.gpus) == (link, gpus)


def group(size, stride=1):
    return Group.of(fabric_of(TABLES, H200), size, stride)


def test_ranks_that_lie_far_apart_are_on_other_machines():
    assert [(g.near, g.machines) for g in (group(8), group(16), group(4, 2), group(4, 8))] == [
        (8, 1),
        (8, 2),
        (4, 1),
        (1, 4),
    ]


def test_a_collective_takes_its_steps_and_its_bytes():
    fabric = fabric_of(TABLES, H200)
    assert isinstance(fabric, Fabric)
    size = 2**30
    steps = 7 * 3.4e-3
    assert group(8).gathered_ms(size) == pytest.approx(8.4e-3 + steps + size * 7 / 8 / 370.8e6)
    assert group(8).summed_ms(size) == pytest.approx(8.4e-3 + 2 * (steps + size * 7 / 8 / 370.8e6))
    assert group(8).passed_on_ms(size) == pytest.approx(8.4e-3 + 3.4e-3 + size / 370.8e6)
    assert group(16).passed_on_ms(size) == pytest.approx(8.4e-3 + 14e-3 + size / 48e6)
    # One rank of each machine has one port; eight have eight, and NVLink is then the slower one.
    assert group(2, 8).gathered_ms(size) > 7 * group(16).gathered_ms(size) / 2
    assert group(16).exchanged_ms(size) == pytest.approx(8.4e-3 + 14e-3 + size / 2 / 48e6)
    assert group(1).summed_ms(size) == group(8).summed_ms(0) == 0.0


def test_json_has_the_local_calls_and_decisions(capsys):
    code = main(["explain", *f"{LONG} train".split(), "--mesh", "tp=2,cp=4", "--arch", "h200", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == 0
    assert data["mesh"] == {"dp": 1, "cp": 4, "tp": 2}
    ring, ulysses = data["ways"]
    step = ring["parts"][0]["steps"][0]
    assert step["decision"]["call"]["num_heads_q"] == 16
    assert step["decision"]["call"]["context"]["distributed"] == "ring"
    assert {f["outcome"] for v in step["decision"]["verdicts"] for f in v["findings"]} <= {"fail", "unknown"}
    assert ulysses["transfers"][0]["ms"] > 0
    assert data["link"] == ["NVLink 4", 370.8, 8]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("bf16 b2 hq8 sq64 d64 --mesh dp=4", 2, "2 of 4 ranks without any"),
        ("bf16 b2 hq8 sq64 d64 --mesh pp=4", 2, "sizes of tp (heads), cp (tokens) and dp (batch rows)"),
        ("bf16 b2 hq8 sq64 d64 --mesh tp=2 --as te", 2, "--mesh requires a decision of attnroute"),
        ("bf16 b2 hq8 sq1 skv64 d64 --mesh cp=2", 4, "neither is possible"),
    ],
)
def test_exit_codes(words, code, says, capsys):
    assert main(["explain", *words.split(), "--arch", "h200"]) == code
    assert says in " ".join("".join(capsys.readouterr()).split())
