"""Calls of one class are decided alike, so that a new length needs no new decision."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from support.costs import by_size, predicting
from support.strategies import calls, hosts

from attnroute.engine.classes import (
    QUERY_FACTS,
    RISING_FACTS,
    class_of,
    class_of_keys,
    length_conditions,
    span_of,
)
from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError
from attnroute.question import fits
from attnroute.question.call import Call
from attnroute.question.facts import LENGTH_FACTS, Facts
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.nodes import DenseBias, DenseNode, FunctionNode
from attnroute.tables.load import load

STEPS = (128, -128, 1, -1, 2, 37, 64, 640, 1280, 12800)
"""Lengths so far apart are often of one class: rows ask what 128 divides, and whether there are any."""
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


def outcome(call, host, tables=None):
    decision = decide(call, host, tables)
    verdicts = tuple((v.backend, v.status, v.repairs) for v in decision.verdicts)
    return decision.selected, decision.order, verdicts


def at_lengths(call, seqlen_q, seqlen_kv):
    """Return a call with other lengths, its tensors of as many rows and columns."""
    sizes = {call.seqlen_kv: seqlen_kv, call.seqlen_q: seqlen_q}

    def resized(node):
        if isinstance(node, DenseNode | DenseBias):
            return node.model_copy(update={"shape": tuple(sizes.get(size, size) for size in node.shape)})
        if isinstance(node, FunctionNode) and node.block_mask_shape is not None:
            return node.model_copy(update={"block_mask_shape": (seqlen_q, seqlen_kv)})
        return node

    mask = tuple(resized(node) for node in call.mask)
    return call.with_(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, bias=resized(call.bias))


@st.composite
def pairs_of_a_class(draw, find_tables):
    """Draw a host and two calls of one class that differ in their lengths."""
    call, host, tables = draw(calls()), draw(hosts()), find_tables()
    where = class_of(call, host.arch, tables)
    assume(where is not None)
    for step in draw(st.permutations(STEPS)):
        for queries, keys in ((step, step), (0, step), (step, 0)):
            if call.seqlen_q + queries < 0 or call.seqlen_kv + keys < 0:
                continue
            other = at_lengths(call, call.seqlen_q + queries, call.seqlen_kv + keys)
            if class_of(other, host.arch, tables) == where and is_callable(other):
                return host, call, other
    return reject()


def is_callable(call):
    try:
        fits.check(call)
    except ArgumentError:
        return False
    return True


@settings(max_examples=60)
@given(pairs_of_a_class(load))
def test_equal_classes_have_equal_outcomes(pair):
    host, call, other = pair
    assert outcome(call, host) == outcome(other, host)


@settings(max_examples=60)
@given(st.data())
def test_equal_classes_are_ordered_alike_by_predicted_times(data):
    with predicting(by_size) as tables:
        host, call, other = data.draw(pairs_of_a_class(lambda: tables))
        assert outcome(call, host, tables) == outcome(other, host, tables)


@pytest.mark.usefixtures("unmeasured")
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


@pytest.mark.usefixtures("unmeasured")
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("sizes", ["b4 hq32 hkv8 sq1", "b2 hq8 sq70 train", "b9000 hq8 sq4"])
@pytest.mark.parametrize("mask", ["", "keys", "keys-left", "keys:finite"])
def test_calls_with_equal_classes_of_their_number_of_keys_are_of_one_class(arch, sizes, mask):
    call, seen, shared = parse(f"bf16 {sizes} skv100 d128 {mask}"), {}, 0
    for n in (*range(1, 700), *range(1000, 9000, 37), *range(2**16 - 3, 2**16 + 3), 2**21, 2**21 + 1, 2**24):
        other = call.changed(seqlen_kv=n)
        number = class_of_keys(other, arch, load())
        if number is not None:
            where = class_of(other, arch, load())
            shared += number in seen
            assert seen.setdefault(number, where) == where
    assert shared > 600


@given(calls(), st.integers(0, 2**20))
def test_facts_about_queries_read_no_number_of_keys(call, number):
    other = call.changed(seqlen_kv=number)
    assert {n: Facts(call)[n] for n in QUERY_FACTS} == {n: Facts(other)[n] for n in QUERY_FACTS}
    assert QUERY_FACTS <= LENGTH_FACTS


@given(calls(), st.integers(1, 2**20), st.integers(0, 2**10))
def test_facts_rise_with_the_number_of_keys(call, number, more):
    assume(not call.context.dynamic)
    few, many = (Facts(call.changed(seqlen_kv=n)) for n in (number, number + more))
    assert all(few[name] <= many[name] for name in RISING_FACTS)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("sizes", ["b4 hq32 hkv8 sq1", "b2 hq8 sq70 train", "b9000 hq8 sq4"])
@pytest.mark.parametrize("mask", ["", "keys", "keys:finite"])
def test_numbers_of_one_span_with_equal_answers_are_of_one_class(arch, sizes, mask):
    call, longest = parse(f"bf16 {sizes} skv100 d128 {mask}"), 0
    for first in (100, 130, 511, 1000, 1025, 8000, 100_000, 2**21):
        span, seen = span_of(call.changed(seqlen_kv=first), arch, load()), {}
        assert span.numbers[0] == first
        longest = max(longest, len(span.numbers))
        last = span.numbers[-1]
        for n in (*range(first, min(first + 300, last)), *range(max(first, last - 300), last + 1)):
            number = class_of_keys(call.changed(seqlen_kv=n), arch, load())
            assert seen.setdefault(span.answers(n), number) == number
    assert longest >= 100


@pytest.mark.parametrize("line", ["sq1 keys=80,90", "sq1 causal=bottom_right", "sq90"])
def test_a_call_in_whose_mask_keys_take_part_or_that_has_few_has_no_span(line):
    assert span_of(parse(f"bf16 b2 hq8 skv90 d64 {line}"), "sm_90", load()) is None


@pytest.mark.parametrize("rest", ["causal", "keys=3", "dense=1x300", "alibi", "documents"])
def test_a_number_of_keys_that_takes_part_in_more_has_no_class(rest):
    assert class_of_keys(parse(f"{COMBINED} {rest}"), "sm_90", load()) is None


def test_batches_that_must_be_split_have_no_class():
    assert class_of(Call.model_validate({**DECODE, "batch": 70000}), "sm_90", load()) is None


def test_the_conditions_on_lengths_are_found():
    found = length_conditions(load(), "sm_90")
    assert any(field == "seqlen_kv_mod_128" for field, _ in found)
    assert all(field != "head_dim_qk" for field, _ in found)
