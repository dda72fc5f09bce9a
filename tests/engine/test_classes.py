"""Calls of one class are decided alike, so that a new length needs no new decision."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import calls, hosts

from attnroute.engine.classes import class_of, length_conditions
from attnroute.engine.decide import decide
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.tables.load import load

LENGTHS = st.sampled_from([1, 2, 63, 64, 100, 127, 128, 129, 192, 256, 320, 704, 1024, 4096, 65536, 70000])
H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0"})
DECODE = {
    "dtype": "bfloat16",
    "batch": 1,
    "num_heads_q": 8,
    "num_heads_kv": 2,
    "seqlen_q": 1,
    "seqlen_kv": 300,
    "head_dim_qk": 64,
    "head_dim_v": 64,
}


def outcome(call, host):
    decision = decide(call, host)
    verdicts = tuple((v.backend, v.status, v.repairs) for v in decision.verdicts)
    return decision.selected, decision.order, verdicts


@settings(max_examples=60)
@given(calls(), hosts(), LENGTHS, LENGTHS, st.booleans())
def test_equal_classes_have_equal_outcomes(call, host, seqlen_q, seqlen_kv, square):
    try:
        other = call.with_(seqlen_q=seqlen_kv if square else seqlen_q, seqlen_kv=seqlen_kv)
    except ValueError:
        return
    first, second = (class_of(c, host.arch, load()) for c in (call, other))
    if first is not None and first == second:
        assert outcome(call, host) == outcome(other, host)


@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize(
    "mask", [[], [{"kind": "causal", "alignment": "bottom_right"}], [{"kind": "key_padding"}]]
)
@pytest.mark.parametrize("seqlen_q", [1, 7, 130])
def test_every_length_agrees_with_its_class(phase, mask, seqlen_q):
    known = {}
    for seqlen_kv in [1, 2, 3, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 704, 1088, 4096]:
        call = Call.model_validate(
            {**DECODE, "phase": phase, "mask": mask, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
        )
        where = class_of(call, "sm_90", load())
        found = outcome(call, H100)
        assert known.setdefault(where, found) == found
    assert len(known) < 12


def test_a_length_that_a_rule_asks_about_is_another_class():
    training = {**DECODE, "phase": "training", "seqlen_q": 200}
    classes = [
        class_of(Call.model_validate({**training, "seqlen_kv": n}), "sm_90", load()) for n in (191, 192, 193)
    ]
    assert classes[0] == classes[2] != classes[1]


COMBINED = "bf16 b1 hq8 sq300 d64 "


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("any(window=3,0|function)", "any(window=8,0|function)"),
        ("any(causal+window=3,0|function)", "any(causal|function)"),
        ("any(not(documents)|function)", "any(not(documents:scattered)|function)"),
        ("not(function)", "not(function:no_head)"),
        ("prefix=3", "prefix=8"),
    ],
)
def test_masks_that_no_decision_tells_apart_are_one_class(one, other):
    first, second = (parse(COMBINED + mask) for mask in (one, other))
    assert class_of(first, "sm_90", load()) == class_of(second, "sm_90", load())
    assert outcome(first, H100) == outcome(second, H100)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("any(causal|prefix)", "causal prefix"),
        ("any(window=3,0|function)", "any(window=3,0|dense=300x300)"),
        ("any(window=3,0|function)", "not(function)"),
        ("any(keys|keys-left)", "any(window=3,0|documents)"),
        ("any(keys|dense=1x300)", "any(keys|dense=300x300)"),
        ("any(causal|function)", "any(documents:cross|function)"),
        ("documents=100,200", "documents=100,200:cross"),
        ("prefix=3", "prefix=3 causal"),
    ],
)
def test_what_stands_inside_a_combination_is_part_of_the_class(one, other):
    first, second = (class_of(parse(COMBINED + mask), "sm_90", load()) for mask in (one, other))
    assert first != second


def test_batches_that_must_be_split_have_no_class():
    assert class_of(Call.model_validate({**DECODE, "batch": 70000}), "sm_90", load()) is None


def test_the_conditions_on_lengths_are_found():
    found = length_conditions(load(), "sm_90")
    assert any(field == "seqlen_kv_mod_128" for field, _ in found)
    assert all(field != "head_dim_qk" for field, _ in found)
