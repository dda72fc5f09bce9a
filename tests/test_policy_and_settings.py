"""Wishes: who outranks whom, what the environment may say, and that nothing leaks out of its block."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.policy_inputs import KNOWN, selected, stated

import attnroute
from attnroute.errors import NoBackendError, OverrideError
from attnroute.question.policy import Policy, merge
from attnroute.settings import current, known_backends, override, policy_of

NAMES = st.sampled_from(KNOWN)
SOME = st.lists(NAMES, max_size=3, unique=True).map(tuple)


def test_the_backends_named_here_are_those_of_the_tables():
    assert known_backends() == KNOWN


# Merging.


@given(SOME, SOME, SOME)
def test_bans_add_up_over_every_layer(environ, scope, call):
    merged = merge(merge(stated(ban=environ), stated(ban=scope)), stated(ban=call))
    assert set(merged.ban) == {*environ, *scope, *call}
    assert len(merged.ban) == len(set(merged.ban))


@given(st.booleans(), st.booleans(), st.none() | st.booleans())
def test_what_is_stated_above_wins_and_what_is_not_stated_stays(below, middle, above):
    merged = merge(stated(strict=below), stated(strict=middle))
    merged = merge(merged, Policy() if above is None else stated(strict=above))
    assert merged.strict is (middle if above is None else above)


def test_a_nearer_requirement_is_not_bound_by_an_order_from_further_away():
    merged = merge(stated(allow=("flash", "math"), prefer=("flash",)), stated(require="chunked"))
    assert (merged.require, merged.allow, merged.prefer) == ("chunked", None, ())


def test_a_nearer_list_of_what_may_run_ends_a_requirement_outside_of_it():
    merged = merge(stated(require="math"), stated(allow=("flash", "chunked")))
    assert (merged.require, merged.allow) == (None, ("flash", "chunked"))
    kept = merge(stated(require="math"), stated(allow=("flash", "math")))
    assert kept.require == "math"


def test_every_setting_remembers_who_made_it_and_a_ban_everybody():
    below = Policy(
        ban=("math",), strict=True, origin={"ban": "ATTNROUTE_BACKENDS=-math", "strict": "ATTNROUTE_STRICT=1"}
    )
    merged = merge(below, Policy(ban=("flash",), origin={"ban": "override()"}))
    assert merged.origin_of("ban") == "ATTNROUTE_BACKENDS=-math and override()"
    assert merged.origin_of("strict") == "ATTNROUTE_STRICT=1"
    assert merged.origin_of("require") == "the default"


@given(st.data())
def test_a_key_is_equal_exactly_where_the_settings_are(data):
    def draw():
        return {
            "require": data.draw(st.none() | NAMES),
            "prefer": data.draw(SOME),
            "allow": data.draw(st.none() | SOME),
            "ban": data.draw(SOME),
            "strict": data.draw(st.booleans()),
            "allow_unknown": data.draw(st.booleans()),
            "recognize": data.draw(st.booleans()),
            "quadratic_limit_bytes": data.draw(st.sampled_from([0, 2**30])),
            "expected_calls": data.draw(st.sampled_from([1, 10**6])),
            "calls_per_step": data.draw(st.sampled_from([1, 32])),
            "transform": data.draw(st.sampled_from([None, "double_backward"])),
        }

    one, other = draw(), draw()
    assert (Policy(**one).key == Policy(**other).key) is (one == other)
    assert Policy(**one, origin={"ban": "somebody"}).key == Policy(**one).key


def test_a_merged_policy_has_a_key_of_its_own():
    below = stated(prefer=("flash",))
    assert below.key == below.key
    assert merge(below, stated(require="math")).key != below.key
    assert hash(merge(below, Policy())) == hash(below)


# Precedence, where the backend that runs shows who was heard.


def test_the_call_outranks_the_override_which_outranks_the_environment(environment):
    assert selected() == "flash"
    environment(BACKEND="math")
    assert selected() == "math"
    with override(backend="chunked"):
        assert selected() == "chunked"
        assert selected(backend="flash") == "flash"
        assert selected() == "chunked"
    assert selected() == "math"
    assert selected(backend="flash") == "flash"


def test_a_preference_yields_to_a_requirement_and_orders_what_is_left(environment):
    environment(BACKENDS="math,flash")
    assert selected() == "math"
    assert selected(prefer="flash") == "flash"
    assert selected(prefer=["chunked", "flash"]) == "flash"
    assert selected(backend="chunked") == "chunked"
    with override(backend="math"):
        assert selected(prefer="flash") == "math"


def test_a_list_of_what_may_run_is_an_order_too(environment):
    environment(BACKENDS="efficient, chunked ,math")
    query = torch.zeros(1, 2, 8, 8)
    decision = attnroute.explain(query, query, query)
    assert decision.order == ("chunked", "math")
    assert decision.verdict("flash").excluded.reason == "not_allowed"
    assert decision.verdict("flash").excluded.origin == "ATTNROUTE_BACKENDS=efficient, chunked ,math"


@pytest.mark.parametrize("wish", ["call", "override", "environment"])
def test_a_ban_holds_against_all_and_says_so(environment, wish):
    environment(BACKENDS="-math", **({"BACKEND": "math"} if wish == "environment" else {}))
    query = torch.zeros(1, 2, 8, 8)
    arguments = {"backend": "math"} if wish == "call" else {}
    with override(backend="math" if wish == "override" else None), pytest.raises(NoBackendError) as raised:
        attnroute.attention(query, query, query, **arguments)
    verdict = raised.value.decision.verdict("math")
    assert (verdict.status, verdict.excluded.reason) == ("eligible", "banned")
    assert verdict.excluded.origin == "ATTNROUTE_BACKENDS=-math"
    assert "ATTNROUTE_BACKENDS=-math" in str(raised.value)


def test_bans_of_every_layer_hold_together(environment):
    environment(BACKENDS="-flash")
    with override(ban=["chunked", "flex"]):
        assert selected() == "math"
        with override(ban=["math"]), pytest.raises(NoBackendError):
            attnroute.attention(*torch.zeros(3, 1, 2, 8, 8).unbind())


def test_strict_leaves_the_slow_tier_out_whoever_asks(environment):
    environment(STRICT="1")
    assert selected(backend="math") is None
    with override(strict=False):
        assert selected(backend="math") == "math"


def _fail_inside_of_an_override():
    with override(prefer=("chunked", "math"), ban="flash"):
        assert selected() == "chunked"
        assert current().ban == ("flash",)
        raise ZeroDivisionError


def test_overrides_nest_and_end_with_an_error_too():
    with override(prefer="math"):
        assert selected() == "math"
        with pytest.raises(ZeroDivisionError):
            _fail_inside_of_an_override()
        assert (selected(), current().ban) == ("math", ())
    assert (selected(), current()) == ("flash", Policy())


def test_override_gives_the_policy_in_force():
    with override(
        prefer="math",
        strict=True,
        allow_unknown=True,
        recognize=False,
        expected_calls=7,
        double_backward=True,
    ) as policy:
        assert policy is current()
        assert policy.prefer == ("math",)
        assert (policy.strict, policy.allow_unknown, policy.recognize) == (True, True, False)
        assert (policy.transform, policy.expected_calls) == ("double_backward", 7)
        assert set(policy.origin.values()) == {"override()"}
        with override(strict=False) as inner:
            assert (inner.strict, inner.allow_unknown, inner.transform) == (False, True, "double_backward")


def test_an_override_ends_at_its_thread():
    seen = {}

    def look(name):
        seen[name] = selected()

    with override(backend="math"):
        thread = threading.Thread(target=look, args=("outside",))
        thread.start()
        thread.join()
    assert seen == {"outside": "flash"}


def test_threads_override_apart():
    barrier, seen = threading.Barrier(3), {}

    def work(backend):
        with override(backend=backend):
            barrier.wait(timeout=60)
            seen[backend] = selected()
            barrier.wait(timeout=60)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("math", "chunked", "flash")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"math": "math", "chunked": "chunked", "flash": "flash"}
    assert current() == Policy()


def test_tasks_override_apart_and_inherit_from_their_parent():
    async def work(backend, turn):
        with override(backend=backend):
            await asyncio.sleep(0)
            turn.append(selected())
            await asyncio.sleep(0)
            turn.append(selected())

    async def main():
        turns = {name: [] for name in ("math", "chunked")}
        with override(ban="flash"):
            inherited = asyncio.create_task(asyncio.to_thread(selected))
            await asyncio.gather(*(work(name, turn) for name, turn in turns.items()))
            return turns, await inherited

    turns, inherited = asyncio.run(main())
    assert turns == {"math": ["math", "math"], "chunked": ["chunked", "chunked"]}
    assert inherited == "chunked"


# Names.


@pytest.mark.parametrize(
    ("name", "argument"),
    [("backend", "backend"), ("prefer", "prefer"), ("allow", "allow"), ("ban", "ban")],
)
def test_an_unknown_backend_is_refused_with_the_nearest(name, argument):
    said = rf'override\(\) {name} requires one of {", ".join(KNOWN)}; got "flahs"; did you mean "flash"\?'
    with pytest.raises(OverrideError, match=said), override(**{argument: "flahs"}):
        pytest.fail("the block was entered")
    assert current() == Policy()


def test_an_unknown_backend_among_known_ones_is_refused():
    with pytest.raises(OverrideError, match='got "fa9"'):
        policy_of("a test", prefer=["flash", "fa9"])


def test_one_name_is_one_name_and_not_its_letters():
    assert policy_of("a test", prefer="flash", allow="math", ban="cudnn").prefer == ("flash",)


# The environment.
