"""Which backends are predicted to be faster than one, with the reason why each did not run."""

from __future__ import annotations

import pytest

import attnroute
from attnroute.api.faster import Asked, advised
from attnroute.api.recording import TracedCall
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
