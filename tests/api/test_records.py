"""One record of a call: each argument of the public signature has one name and one place on every way."""

from __future__ import annotations

import inspect

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.api import dispatch, keys, routes
from attnroute.api.intake import take
from attnroute.api.records import Given, Options
from attnroute.errors import QuadraticAttentionWarning
from attnroute.memory import reset
from attnroute.settings import current

OF_TORCH = ("attn_mask", "enable_gqa")
"""Names of scaled_dot_product_attention, which are checked, or taken as `mask`, before a record is made."""
SIGNATURE = {
    name: argument
    for name, argument in inspect.signature(attnroute.attention).parameters.items()
    if name not in OF_TORCH
}
TENSORS = ("query", "key", "value", "mask", "bias", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv")
# No two arguments have the same value, so that a swapped pair is seen.
VALUES = {
    name: torch.zeros(number) if name in TENSORS else f"the {name}"
    for number, name in enumerate(SIGNATURE, start=1)
}


def shown(given):
    """Return the arguments by name, tensors as their shapes: a tracer has tensors of its own."""
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for name, value in given._asdict().items()
    }


def test_defaults_are_those_of_the_function_in_their_types_too():
    """A route is found under the types of numbers, and `explain()` has the defaults of the record."""
    for name, default in Given._field_defaults.items():
        assert (SIGNATURE[name].default, type(SIGNATURE[name].default)) == (default, type(default)), name


@pytest.fixture
def taken(monkeypatch):
    """Collect the records that calls are run with, and run none of them."""
    found = []
    monkeypatch.setattr(dispatch, "run", lambda given: found.append(given) or (given.query, None))
    return found


def positional(values):
    return [values[name] for name in ("query", "key", "value", "mask")]


def named(values):
    return {
        name: value
        for name, value in values.items()
        if SIGNATURE[name].kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_the_record_has_the_arguments_of_the_signature_in_their_order():
    assert list(Given._fields) == list(SIGNATURE)
    defaults = {
        name: argument.default
        for name, argument in SIGNATURE.items()
        if argument.default is not inspect.Parameter.empty
    }
    # In their types too, under which a route is found: explain() has the defaults of the record.
    assert repr(Given._field_defaults) == repr(defaults)


def test_type_checkers_know_every_keyword_of_the_signature():
    own = [name for name in named(VALUES) if name != "return_lse"]
    assert list(Options.__annotations__) == [*own, *OF_TORCH]


@pytest.mark.usefixtures("fresh_compiler")
def test_each_argument_arrives_under_its_name_eager_and_compiled(taken):
    attnroute.attention(*positional(VALUES), **named(VALUES))
    torch.compile(lambda: attnroute.attention(*positional(VALUES), **named(VALUES)), backend="eager")()
    assert len(taken) >= 2
    for given in taken:
        assert shown(given) == shown(Given(**VALUES))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_explain_takes_what_attention_takes(monkeypatch):
    found = []
    monkeypatch.setattr("attnroute.api.dispatch.question", lambda given: (found.append(given), None))
    monkeypatch.setattr(routes, "decision_of", lambda *_, **__: None)
    attnroute.explain(*positional(VALUES), **named(VALUES))
    assert shown(found[0]) == shown(Given(**VALUES))
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'windw'"):
        attnroute.explain(*positional(VALUES), windw=(3, 0))


def test_an_argument_that_nobody_thought_of_is_part_of_the_key():
    """What has no field of its own in the key is in it as it is."""
    query = torch.zeros(1, 2, 8, 4)
    plain = {"causal_alignment": "bottom_right", "window": (3, 0), "softcap": 2.0, "dropout_p": 0.5}
    plain |= {"is_causal": True, "layout": "bshd", "return_lse": True}
    assert {name for name in Given._fields if name not in keys._SPECIAL} == set(plain)
    base = Given(query, query, query, window=(2, 0))
    key = keys.key_of(take(base), current())
    for name, value in plain.items():
        assert keys.key_of(take(base._replace(**{name: value})), current()) != key, name


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_problem_is_in_bhsd_and_its_result_in_the_layout_of_the_user(layout):
    sizes = {"bhsd": (1, 2, 8, 4), "bshd": (1, 8, 2, 4), "thd": (8, 2, 4)}[layout]
    query = torch.zeros(sizes)
    sums = torch.tensor([0, 3, 8]) if layout == "thd" else None
    given = Given(query, query, query, layout=layout, is_causal=True, cu_seqlens_q=sums, return_lse=True)
    problem = take(given)
    assert problem.given is given
    assert {t.shape for t in (problem.query, problem.key, problem.value)} == {(1, 2, 8, 4)}
    assert len(problem.whole_mask.nodes) == 1
    out, lse = problem.in_given_layout(problem.query, torch.zeros(1, 2, 8))
    assert out.shape == sizes
    assert lse.shape == ((2, 8) if layout == "thd" else (1, 2, 8))


def test_a_problem_has_one_mask_and_one_bias():
    query, bias = torch.zeros(1, 2, 8, 8), torch.ones(8, 8)
    problem = take(Given(query, query, query, bias, bias=bias, is_causal=True))
    assert problem.mask is None
    assert torch.equal(problem.bias, bias + bias)
    padding = masks.KeyPadding(lengths=torch.tensor([5]))
    problem = take(Given(query, query, query, padding, is_causal=True, window=(3, 0)))
    assert problem.whole_mask.nodes == (padding, masks.Causal(), masks.Window(3, 0))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_warning_names_the_line_of_the_user(compiled):
    reset()
    large = torch.zeros(1, 2, 6000, 1)

    def call(tensor):
        return attnroute.attention(tensor, tensor, tensor, backend="math").shape

    run = torch.compile(call, backend="eager") if compiled else call
    with pytest.warns(QuadraticAttentionWarning) as caught:
        run(large)
    assert {warning.filename for warning in caught} == {__file__}
