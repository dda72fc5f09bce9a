"""Kernels that are refused where only their executor can replace them: told once, avoided from then on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.spy import ran

import attnroute
from attnroute.errors import KernelRefusedError, RerouteWarning
from attnroute.executors import launch

pytestmark = pytest.mark.usefixtures("fresh")

REFUSED = KernelRefusedError("backend flash refused this call", "flash", "AssertionError: no backward")


def tensors(seqlen=6, head_dim=8, dtype=torch.float32, *, training=True):
    return [torch.randn(2, 4, seqlen, head_dim, dtype=dtype, requires_grad=training) for _ in range(3)]


def call(given):
    with attnroute.override(ban="flex"):
        return attnroute.attention(*given)


def selected(given):
    return attnroute.explain(*given).selected


def note(**rest):
    """Tell that FLASH's backward was refused; return what the user was warned of."""
    with pytest.warns(RerouteWarning) as told:
        launch.note_backward_failure("flash", REFUSED, "chunked", **rest)
    return [str(w.message) for w in told]


def test_later_calls_of_the_kind_go_elsewhere_from_the_start():
    given = tensors()
    assert selected(given) == "flash"
    call(given)
    (said,) = note()
    assert said.startswith(
        "backend flash refused a kernel before it was launched, in a backward or a compiled"
    )
    for part in (
        "(AssertionError: no backward); chunked ran in its place. Later calls like it go to another backend",
        "please report cpu/flash with this text, for fp32 b2 hq4 hkv4 sq6 skv6 d8 train on cpu",
        "ATTNROUTE_BACKENDS=-flash",
    ):
        assert part in said
    for length in (6, 9):
        with ran("chunked"):
            call(tensors(length))
    excluded = attnroute.explain(*given).verdict("flash").excluded
    assert (excluded.reason, excluded.origin) == ("failed", "AssertionError: no backward")


def test_layers_that_ran_forward_before_are_told_of_once():
    call(tensors())
    note()
    for _ in range(3):
        launch.note_backward_failure("flash", REFUSED, "chunked")
    call(tensors())
    launch.note_backward_failure("flash", REFUSED, "chunked")


def test_calls_that_ask_for_no_gradient_keep_the_backend():
    call(tensors(training=False))
    call(tensors())
    note()
    assert (selected(tensors(training=False)), selected(tensors())) == ("flash", "chunked")


def test_a_forward_in_a_graph_without_gradients_is_of_the_other_kind():
    call(tensors(training=False))
    call(tensors())
    note(training=False)
    assert (selected(tensors(training=False)), selected(tensors())) == ("chunked", "flash")


def test_tensors_say_which_kind_it_was():
    kinds = {"wide": tensors(head_dim=16), "double": tensors(dtype=torch.float64), "refused": tensors()}
    for given in kinds.values():
        call(given)
    note(qkv=tuple(kinds["refused"]))
    assert [selected(given) for given in kinds.values()] == ["flash", "flash", "chunked"]


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(12, "chunked"), (16, "chunked"), (8, "flash"), (20, "flash")]
)
def test_padded_heads_are_those_of_the_call(head_dim, expected):
    given = tensors(head_dim=head_dim)
    call(given)
    note(qkv=tuple(tensors(head_dim=16)))
    assert selected(given) == expected


def test_a_kernel_of_no_known_call_is_told_of_all_the_same():
    (said,) = note()
    assert "chunked ran in its place. To keep flash away" in said
    assert selected(tensors()) == "flash"
    launch.note_backward_failure("flash", REFUSED, "chunked")


def test_another_backend_is_not_concerned():
    with attnroute.override(ban="flash"):
        call(tensors())
    note()
    with attnroute.override(ban="flash"), ran("chunked"):
        call(tensors())
    assert selected(tensors()) == "flash"


def test_threads_of_autograd_are_heard():
    call(tensors())
    with pytest.warns(RerouteWarning) as told, ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: launch.note_backward_failure("flash", REFUSED, "chunked"), range(6)))
    assert len(told) == 1
    assert selected(tensors()) == "chunked"
