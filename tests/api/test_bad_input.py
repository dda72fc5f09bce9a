"""Arguments that mean nothing: one sentence that names the argument, and no kernel ran before it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from support.bad_arguments import CASES, KEY, QUERY
from support.bad_forms import CASES as FORMS
from support.spy import Spy

import attnroute
from attnroute.errors import ArgumentError, NoBackendError, OverrideError


@pytest.mark.parametrize("function", [attnroute.attention, attnroute.explain])
@pytest.mark.parametrize(
    ("tensors", "arguments", "said"), [*CASES.values(), *FORMS.values()], ids=[*CASES, *FORMS]
)
def test_one_sentence_names_the_argument_and_nothing_runs(function, tensors, arguments, said):
    with Spy() as spy, pytest.raises(ArgumentError) as raised:
        function(*tensors, **arguments)
    text = str(raised.value)
    assert re.match(said, text), text
    assert re.fullmatch(r"\w+.* requires .+; got .+; .+\.", text), text
    assert "\n" not in text
    assert spy.backends == set()
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("function", [attnroute.attention, attnroute.explain])
@pytest.mark.parametrize("name", ["backend", "prefer"])
def test_an_unknown_backend_is_refused_with_the_nearest(function, name):
    said = rf'attention\(\) {name} requires one of chunked, .*math, te; got "flahs"; did you mean "flash"\?'
    with Spy() as spy, pytest.raises(OverrideError, match=said):
        function(QUERY, KEY, KEY, **{name: "flahs"})
    assert spy.backends == set()


@pytest.mark.parametrize("function", [attnroute.attention, attnroute.explain])
def test_an_unknown_argument_is_a_type_error(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention_mask'"):
        function(QUERY, KEY, KEY, attention_mask=None)


def test_the_same_mistake_is_found_at_every_call():
    attnroute.attention(QUERY, KEY, KEY)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="dropout_p requires"):
            attnroute.attention(QUERY, KEY, KEY, dropout_p=1.0)
        attnroute.attention(QUERY, KEY, KEY)


def test_a_required_backend_that_cannot_run_raises_with_every_reason_and_what_could():
    query = torch.zeros(2, 4, 6, 8).requires_grad_()
    value = torch.zeros(2, 4, 6, 16)
    with Spy() as spy, pytest.raises(NoBackendError) as raised:
        attnroute.attention(query, query, value, dropout_p=0.1, softcap=30.0, backend="flash")
    assert spy.backends == set()
    verdict = raised.value.decision.verdict("flash")
    blocking = {finding.rule for finding in verdict.blocking}
    assert blocking == {"any/flash/feature-softcap", "cpu/flash/feature-dropout", "any/flash/head-dims-equal"}
    text = str(raised.value)
    for finding in verdict.blocking:
        assert finding.rule in text
        assert f"requires {finding.requires}; got {finding.got}" in " ".join(text.split())
    assert "attention()" in text
    assert "chunked could run it" in text


def test_explain_says_the_same_without_raising():
    value = torch.zeros(2, 2, 6, 16)
    decision = attnroute.explain(QUERY, KEY, value, backend="flash")
    assert decision.selected is None
    assert "any/flash/head-dims-equal" in decision.text(verbose=True)


def test_a_call_that_no_backend_takes_raises_with_the_reasons_of_all():
    query = torch.zeros(1, 2, 8, 16).to(torch.float8_e4m3fn)
    with Spy() as spy, pytest.raises(NoBackendError) as raised:
        attnroute.attention(query, query, query)
    assert spy.backends == set()
    text = str(raised.value)
    for verdict in raised.value.decision.verdicts:
        assert verdict.backend in text
        assert verdict.blocking[0].rule in text


def test_explain_takes_every_argument_of_attention():
    parameters = inspect.signature(attnroute.attention).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert len(defaults) > 15
    assert attnroute.explain(QUERY, KEY, KEY, **defaults) == attnroute.explain(QUERY, KEY, KEY)
