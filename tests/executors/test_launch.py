"""The border between a refusal and a failure: what it makes of errors, what it keeps of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from attnroute.errors import AttnRouteError, KernelRefusedError, NotCompiledError, OverrideError, TableError
from attnroute.executors import launch as launching
from attnroute.executors import registry
from attnroute.executors.aten import math
from attnroute.executors.launch import before_launch
from attnroute.memory import reset

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    reset()
    yield
    reset()


def launch(raising=None, asked=None, draws=0, what=None, **rest):
    """Ask a package for a kernel, as an executor does."""
    code = None if what is None else lambda: what
    with before_launch(rest.pop("backend", "alpha"), key=code, **rest):
        torch.rand(draws)
        if asked is not None:
            asked.append(1)
        if raising is not None:
            raise raising


def refused(raising, **rest):
    """Return what becomes of an error."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        launch(raising, **rest)
    return caught.value


def test_a_refusal_is_one_error_with_backend_words_and_cause():
    given = ValueError("head_dim 20 is not supported")
    got = refused(given)
    assert type(got) is KernelRefusedError
    assert isinstance(got, AttnRouteError)
    assert isinstance(got, RuntimeError)
    assert got.__cause__ is given
    assert (got.backend, got.said) == ("alpha", "ValueError: head_dim 20 is not supported")
    assert str(got) == (
        "backend alpha refused this call before its kernel was launched: ValueError: head_dim 20 is not"
        ' supported; pass another backend, or keep this one away with override(ban="alpha").'
    )


def test_an_uncompiled_flex_is_a_refusal_too():
    given = NotCompiledError("backend flex requires a compiler")
    assert isinstance(given, KernelRefusedError)
    assert given.said == str(given)
    assert refused(given) is given


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ValueError"),
        ("  \n\n", "ValueError"),
        ("\n \x1b[91m  first \x1b[0m\nsecond", "ValueError: first"),
        ("x" * 500, f"ValueError: {'x' * 185}..."),
        ("{braces} %s", "ValueError: {braces} %s"),
    ],
)
def test_what_is_kept_of_a_text_is_its_first_line(text, said):
    got = refused(ValueError(text))
    assert got.said == said
    assert len(got.said) <= 200


@pytest.mark.parametrize("kind", [OverrideError, KernelRefusedError, NotCompiledError])
def test_our_own_errors_pass(kind):
    given = kind("something of ours")
    assert refused(given) is given


@pytest.mark.parametrize("given", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_exception_passes(given):
    with pytest.raises(type(given)) as caught, before_launch("alpha", key=lambda: 1):
        raise given
    assert caught.value is given
    with before_launch("alpha", key=lambda: 1):
        pass


def test_a_cause_of_the_device_is_found_behind_other_errors():
    device, middle, last = RuntimeError("CUDA error: invalid argument"), ValueError("b"), TypeError("c")
    middle.__cause__, last.__cause__ = device, middle
    assert refused(last) is last
    middle.__cause__ = None
    assert type(refused(last)) is KernelRefusedError


def test_without_an_error_nothing_happens():
    before = torch.get_rng_state()
    for _ in range(2):
        with before_launch("alpha", key=lambda: "code", draws_on=CPU):
            result = 3
    assert result == 3
    assert torch.equal(torch.get_rng_state(), before)


# A refusal that is remembered.


def test_what_was_refused_is_not_asked_again():
    asked, given = [], AssertionError("no")
    told = [refused(given, asked=asked, what=("forward", 64)) for _ in range(3)]
    assert len(asked) == 1
    assert {(type(e), str(e), e.backend, e.said) for e in told} == {
        (KernelRefusedError, str(told[0]), "alpha", "AssertionError: no")
    }
    for backend, what in (("alpha", ("backward", 64)), ("beta", ("forward", 64)), ("alpha", None)):
        launch(asked=asked, backend=backend, what=what)
    assert len(asked) == 4
    reset()
    launch(asked=asked, what=("forward", 64))
    assert len(asked) == 5


def test_what_the_device_says_is_not_remembered():
    refused(RuntimeError("CUDA error: misaligned address"), what="code")
    launch(what="code")


def test_a_remembered_refusal_keeps_no_tensor_alive():
    def fails(tensor):
        with before_launch("alpha", key=lambda: "code"):
            raise ValueError(f"shape {tuple(tensor.shape)}")

    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    with pytest.raises(KernelRefusedError):
        fails(tensor)
    del tensor
    gc.collect()
    assert seen() is None


# Random numbers.


def test_random_numbers_of_a_refused_kernel_are_put_back():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    assert type(refused(ValueError("too late"), draws=5, draws_on=CPU)) is KernelRefusedError
    assert torch.equal(torch.rand(2), want)


@pytest.mark.parametrize("raising", [None, RuntimeError("CUDA error: launch failed")])
def test_random_numbers_of_a_kernel_that_ran_stay_drawn(raising):
    torch.manual_seed(3)
    torch.rand(5)
    want = torch.rand(2)
    torch.manual_seed(3)
    if raising is None:
        launch(draws=5, draws_on=CPU)
    else:
        assert refused(raising, draws=5, draws_on=CPU) is raising
    assert torch.equal(torch.rand(2), want)


# Who listens.


def test_a_listener_hears_once_what_an_executor_replaced(monkeypatch):
    monkeypatch.setattr(launching, "_LISTENERS", [])
    heard = []
    hear = heard.append
    launching.listen(hear)
    launching.listen(hear)
    error = refused(ValueError("no"))
    launching.note_backward_failure("alpha", error, "chunked")
    qkv = (torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 5, 2, 16), torch.zeros(2, 5, 2, 8))
    launching.note_backward_failure("alpha", error, "chunked", training=False, qkv=qkv)
    assert heard == [
        launching.Replaced("alpha", "ValueError: no", "chunked"),
        launching.Replaced("alpha", "ValueError: no", "chunked", False, "bfloat16", 16, 8),
    ]


def test_an_executor_that_cannot_be_imported_refuses_and_is_tried_again(monkeypatch):
    imported = []

    def fail(name):
        imported.append(name)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(registry, "import_module", fail)
    registry._imported.cache_clear()
    for n in (1, 2):
        found = registry.executor("flex", "attnroute.executors.flex.run")
        assert len(imported) == n
        with pytest.raises(KernelRefusedError, match=r"flex refused this call .*Read-only file system"):
            found.run(None, None)
    monkeypatch.undo()
    registry._imported.cache_clear()
    assert registry.executor("math", "attnroute.executors.aten.math") is math.executor


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("attnroute.executors.nothing", "there is no attnroute.executors.nothing; correct it"),
        ("attnroute_nothing.at_all", "there is no attnroute_nothing; correct it, or ban alpha"),
        ("attnroute.executors.launch", "got nothing of that name in attnroute.executors.launch"),
    ],
)
def test_a_module_that_runs_nothing_is_an_error_of_the_table(module, said):
    with pytest.raises(TableError, match=rf"^any/alpha.toml: backend.module requires a.*{said}"):
        registry.executor("alpha", module)


def test_what_is_no_executor_is_an_error_of_the_table(monkeypatch):
    monkeypatch.setattr(math, "executor", math.executor.run)
    registry._imported.cache_clear()
    with pytest.raises(TableError, match="an Executor under the name executor; got one of type function in"):
        registry.executor("math", "attnroute.executors.aten.math")
    monkeypatch.undo()
