"""A kernel that is refused before its launch: another backend runs, once told, and nobody asks again."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.refusing import REFUSAL, SAID, Fakes, call, explained, quietly, tensors
from support.spy import decided_calls, ran

import attnroute
from attnroute import masks
from attnroute.errors import (
    ArgumentError,
    KernelRefusedError,
    NoBackendError,
    NotCompiledError,
    RerouteWarning,
)
from attnroute.executors import registry
from attnroute.memory import reset

pytestmark = pytest.mark.usefixtures("fresh")


class MLIRError(Exception):
    """Stands for what compilers of kernels raise: a class of their own below Exception."""


class DSLCudaRuntimeError(Exception):
    """Has the name of the class in which the CUTLASS DSL reports errors of the device."""


@pytest.fixture
def fakes(monkeypatch):
    found = Fakes(registry.executor)
    monkeypatch.setattr(registry, "executor", found)
    return found


@pytest.fixture
def decided(monkeypatch):
    """Collect the calls that were decided."""
    return decided_calls(monkeypatch)


# What reroutes, and what does not.


@pytest.mark.parametrize(
    "raising",
    [
        REFUSAL,
        partial(ValueError, "unsupported head_dim"),
        partial(TypeError, "unexpected keyword argument 'softcap'"),
        partial(NotImplementedError, "no backward"),
        partial(ImportError, "undefined symbol"),
        partial(
            RuntimeError, "This flash attention build does not support headdim not being a multiple of 32."
        ),
        partial(MLIRError, "Operation creation failed:"),
        partial(KeyError, "sm_99"),
        partial(AssertionError),
    ],
)
def test_a_refusal_reroutes_with_one_warning_and_the_right_result(fakes, raising):
    fakes.refuse("flash", raising=raising)
    given = tensors()
    with pytest.warns(RerouteWarning) as told, ran("chunked"):
        got = attnroute.attention(*given, is_causal=True)
    assert len(told) == 1
    assert type(raising()).__name__ in str(told[0].message)
    assert told[0].filename == __file__
    want = attend(*given, allowed=torch.ones(6, 6, dtype=torch.bool).tril())[0]
    assert error(got, want) <= TOLERANCE[torch.float32]


def _from_the_device():
    refusal = ValueError("launch failed")
    refusal.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    return refusal


@pytest.mark.parametrize(
    "raising",
    [
        partial(RuntimeError, "CUDA error: device-side assert triggered"),
        partial(RuntimeError, "CUDA driver error: misaligned address"),
        partial(RuntimeError, "Triton Error [CUDA]: an illegal memory access was encountered"),
        partial(RuntimeError, "cudaErrorLaunchFailure"),
        partial(ValueError, "CUDA_ERROR_ILLEGAL_ADDRESS (error code: 700)"),
        partial(RuntimeError, "cuDNN Error: CUDNN_STATUS_EXECUTION_FAILED"),
        partial(torch.OutOfMemoryError, "tried to allocate 3 GiB"),
        partial(torch.AcceleratorError, "unspecified launch failure"),
        partial(DSLCudaRuntimeError, "cudaError 719"),
        partial(DSLCudaRuntimeError, ""),
        partial(MemoryError),
        partial(KeyboardInterrupt),
        partial(ArgumentError, "query requires something else"),
        _from_the_device,
    ],
)
def test_what_the_device_says_and_what_is_no_refusal_passes_unchanged(fakes, raising):
    raised = raising()
    fakes.refuse("flash", raising=lambda: raised)
    for _ in range(2):
        with pytest.raises(type(raised)) as caught:
            call()
        assert caught.value is raised
    assert fakes.asked == {"flash": 2}
    assert explained().selected == "flash"


def test_a_lack_of_memory_that_is_being_handled_makes_no_refusal_an_error_of_the_device(fakes):
    fakes.refuse("flash", raising=partial(torch.OutOfMemoryError, "the larger batch did not fit"))
    try:
        call()
    except torch.OutOfMemoryError:
        fakes.refuse("flash")
        assert len(quietly()) == 1
    assert fakes.asked == {"flash": 2, "chunked": 1}


def test_gradients_come_from_the_backend_that_ran(fakes):
    fakes.refuse("flash")
    given = tensors(training=True)
    with pytest.warns(RerouteWarning):
        out = call(given)
    grads = torch.autograd.grad(out.sum(), given)
    again = [t.detach().double().requires_grad_() for t in given]
    want = torch.autograd.grad(attend(*again)[0].sum(), again)
    assert all(error(g, w) <= TOLERANCE[torch.float32] for g, w in zip(grads, want, strict=True))


def test_flex_that_is_not_compiled_is_rerouted_unless_it_is_required(fakes):
    fakes.refuse("flex", raising=partial(NotCompiledError, "backend flex requires a compiler; got none."))
    with pytest.warns(RerouteWarning, match="got none"):
        attnroute.attention(*tensors(), prefer="flex", mask=masks.Causal())
    assert fakes.asked == {"flex": 1, "flash": 1}
    message = r"got none\. No other backend runs in its place, because flex is required by attention\(\)\."
    with pytest.raises(NotCompiledError, match=message):
        attnroute.attention(*tensors(), backend="flex")


# Once per kind of call.


def test_lengths_batches_and_masks_of_one_kind_ask_the_backend_once(fakes):
    fakes.refuse("flash")
    assert len(quietly()) == 1
    for batch, seqlen in ((2, 6), (2, 7), (5, 6), (1, 300), (3, 2)):
        call(tensors(batch, seqlen))
        call(tensors(batch, seqlen), layout="bhsd")
    assert fakes.asked == {"flash": 1, "chunked": 11}


@pytest.mark.parametrize(
    "other",
    [
        {"given": lambda: tensors(head_dim=16)},
        {"given": lambda: tensors(dtype=torch.float64)},
        {"given": lambda: tensors(training=True)},
        {"given": lambda: tensors(seqlen=1)},
        {"is_causal": True},
        {"return_lse": True},
    ],
)
def test_another_kind_of_call_asks_again_and_warns_again(fakes, other):
    fakes.refuse("flash")
    make = other.pop("given", tensors)
    quietly()
    assert len(quietly(given=make(), **other)) == 1
    call(make(), **other)
    assert fakes.asked["flash"] == 2


def test_after_the_warning_a_call_pays_nothing(fakes, decided):
    fakes.refuse("flash")
    quietly()
    before = len(decided)
    for _ in range(3):
        call()
    # Twice to choose, and twice for the text of the warning.
    assert len(decided) == before == 4


def test_routes_that_ran_before_a_refusal_of_their_kind_are_given_up(fakes):
    call(tensors(seqlen=6))
    fakes.refuse("flash")
    quietly(given=tensors(seqlen=7))
    call(tensors(seqlen=6))
    assert explained(tensors(seqlen=6)).selected == "chunked"
    assert fakes.asked == {"flash": 2, "chunked": 2}


def test_what_is_forgotten_is_asked_again(fakes):
    fakes.refuse("flash")
    quietly()
    fakes.recover()
    call()
    assert fakes.asked["flash"] == 1
    reset()
    call()
    assert fakes.asked["flash"] == 2


def test_a_warning_that_is_an_error_stops_one_call_and_no_later_one(fakes):
    fakes.refuse("flash")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RerouteWarning):
            call()
        call()
    assert fakes.asked == {"flash": 1, "chunked": 1}


def test_many_threads_get_right_results_and_one_warning(fakes):
    fakes.refuse("flash")
    given = tensors()
    want = attend(*given)[0]
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return max(error(call(given), want) for _ in range(5))

    with pytest.warns(RerouteWarning) as told, ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(work, range(8)))
    assert max(errors) <= TOLERANCE[torch.float32]
    assert (len(told), fakes.asked["chunked"]) == (1, 40)
    assert 1 <= fakes.asked["flash"] <= 8


# When more than one refuses.


def test_refusals_one_after_the_other_warn_once_each(fakes):
    fakes.refuse("flash", "chunked")
    given = tensors()
    with pytest.warns(RerouteWarning) as told, ran("math"):
        got = call(given)
    said = [str(w.message) for w in told]
    assert [text.split()[1] for text in said] == ["flash", "chunked"]
    assert "chunked runs it" in said[0]
    assert "math runs it" in said[1]
    assert error(got, attend(*given)[0]) <= TOLERANCE[torch.float32]
    call(given)
    assert fakes.asked == {"flash": 1, "chunked": 1, "math": 2}


def test_where_nothing_is_left_everything_is_listed_and_nothing_asked_again(fakes):
    fakes.refuse("flash", "chunked", "math")
    with pytest.warns(RerouteWarning) as told, pytest.raises(NoBackendError) as caught:
        call()
    assert len(told) == 2, "nothing runs in the place of the last one, so nothing is told but the error"
    assert isinstance(caught.value.__cause__, KernelRefusedError)
    assert isinstance(caught.value.__cause__.__cause__, AssertionError)
    text = " ".join(str(caught.value).split())
    assert text.count(f"kept out because it failed in this process: {SAID}") == 3
    assert "banned by override()" in text
    assert text.endswith("hint without the ban by override(), flex could run it")
    with pytest.raises(NoBackendError, match="failed in this process"):
        call()
    assert fakes.asked == {"flash": 1, "chunked": 1, "math": 1}


def test_an_allowed_backend_that_refuses_leaves_the_others_out(fakes, environment):
    environment(BACKENDS="flash")
    fakes.refuse("flash")
    with pytest.raises(NoBackendError, match="not among those that ATTNROUTE_BACKENDS=flash") as caught:
        call()
    assert "failed in this process" in str(caught.value)


# Random numbers.


def test_a_kernel_that_did_not_run_drew_no_random_numbers(fakes):
    given = tensors()
    torch.manual_seed(7)
    want = call(given, dropout_p=0.5, backend="math")
    after = torch.rand(1)
    fakes.refuse("chunked")
    torch.manual_seed(7)
    with pytest.warns(RerouteWarning), ran("math"):
        got = call(given, dropout_p=0.5)
    assert torch.equal(got, want)
    assert torch.equal(torch.rand(1), after)
