"""Overrides where they count: the operator that ran is the one that was asked for, or nothing ran."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.spy import Spy, ran

import attnroute
from attnroute import settings
from attnroute.errors import NoBackendError, OverrideError, OverrideWarning, QuadraticAttentionWarning

# Those that run under the mode that sees what ran. flex does not: nothing compiles there.
CPU_BACKENDS = ("flash", "chunked", "math")
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from(CPU_BACKENDS),
        "prefer": st.lists(st.sampled_from(CPU_BACKENDS), max_size=2, unique=True),
        "ban": st.lists(st.sampled_from(CPU_BACKENDS), max_size=2, unique=True),
        "allow": st.lists(st.sampled_from(CPU_BACKENDS), min_size=1, max_size=2, unique=True),
        "strict": st.booleans(),
    },
).filter(lambda wishes: "backend" not in wishes or not wishes.get("prefer"))
WISHES = WISHES.filter(lambda wishes: wishes.get("backend") in (None, *wishes.get("allow", CPU_BACKENDS)))


def normal(seqlen=6, head_dim=8):
    return [torch.randn(1, 2, seqlen, head_dim) for _ in range(3)]


def what_ran(**arguments):
    """Return the one backend that ran, None when the call was refused before anything ran."""
    with Spy() as spy:
        try:
            attnroute.attention(*normal(), **arguments)
        except NoBackendError:
            assert spy.backends == set()
            return None
    (backend,) = spy.backends
    return backend


@pytest.fixture
def environment(monkeypatch):
    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNROUTE_{name}", value)
        settings.reload()

    yield put
    monkeypatch.undo()
    settings.reload()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_backend_that_is_named_runs_and_is_right(backend):
    inputs = normal()
    with ran(backend):
        out = attnroute.attention(*inputs, is_causal=True, backend=backend)
    want, _ = attend(*inputs, allowed=torch.ones(6, 6, dtype=torch.bool).tril())
    assert error(out, want) <= TOLERANCE[torch.float32]


@given(WISHES, WISHES)
@examples(max_examples=300)
def test_nested_wishes_run_what_a_hand_made_reading_of_them_says(outer, inner):
    with attnroute.override(**outer), attnroute.override(**inner):
        got = what_ran()
    assert got == _reading(outer, inner)


def _reading(outer, inner):
    """Read the two blocks as the documentation says them: the nearer wish wins, bans add up."""
    banned = {*outer.get("ban", ()), *inner.get("ban", ())}
    strict = inner.get("strict", outer.get("strict", False))
    allow, required = outer.get("allow"), outer.get("backend")
    allow = None if required is not None else allow
    prefer = inner.get("prefer", outer.get("prefer", ()))
    if "backend" in inner:
        required, allow = inner["backend"], None
    elif "allow" in inner:
        allow = inner["allow"]
        required = required if required in allow else None
    open_to = CPU_BACKENDS if allow is None else allow
    able = [b for b in open_to if b not in banned and not (strict and b == "math")]
    if required is not None:
        return (
            required
            if required in CPU_BACKENDS and required not in banned and not (strict and required == "math")
            else None
        )
    wished = [b for b in (*prefer, *(allow or ())) if b in able]
    return next(iter([*wished, *able]), None)


def test_code_that_cannot_be_edited_is_steered():
    def foreign():
        return what_ran()

    assert foreign() == "flash"
    with attnroute.override(backend="chunked"):
        assert foreign() == "chunked"
    assert foreign() == "flash"


def test_a_decorated_function_is_steered_at_every_call():
    @attnroute.override(backend="math")
    def block():
        return what_ran()

    assert [block(), block()] == ["math", "math"]
    assert what_ran() == "flash"


def test_the_environment_steers_and_is_outranked(environment):
    environment(BACKENDS="math,chunked")
    assert what_ran() == "math"
    assert what_ran(prefer="chunked") == "chunked"
    assert what_ran(backend="flash") == "flash"
    with attnroute.override(backend="flash"):
        assert what_ran() == "flash"
        assert what_ran(backend="chunked") == "chunked"


def test_a_ban_of_the_environment_holds_against_call_and_override(environment):
    environment(BACKENDS="-flash,-chunked")
    assert what_ran() == "math"
    assert what_ran(backend="flash") is None
    assert what_ran(prefer="flash") == "math"
    with attnroute.override(backend="chunked"):
        assert what_ran() is None


def test_a_strict_call_never_runs_the_slow_tier(environment):
    environment(STRICT="1", BACKENDS="-flash,-chunked")
    assert what_ran() is None
    assert what_ran(backend="math") is None


def test_a_backend_that_cannot_run_is_never_swapped_for_another():
    inputs = normal()
    for wish in ({"backend": "flash"}, {"backend": "efficient"}, {"backend": "cudnn"}):
        with Spy() as spy, pytest.raises(NoBackendError):
            attnroute.attention(*inputs, dropout_p=0.5, **wish)
        assert spy.backends == set()


def test_a_preference_that_cannot_run_gives_way():
    assert what_ran(prefer="efficient", dropout_p=0.5) == "chunked"
    assert what_ran(prefer=("efficient", "math"), dropout_p=0.5) == "math"


def test_a_wrong_name_runs_nothing():
    with Spy() as spy:
        for arguments in ({"backend": "flahs"}, {"prefer": ("flash", "mth")}):
            with pytest.raises(OverrideError, match="did you mean"):
                attnroute.attention(*normal(), **arguments)
    assert spy.backends == set()


def test_double_backward_runs_what_can_be_differentiated_twice():
    inputs = [t.requires_grad_() for t in normal()]
    with attnroute.override(double_backward=True), ran("math"):
        out = attnroute.attention(*inputs)
    (first,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), inputs[:1])
    assert second.abs().max() > 0


def test_unannounced_quadratic_scores_are_announced_by_a_warning():
    inputs = [torch.zeros(1, 1, 9000, 1) for _ in range(3)]
    with (
        attnroute.override(double_backward=True),
        pytest.warns(QuadraticAttentionWarning, match="math holds 309 MiB of scores"),
    ):
        attnroute.attention(*inputs)


def test_tables_of_ones_own_steer_too(environment, tmp_path):
    row = """
    [[rule]]
    name = "not-here"
    requires = "never"
    because = "of this test"
    evidence = [{ kind = "own", ref = "this test" }]
    """
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "flash.toml").write_text(row, encoding="utf-8")
    assert what_ran() == "flash"
    environment(TABLES=str(tmp_path))
    assert what_ran() == "chunked"
    decision = attnroute.explain(*normal())
    assert [f.rule for f in decision.verdict("flash").blocking] == ["cpu/flash/not-here"]


def test_threads_run_what_they_ask_for():
    barrier, seen = threading.Barrier(3), {}

    def work(backend):
        with attnroute.override(backend=backend):
            barrier.wait(timeout=60)
            seen[backend] = [what_ran() for _ in range(5)]
            barrier.wait(timeout=60)

    threads = [threading.Thread(target=work, args=(backend,)) for backend in CPU_BACKENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert seen == {backend: [backend] * 5 for backend in CPU_BACKENDS}


def test_tasks_run_what_they_ask_for():
    async def work(backend):
        seen = []
        with attnroute.override(backend=backend):
            for _ in range(3):
                seen.append(what_ran())
                await asyncio.sleep(0)
        return seen

    async def main():
        return await asyncio.gather(*(work(backend) for backend in CPU_BACKENDS))

    assert asyncio.run(main()) == [[backend] * 3 for backend in CPU_BACKENDS]
    assert what_ran() == "flash"


def test_gradients_run_in_the_backward_of_the_forward_that_ran():
    """The backward pass belongs to the forward that ran, whatever is wished when it comes."""
    inputs = [t.requires_grad_() for t in normal()]
    want = torch.autograd.grad(attend(*inputs)[0].sum(), inputs)
    with attnroute.override(backend="chunked"):
        out = attnroute.attention(*inputs)
    with attnroute.override(backend="math", strict=True):
        got = torch.autograd.grad(out.sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert error(a, b, floor=1.0) <= TOLERANCE[torch.float32]


WRONG = {
    "prefer beside backend": (
        {"backend": "flash", "prefer": "math"},
        "prefer requires no backend= beside it",
    ),
    "a list beside backend": ({"backend": "flash", "prefer": ["math"]}, "prefer requires no backend= beside"),
    "a number as backend": ({"backend": 3}, "backend requires a name among .*; got 3; pass a string"),
    "bytes as backend": ({"backend": b"flash"}, "backend requires a name among .*; got b'flash'; pass a"),
    "a list as backend": ({"backend": ["flash"]}, r"backend requires a name among .*; got \['flash'\]; pass"),
    "a number to prefer": ({"prefer": 3}, "prefer requires a name among .*; got 3; pass a string"),
    "a number among others": ({"prefer": ["flash", 3]}, "prefer requires a name among .*; got 3; pass"),
}
OF_A_BLOCK = {
    "a number to ban": ({"ban": 3}, "ban requires a name among .*; got 3; pass a string"),
    "a number to allow": ({"allow": [3.0]}, "allow requires a name among .*; got 3.0; pass a string"),
    "allow without backend": ({"backend": "flash", "allow": ["math"]}, "allow requires the backend that is"),
    "strict as a word": ({"strict": "no"}, "strict requires True or False; got 'no'; pass one of them"),
    "a number": ({"recognize": 0}, "recognize requires True or False; got 0; pass one of them"),
    "allow_unknown": ({"allow_unknown": "x"}, "allow_unknown requires True or False; got 'x'; pass one"),
    "no calls": (
        {"expected_calls": 0},
        "expected_calls requires a whole number of calls from 1 to 1.*; got 0",
    ),
    "a share of calls": ({"expected_calls": 1.5}, "expected_calls requires a whole number .*; got 1.5; pass"),
    "True calls": ({"expected_calls": True}, "expected_calls requires a whole number .*; got True; pass"),
    "twice": ({"double_backward": 1}, "double_backward requires True or False; got 1; pass one of them"),
}


@pytest.mark.parametrize(
    ("wishes", "said"), [*WRONG.values(), *OF_A_BLOCK.values()], ids=[*WRONG, *OF_A_BLOCK]
)
def test_what_a_block_cannot_mean_is_one_sentence_before_it_is_entered(wishes, said):
    with pytest.raises(OverrideError, match=rf"^override\(\) {said}") as raised:
        attnroute.override(**wishes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", [attnroute.attention, attnroute.explain])
@pytest.mark.parametrize(("wishes", "said"), WRONG.values(), ids=WRONG)
def test_what_a_call_cannot_wish_is_one_sentence(function, wishes, said):
    with pytest.raises(OverrideError, match=rf"^attention\(\) {said}"):
        function(*normal(), **wishes)


def test_names_may_come_from_any_iterable():
    assert what_ran(prefer=iter(["math"])) == "math"
    assert what_ran(prefer={"chunked"}) == "chunked"
    with attnroute.override(ban=(name for name in ("flash", "chunked"))):
        assert what_ran() == "math"


def test_a_block_that_is_dropped_warns_and_one_that_was_used_does_not():
    with pytest.warns(OverrideWarning, match="no effect on its own: write `with attnroute.override"):
        attnroute.override(ban="flash")
    block = attnroute.override(backend="math")
    with block:
        assert what_ran() == "math"
    del block
    attnroute.override(backend="math")(what_ran)


def test_a_block_may_be_entered_again_and_in_itself():
    block = attnroute.override(backend="math")
    with block:
        with attnroute.override(backend="chunked"), block:
            assert what_ran() == "math"
        assert what_ran() == "math"
    assert what_ran() == "flash"
    with block:
        assert what_ran() == "math"
    assert what_ran() == "flash"


def test_a_decorated_coroutine_function_is_steered_where_it_runs():
    @attnroute.override(backend="math")
    async def steered():
        await asyncio.sleep(0)
        return what_ran()

    async def both():
        return await asyncio.gather(steered(), asyncio.to_thread(what_ran), steered())

    assert asyncio.run(both()) == ["math", "flash", "math"]


def _generator():
    yield


async def _async_generator():
    yield


@pytest.mark.parametrize(
    "what",
    [_generator, _async_generator, torch.nn.Linear, 3],
    ids=["generator", "async generator", "class", "number"],
)
def test_what_a_block_cannot_decorate_is_refused(what):
    with pytest.raises(
        OverrideError, match=r"@override\(\) requires a function or a coroutine function; got"
    ):
        attnroute.override(backend="math")(what)


def test_generators_that_end_in_another_order_leave_nothing_behind():
    def steer(backend):
        with attnroute.override(backend=backend):
            yield

    first, second = steer("math"), steer("chunked")
    next(first), next(second)
    first.close()
    assert what_ran() == "chunked"
    second.close()
    assert what_ran() == "flash"


def test_a_block_is_left_where_it_was_entered():
    block = attnroute.override(backend="math")
    block.__enter__()
    failed = []

    def leave():
        with pytest.raises(OverrideError, match="left in the thread or task that entered it"):
            block.__exit__(None, None, None)
        failed.append(True)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert failed == [True]
    assert what_ran() == "math"
    block.__exit__(None, None, None)
    assert what_ran() == "flash"
