"""The condition grammar: what it accepts, what it answers for varying and unknown values, how it reads."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnroute.question.facts import FACTS, UNKNOWN, Varies
from attnroute.tables.conditions import Term, check, combine_and, combine_or, evaluate, parse, render
from attnroute.tables.load import load

COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "%": lambda value, divisor: value % divisor == 0,
}
# Near the lowest value of a varying number, where an answer turns.
OPERANDS = st.integers(-2, 12) | st.integers(-5, 120)
ORDERED = st.tuples(st.sampled_from(sorted(set(COMPARE) - {"%"})), OPERANDS)
DIVIDED = st.tuples(st.just("%"), st.integers(1, 100))
TERMS = st.one_of(ORDERED, DIVIDED)
NUMBERS = st.integers(-5, 500)


def text_of(terms):
    return ", ".join(f"{op}{operand}" for op, operand in terms)


def holds(terms, value):
    return all(COMPARE[op](value, operand) for op, operand in terms)


def test_terms_are_parsed():
    assert parse(">=8, <=256,%8 , !=-1, < 0.5, ==top_left, <=seqlen_kv") == (
        Term(">=", 8),
        Term("<=", 256),
        Term("%", 8),
        Term("!=", -1),
        Term("<", 0.5),
        Term("==", "top_left"),
        Term("<=", "seqlen_kv"),
    )


@pytest.mark.parametrize(
    "part",
    ["", "8", "=8", "=>8", "=<8", "<>8", ">= 8 9", "top_left", ">=", "%", "%%8", "8<", "> (1)", ">8;<9"],
)
def test_a_malformed_term_names_itself(part):
    with pytest.raises(ValueError, match="requires terms like") as raised:
        parse(f">=1, {part}, <=9")
    assert f'got "{part}"' in str(raised.value)


@pytest.mark.parametrize("part", ["%0", "%-8", "%1.5"])
def test_nothing_is_a_multiple_of_what_is_no_count(part):
    with pytest.raises(ValueError, match=f'whole number above 0 behind "%"; got "{part}"'):
        parse(part)


@given(st.lists(TERMS, min_size=1, max_size=4), NUMBERS)
def test_a_number_is_held_against_every_term(terms, value):
    assert evaluate(text_of(terms), value, {}) == ("true" if holds(terms, value) else "false")


@pytest.mark.parametrize("op", COMPARE)
def test_one_term_about_a_varying_number_is_certain_exactly_where_all_values_agree(op):
    for low in range(5):
        for operand in range(1 if op == "%" else -2, 100):
            answers = {COMPARE[op](value, operand) for value in range(low, low + 300)}
            assert evaluate(f"{op}{operand}", Varies(low), {}) == _agreed(answers), (low, operand)


def _agreed(answers):
    return {frozenset([True]): "true", frozenset([False]): "false"}.get(frozenset(answers), "varies")


@given(st.lists(TERMS, min_size=1, max_size=4), st.integers(0, 10))
def test_several_terms_about_a_varying_number_are_never_certain_of_what_is_not_so(terms, low):
    answers = {holds(terms, value) for value in range(low, low + 300)}
    assert evaluate(text_of(terms), Varies(low), {}) in ("varies", _agreed(answers))


@given(st.sampled_from(sorted(set(COMPARE) - {"%"})), NUMBERS, NUMBERS)
def test_an_operand_may_be_another_field(op, value, other):
    wanted = "true" if COMPARE[op](value, other) else "false"
    assert evaluate(f"{op}seqlen_kv", value, {"seqlen_kv": other}) == wanted


@pytest.mark.parametrize("op", sorted(COMPARE))
def test_another_field_that_varies_or_is_unknown_leaves_the_answer_open(op):
    assert evaluate(f"{op}seqlen_kv", 7, {"seqlen_kv": Varies()}) == "varies"
    assert evaluate(f"{op}seqlen_kv", 7, {"seqlen_kv": UNKNOWN}) == "unknown"
    assert evaluate(f"{op}seqlen_kv", Varies(), {"seqlen_kv": UNKNOWN}) == "unknown"


@pytest.mark.parametrize(("value", "wanted"), [(0, "true"), (64, "false")])
def test_only_zero_is_a_multiple_of_a_length_of_zero(value, wanted):
    assert evaluate("%seqlen_kv", value, {"seqlen_kv": 0}) == wanted


@pytest.mark.parametrize("spec", [True, 8, 0.5, ">=8", "%8", [1, 2], ["none"]])
def test_an_unknown_value_is_unknown_whatever_is_asked(spec):
    assert evaluate(spec, UNKNOWN, {}) == "unknown"


@pytest.mark.parametrize("spec", [True, 64, "==64", [64, 128]])
def test_a_varying_value_is_never_said_to_be_one_of_some(spec):
    assert evaluate(spec, Varies(0), {}) == "varies"


@pytest.mark.parametrize(
    ("spec", "value", "wanted"),
    [
        (True, True, "true"),
        (True, False, "false"),
        (False, False, "true"),
        (64, 64, "true"),
        (64, 65, "false"),
        (["none", "square"], "square", "true"),
        (["none", "square"], "top_left", "false"),
        ([64, 128], 128, "true"),
        ([64, 128], 96, "false"),
        ("==positive", "positive", "true"),
        ("!=positive", "positive", "false"),
        (">0", 0.1, "true"),
        (">0", 0.0, "false"),
    ],
)
def test_bools_numbers_lists_and_words(spec, value, wanted):
    assert evaluate(spec, value, {}) == wanted


def test_words_have_no_order():
    with pytest.raises(TypeError, match='operator ">" requires numbers'):
        evaluate(">8", "top_left", {})


ANSWERS = st.lists(st.sampled_from(["true", "false", "varies", "unknown"]), max_size=4)


@given(ANSWERS)
def test_and_is_false_with_one_false_and_true_with_only_true(parts):
    wanted = "false" if "false" in parts else "true" if set(parts) <= {"true"} else None
    assert combine_and(parts) == wanted or (wanted is None and combine_and(parts) in set(parts) - {"true"})


@given(ANSWERS)
def test_or_is_true_with_one_true_and_false_with_only_false(parts):
    wanted = "true" if "true" in parts else "false" if set(parts) <= {"false"} else None
    assert combine_or(parts) == wanted or (wanted is None and combine_or(parts) in set(parts) - {"false"})


def test_unknown_outranks_varying():
    assert (
        combine_and(["varies", "unknown", "true"]) == combine_or(["varies", "unknown", "false"]) == "unknown"
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (">=8, <=256, %8", "head_dim_qk >=8, <=256, %8"),
        (True, "head_dim_qk = true"),
        (False, "head_dim_qk = false"),
        (192, "head_dim_qk = 192"),
        ([64, 128], "head_dim_qk one of 64, 128"),
        (["none", "square"], "head_dim_qk one of none, square"),
    ],
)
def test_conditions_read_as_the_table_has_them(spec, said):
    assert render("head_dim_qk", spec) == said


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("dtype", ["float16", "bfloat16"]),
        ("dtype", "!=float64"),
        ("empty_rows", ["none"]),
        ("alignment", "==mixed"),
        ("transform", ["none", "vmap"]),
        ("head_dim_qk", ">=8, <=head_dim_v, %8"),
        ("seqlen_q", [1, 2]),
        ("causal", True),
        ("dropout_p", ">0.5"),
    ],
)
def test_conditions_that_can_be_met_are_accepted(field, spec):
    check(field, spec)


@pytest.mark.parametrize(
    ("field", "spec", "said"),
    [
        ("seqlen_qq", 8, 'got "seqlen_qq"; did you mean "seqlen_q"?'),
        ("head_dim_qk", ">=heads_dim_v", 'got "heads_dim_v"; did you mean "head_dim_v"?'),
        ("head_dim_qk", "==top_left", 'got "top_left"'),
        ("head_dim_qk", "<=dtype", 'got "dtype"'),
        ("head_dim_qk", ["8", "16"], 'got "8"'),
        ("head_dim_qk", "8", 'terms like ">=8", "%8" or "==top_left"; got "8"'),
        ("dtype", ["float16", "flaot32"], "words among float16, bfloat16"),
        ("dtype", "float16", "terms like"),
        ("dtype", True, "words among"),
        ("alignment", ">=top_left", "words among none, square, top_left"),
        ("empty_rows", "==no", "words among none, some, unknown"),
    ],
)
def test_a_condition_that_can_never_be_met_names_what_is_wrong(field, spec, said):
    with pytest.raises(ValueError, match="requires") as raised:
        check(field, spec)
    assert said in str(raised.value)


def test_a_fact_has_words_where_it_is_a_word():
    assert all(bool(fact.words) == (fact.kind == "word") for fact in FACTS.values())


def test_every_condition_of_the_shipped_tables_can_be_met():
    boxes = [
        box
        for row in load().all_rows()
        for part in (row.rule.when, row.rule.requires)
        for box in _boxes(part)
    ]
    assert len(boxes) > 100
    for box in boxes:
        for field, spec in box.items():
            check(field, spec)


def _boxes(part):
    if isinstance(part, str):
        return []
    return [part] if isinstance(part, dict) else part.any_of
