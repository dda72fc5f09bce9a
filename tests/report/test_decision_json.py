"""A decision goes through JSON unchanged."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from support.call_strategies import FIELDS

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report.json import SCHEMA_VERSION, decision_from_json, decision_json

LINES = (
    "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train",
    "fp16 b1 hq8 hkv2 sq1 skv704 d64 dense=1x1x1x704:empty=some",
    "fp32 b2 hq4 hkv4 sq64 skv64 d40/24 window=15,0 keys=64,3 bias=fp32:1x4x64x64:grad softcap=30 train",
    "fp8e4 b1 hq8 hkv8 sq128 skv128 d64 function alibi dynamic=seqlen_q",
    "bf16 b1 hq8 hkv8 sq704 skv704 d64 dense=1x1x704x704:recognized=causal double_backward train",
)
HOSTS = st.builds(
    Host,
    arch=st.sampled_from(["sm_80", "sm_90", "sm_120", "cpu"]),
    device_name=st.text(max_size=8),
    versions=st.fixed_dictionaries(
        {}, optional={"torch": st.sampled_from(["2.5.1", "2.11.0+cu130", "2.99"]), "cudnn": st.just("9.19.0")}
    ),
)
POLICIES = st.builds(
    Policy,
    require=st.sampled_from([None, "flash", "math"]),
    ban=st.sampled_from([(), ("cudnn",)]),
    strict=st.booleans(),
    allow_unknown=st.booleans(),
    origin=st.just({"require": "override()"}),
)


@given(st.sampled_from(LINES), st.booleans(), FIELDS["dtype"], HOSTS, POLICIES, st.booleans())
def test_every_decision_parses_back_to_itself(line, sink, dtype, host, policy, advise) -> None:
    call = parse(line).with_(sink=sink, dtype=dtype)
    decision = decide(call, host, policy=policy, advise=advise)
    assert decision_from_json(decision_json(decision, verbose=True)) == decision


@given(st.sampled_from(LINES), HOSTS, POLICIES)
def test_a_short_document_says_the_same_but_for_rows_that_hold(line, host, policy) -> None:
    decision = decide(parse(line), host, policy=policy, advise=True)
    read = decision_from_json(decision_json(decision))
    held = tuple(
        v.model_copy(update={"findings": tuple(f for f in v.findings if f.outcome in ("fail", "unknown"))})
        for v in decision.verdicts
    )
    assert read == decision.model_copy(update={"verdicts": held})
    data = json.loads(decision_json(decision))
    assert data["schema_version"] == SCHEMA_VERSION
    assert set(data) >= {"selected", "order", "why_this_order", "hints", "stock"}


def test_the_json_has_the_words_of_the_design() -> None:
    decision = decide(parse(LINES[0]), Host(arch="sm_90", versions={"torch": "2.11.0"}), advise=True)
    data = json.loads(decision_json(decision, verbose=True))
    assert set(data) >= {"call", "host", "policy", "verdicts", "order", "selected", "hints", "stock"}
    assert data["call"]["mask"] == [{"kind": "causal", "alignment": "top_left"}]
    assert set(data["verdicts"][0]) >= {
        "backend",
        "status",
        "findings",
        "repairs",
        "predicted_ms",
        "extra_bytes",
    }
