"""Which backends are predicted to be faster than one, with the reason why each did not run."""

from __future__ import annotations

import pytest

import attnroute
from attnroute.api.faster import Asked, advised
from attnroute.api.recording import Place, Recording, TracedCall
from attnroute.api.recording_text import render_recording
from attnroute.engine.advice.faster import faster_than, predicted_ms
from attnroute.engine.select import select
from attnroute.question.line import parse
from attnroute.tables.load import load

HOST = attnroute.Host(arch="sm_90", device_name="NVIDIA H200", versions={"torch": "2.11.0", "cudnn": "9.19"})
LONG = "bf16 b2 hq16 hkv16 sq4096 skv4096 d128 causal"


def selected(line, policy=None, host=HOST):
    return select(parse(line), host, load(), policy or attnroute.Policy())


def advice(line, backend, policy=None, *, is_stock=False):
    traced = TracedCall(line=line, device="cuda:0", backend=backend, count=1)
    return advised(traced, Asked(parse(line), HOST, policy or attnroute.Policy()), is_stock=is_stock)


def test_the_fastest_come_first_and_save_a_tenth():
    selection = selected(LONG)
    own = predicted_ms(selection, "efficient")
    found = faster_than(selection, "efficient")
    assert found == tuple(sorted(found, key=lambda item: item[1]))
    assert {"cudnn", "fa3"} <= {name for name, _ in found}
    assert all(time < 0.9 * own for _, time in found)


def test_a_package_that_is_missing_is_named_with_what_installs_it():
    found = {f.backend: f for f in advice(LONG, selected(LONG).selected).faster}
    assert found["fa3"].why_not == "needs flash-attn-3 or xformers, none of which is installed"
    assert found["fa3"].change.startswith("installing")
    assert found["fa3"].predicted_ms < advice(LONG, "flash").predicted_ms


def test_a_rejected_backend_says_the_reason_of_its_row():
    line = f"{LONG} softcap=30"
    faster = advice(line, "flex").faster
    reasons = {f.backend: f.why_not for f in faster}
    judgements = selected(line).judgements
    rejected = [name for name in reasons if judgements[name].status == "rejected"]
    assert rejected
    assert all(reasons[name].startswith("requires ") and "[" in reasons[name] for name in rejected)


def test_a_ban_is_named_as_the_reason():
    policy = attnroute.Policy(ban=("cudnn",))
    found = {f.backend: f for f in advice(LONG, "efficient", policy).faster}
    assert "banned" in found["cudnn"].why_not


def test_torchs_own_call_says_what_routing_would_select():
    first = selected(LONG).selected
    found = advice(LONG, "efficient", is_stock=True)
    assert found.routed == first
    assert "route_sdpa()" in {f.backend: f for f in found.faster}[first].change


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_times_of_other_cards_say_nothing(arch):
    host = attnroute.Host(arch=arch, versions={"torch": "2.11.0"})
    assert faster_than(selected(LONG, host=host), "efficient") == ()


TABLE = """\
attention: 100 calls and 2 in graphs of torch.compile, whose runs nobody counts;
           1,212 ms by events on the device
cuda:0: sm_90, NVIDIA H200, torch 2.11.0, cudnn 9.19

    module                  kernel                   calls  ms each  ms in all
 ─────────────────────────────────────────────────────────────────────────────
 1  model.layers.0-1.cross  torch's efficient            4      267      1,068
 2  model.layers.0-1.attn   cudnn                       96      0.5        144
                                                    96 bwd        1
 3  model.layers.{0,4}.out  flash              2 in graphs

  1  bf16 b2 hq16 hkv16 sq4096 skv4096 d128 causal
  2  bf16 b2 hq8 hkv8 sq64 skv64-72 d80 train
     48 of the calls made again by checkpoints
     prepared: pad_head_dim
  3  bf16 b2 hq16 hkv16 sq4096 skv4096 d128 causal"""


def test_a_table_says_what_ran_in_modules_that_are_alike():
    def kind(line, backend, count, places, **named):
        made = tuple(Place(model="Llama", **place) for place in places)
        return TracedCall(
            line=line, device="cuda:0", backend=backend, count=count, places=made, clock="device", **named
        )

    def of_layers(name, numbers, **named):
        return [{"module": f"model.layers.{n}.{name}", **named} for n in numbers]

    times = {"count": 24, "backward": 24, "forward_ms": 12.0, "backward_ms": 24.0, "recomputed": 12}
    calls = [
        kind(
            f"bf16 b2 hq8 hkv8 sq64 skv{n} d80 train",
            "cudnn",
            48,
            of_layers("attn", (0, 1), **times),
            repairs=("pad_head_dim",),
        )
        for n in (64, 72)
    ]
    calls.append(kind(LONG, "flash", None, of_layers("out", (0, 4)), how="compiled"))
    cross = of_layers("cross", (0, 1), count=2, forward_ms=534.0, longest_ms=270.0)
    stock = kind(LONG, "efficient", 4, cross)
    recording = Recording(hosts={"cuda:0": HOST}, calls=tuple(calls), stock=(stock,))
    assert render_recording(recording, 80) == TABLE
