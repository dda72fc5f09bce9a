"""What is said of a refused kernel, and who gets the refusal itself instead of another backend."""

from __future__ import annotations

import pytest
from support.refusing import SAID, Fakes, call, explained, quietly, tensors
from support.spy import ran

import attnroute
from attnroute.errors import KernelRefusedError, RerouteWarning
from attnroute.executors import registry
from attnroute.report.json import decision_from_json, decision_json

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def fakes(monkeypatch):
    found = Fakes(registry.executor)
    monkeypatch.setattr(registry, "executor", found)
    return found


# What is said.


def test_the_warning_tells_the_whole_story(fakes):
    fakes.refuse("flash")
    (told,) = quietly(is_causal=True)
    host = explained().host
    for part in (
        f"backend flash refused a call before its kernel was launched ({SAID})",
        "chunked runs it and every call like it in this process",
        "please report cpu/flash with this text, for fp32 b2 hq4 hkv4 sq6 skv6 d8 causal on cpu",
        f"torch {host.versions['torch']}",
        'set ATTNROUTE_BACKENDS=-flash or use override(ban="flash")',
    ):
        assert part in told
    held = [f for f in explained(is_causal=True).verdict("flash").findings if f.outcome == "pass"]
    assert held
    assert f"None of the {len(held)} rows for flash" in told


def test_explain_says_what_failed(fakes):
    fakes.refuse("flash")
    quietly()
    decision = explained()
    assert (decision.selected, "flash" in decision.order) == ("chunked", False)
    verdict = decision.verdict("flash")
    assert (verdict.status, verdict.excluded.reason, verdict.excluded.origin) == ("eligible", "failed", SAID)
    assert f"eligible, kept out because it failed in this process: {SAID}" in " ".join(
        decision.text(verbose=True).split()
    )
    assert decision_from_json(decision_json(decision, verbose=True)) == decision
    assert explained(tensors(head_dim=16)).selected == "flash"


def test_the_log_says_what_failed(fakes, environment, capsys):
    environment(EXPLAIN="changes")
    fakes.refuse("flash")
    quietly()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("attnroute: flash for ")
    assert "failed" not in first
    assert second.startswith("attnroute: chunked for ")
    assert second.endswith(f"; flash failed in this process ({SAID})")


# Who chose explicitly gets the refusal.


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("wish", "origin"),
    [
        ({"backend": "flash"}, r"flash is required by override\(\)"),
        ({"strict": True}, r"strict is set by override\(\)"),
    ],
)
def test_override_that_requires_or_is_strict_gets_the_refusal(fakes, again, wish, origin):
    fakes.refuse("flash")
    if again:
        quietly()
    with attnroute.override(**wish), pytest.raises(KernelRefusedError, match=origin) as caught:
        call()
    assert isinstance(caught.value.__cause__, AssertionError)
    assert (caught.value.backend, caught.value.said) == ("flash", SAID)
    assert str(caught.value).startswith(
        f"backend flash refused this call before its kernel was launched: {SAID};"
    )
    assert fakes.asked["flash"] == 1 + again
    assert explained().selected == ("chunked" if again else "flash"), (
        "a call that raises teaches others nothing"
    )


def test_the_call_that_requires_gets_the_refusal_each_time(fakes):
    fakes.refuse("flash")
    for _ in range(2):
        with pytest.raises(KernelRefusedError, match=r"flash is required by attention\(\)"):
            call(backend="flash")
    assert fakes.asked == {"flash": 2}


@pytest.mark.parametrize(
    ("variables", "origin"),
    [
        ({"BACKEND": "flash"}, "flash is required by ATTNROUTE_BACKEND=flash"),
        ({"STRICT": "1"}, "strict is set by ATTNROUTE_STRICT=1"),
    ],
)
def test_the_environment_that_requires_or_is_strict_gets_the_refusal(fakes, environment, variables, origin):
    environment(**variables)
    fakes.refuse("flash")
    with pytest.raises(KernelRefusedError, match=origin) as caught:
        call()
    assert isinstance(caught.value.__cause__, AssertionError)
    assert fakes.asked == {"flash": 1}


def test_who_only_prefers_a_backend_is_rerouted(fakes):
    fakes.refuse("math")
    with pytest.warns(RerouteWarning, match="backend math refused"), ran("flash"):
        call(prefer="math")
