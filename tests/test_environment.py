"""Every `ATTNROUTE_*` variable: what it may say, what is refused, when it is read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.policy_inputs import CALL, CPU, KNOWN, selected

import attnroute
from attnroute import settings
from attnroute.errors import OverrideError, OverrideWarning
from attnroute.question.policy import Policy
from attnroute.settings import VARIABLES, current, from_environment

FLAGS = {"STRICT": "strict", "ALLOW_UNKNOWN": "allow_unknown", "RECOGNIZE": "recognize"}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        (" on ", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("", False),
    ],
)
def test_flags(name, text, value):
    policy = from_environment({f"ATTNROUTE_{name}": text})
    assert getattr(policy, FLAGS[name]) is value
    assert policy.origin_of(FLAGS[name]) == f"ATTNROUTE_{name}={text}"


@pytest.mark.parametrize(
    ("variable", "text", "fields"),
    [
        ("BACKEND", "flash", {"require": "flash"}),
        ("BACKEND", " ", {}),
        ("BACKENDS", "flash,chunked", {"allow": ("flash", "chunked")}),
        ("BACKENDS", "-math,-efficient", {"ban": ("math", "efficient")}),
        ("BACKENDS", " flash , -math,", {"allow": ("flash",), "ban": ("math",)}),
        ("BACKENDS", "", {}),
        ("EXPECTED_CALLS", " 1000 ", {"expected_calls": 1000}),
        ("EXPECTED_CALLS", "", {}),
        ("TABLES", "", {}),
        ("TUNING", "off", {"tuning": False}),
        ("TUNING", __file__, {"tuning": Path(__file__).absolute()}),
        ("TUNING", "", {}),
        ("EXPLAIN", "changes", {}),
        ("EXPLAIN", "", {}),
    ],
)
def test_values_of_the_environment(variable, text, fields):
    policy = from_environment({f"ATTNROUTE_{variable}": text})
    assert {name: getattr(policy, name) for name in policy.model_fields_set - {"origin"}} == fields


def test_tables_of_ones_own(tmp_path):
    assert from_environment({"ATTNROUTE_TABLES": str(tmp_path)}).tables == tmp_path


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (
            "BACKEND",
            "flahs",
            f'ATTNROUTE_BACKEND requires one of {", ".join(KNOWN)}; got "flahs"; did you mean "flash"?',
        ),
        (
            "BACKENDS",
            "flash,mth",
            f'ATTNROUTE_BACKENDS requires one of {", ".join(KNOWN)}; got "mth"; did you mean "math"?',
        ),
        ("BACKENDS", "-fa5", 'got "fa5"'),
        (
            "STRICT",
            "maybe",
            'ATTNROUTE_STRICT requires 1 or 0 (also true, yes, on, false, no, off); got "maybe".',
        ),
        ("ALLOW_UNKNOWN", "2", "ATTNROUTE_ALLOW_UNKNOWN requires 1 or 0"),
        (
            "EXPECTED_CALLS",
            "0",
            "requires a whole number of calls from 1 to 1000000000000000; got 0; pass one",
        ),
        ("EXPECTED_CALLS", "1e6", "got '1e6'; pass one of these."),
        ("EXPECTED_CALLS", "9" * 5000, "ATTNROUTE_EXPECTED_CALLS requires a whole number of calls"),
        ("RECOGNIZE", "never", "ATTNROUTE_RECOGNIZE requires 1 or 0"),
        ("CONSENSUS", "maybe", "ATTNROUTE_CONSENSUS requires 1 or 0"),
        (
            "TABLES",
            "/no/such/folder",
            "ATTNROUTE_TABLES requires a folder with the layout of capability_tables; got",
        ),
        (
            "TUNING",
            "fast",
            'requires off, or a file that `attnroute tune --out` wrote; got "fast"',
        ),
        ("TUNING", "on", 'got "on"; unset it to read your own.'),
        (
            "EXPLAIN",
            "al",
            'ATTNROUTE_EXPLAIN requires one of off, once, changes, all; got "al"; did you mean "all"?',
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_lists_the_right_ones(variable, text, said):
    with pytest.raises(OverrideError) as raised:
        from_environment({f"ATTNROUTE_{variable}": text})
    assert said in str(raised.value)


def test_every_variable_that_is_described_is_read_and_the_reverse():
    assert set(settings._READERS) == set(VARIABLES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ATTNROUTE_BACKND", 'has no effect; did you mean "ATTNROUTE_BACKEND"?'),
        ("ATTNROUTE_STRIKT", 'did you mean "ATTNROUTE_STRICT"?'),
        ("ATTNROUTE_", "has no effect"),
    ],
)
def test_an_unknown_variable_warns_with_the_nearest(name, said):
    with pytest.warns(OverrideWarning) as caught:
        policy = from_environment({name: "1", "ATTNROUTE_STRICT": "1", "OTHER": "1"})
    assert [str(w.message) for w in caught if said in str(w.message)]
    assert policy.strict


def test_a_name_that_is_near_to_none_is_told_all_of_them():
    with pytest.warns(
        OverrideWarning, match="has no effect; the known ones are ATTNROUTE_BACKEND, .*CONSENSUS.$"
    ):
        from_environment({"ATTNROUTE_0123456789012345678901234567890": "1"})


def test_other_variables_are_nobodys_business():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            from_environment({"PATH": "/bin", "attnroute_strict": "1", "XATTNROUTE_STRICT": "1"}) == Policy()
        )


def test_the_environment_is_read_once_until_it_is_reloaded(environment, monkeypatch):
    environment()
    assert current().strict is False
    monkeypatch.setenv("ATTNROUTE_STRICT", "1")
    assert current().strict is False
    settings.reload()
    assert current().strict is True


def test_a_wrong_environment_stops_the_call_and_not_the_import(environment):
    environment(STRICT="maybe")
    with pytest.raises(OverrideError, match="ATTNROUTE_STRICT"):
        attnroute.attention(*torch.zeros(3, 1, 2, 8, 8).unbind())
    environment(STRICT="0")
    assert selected() == "flash"


@pytest.mark.parametrize(("text", "mode"), [("once", "once"), ("ALL", "all"), ("", "off"), (None, "off")])
def test_how_much_is_explained(environment, text, mode):
    environment(**({} if text is None else {"EXPLAIN": text}))
    assert settings.explain_mode() == mode


def test_decide_reads_the_policy_that_it_is_given_and_no_environment(environment):
    environment(BACKEND="math")
    assert attnroute.decide(CALL, CPU).selected == "flash"
    assert attnroute.decide(CALL, CPU, policy=Policy(require="chunked")).selected == "chunked"
