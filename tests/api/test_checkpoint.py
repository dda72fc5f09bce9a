"""A recompute of an activation checkpoint runs what its forward ran, whatever surrounds the backward pass."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute.api import routes

pytestmark = pytest.mark.usefixtures("fresh")

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["frames", "reentrant"])


@pytest.fixture
def ran(monkeypatch):
    """Every backend that ran, in order, with whether it was recorded for a backward pass."""
    seen, execute = [], routes.execute

    def noting(route, args):
        seen.append(route.plan.backend)
        return execute(route, args)

    monkeypatch.setattr(routes, "execute", noting)
    return seen


def problem(length=48):
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2)]


def attend(query, key, value, **given):
    return attnroute.attention(query, key, value, is_causal=True, **given)


def kept(call, inputs, *, use_reentrant):
    return checkpoint(call, *inputs, use_reentrant=use_reentrant)


def gradients(out, inputs):
    for tensor in inputs:
        tensor.grad = None
    out.square().sum().backward()
    return [t.grad.clone() for t in inputs]


def check_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@REENTRANT
def test_an_override_around_the_forward_alone_holds_in_the_recompute(use_reentrant, ran):
    inputs = problem()
    want = gradients(attend(*inputs), inputs)
    ran.clear()
    with attnroute.override(backend="chunked"):
        out = kept(attend, inputs, use_reentrant=use_reentrant)
    check_equal(gradients(out, inputs), want)
    assert ran == ["chunked", "chunked"]


@REENTRANT
def test_an_override_around_the_backward_alone_is_not_heard(use_reentrant, ran):
    inputs = problem()
    out = kept(attend, inputs, use_reentrant=use_reentrant)
    with attnroute.override(backend="math"):
        gradients(out, inputs)
    assert ran == ["flash", "flash"]


@REENTRANT
def test_another_thread_runs_the_backward(use_reentrant, ran):
    inputs, failed = problem(), []
    with attnroute.override(backend="chunked"):
        out = kept(attend, inputs, use_reentrant=use_reentrant)

        def back():
            try:
                gradients(out, inputs)
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                failed.append(error)

        thread = threading.Thread(target=back)
        thread.start()
        thread.join()
    assert not failed
    assert ran == ["chunked", "chunked"]


@REENTRANT
def test_a_forward_without_an_override_takes_an_earlier_one_back(use_reentrant, ran):
    inputs = problem()
    with attnroute.override(backend="chunked"):
        gradients(kept(attend, inputs, use_reentrant=use_reentrant), inputs)
    ran.clear()
    gradients(kept(attend, inputs, use_reentrant=use_reentrant), inputs)
    assert ran == ["flash", "flash"]


@REENTRANT
def test_a_repeated_call_takes_an_override_between_its_repeats_back(use_reentrant, ran):
    """Repeats take the short way, which takes nothing back, so none may be older than the override."""
    inputs = problem()
    for _ in range(3):
        attend(*inputs)
    with torch.no_grad():
        for _ in range(3):
            attend(*inputs)
    with attnroute.override(backend="chunked"):
        gradients(kept(attend, inputs, use_reentrant=use_reentrant), inputs)
    for _ in range(2):
        ran.clear()
        gradients(kept(attend, inputs, use_reentrant=use_reentrant), inputs)
        # A forward that goes the short way is not seen here; the recompute is.
        assert ran[-1] == "flash"
        assert set(ran) == {"flash"}


@REENTRANT
def test_a_backend_that_the_call_names_holds(use_reentrant, ran):
    inputs = problem()

    def named(*tensors):
        return attend(*tensors, backend="chunked")

    with attnroute.override(prefer="math"):
        out = kept(named, inputs, use_reentrant=use_reentrant)
    gradients(out, inputs)
    assert ran == ["chunked", "chunked"]


def test_layers_of_the_same_shapes_keep_an_override_each(ran):
    """Only frames tell them apart: the calls have everything in common but the policy."""
    inputs, outs = problem(), []
    for backend in ("chunked", "flash", "math", "flash"):
        with attnroute.override(backend=backend):
            outs.append(kept(attend, inputs, use_reentrant=False))
    assert ran == ["chunked", "flash", "math", "flash"]
    ran.clear()
    gradients(sum(outs), inputs)
    assert sorted(ran) == ["chunked", "flash", "flash", "math"]


def test_calls_of_one_checkpoint_keep_an_override_each(ran):
    inputs = problem()

    def block(query, key, value):
        with attnroute.override(backend="chunked"):
            first = attend(query, key, value)
        return first + attend(query, key, value)

    with attnroute.override(prefer="math"):
        out = kept(block, inputs, use_reentrant=False)
    gradients(out, inputs)
    assert ran == ["chunked", "math", "chunked", "math"]


def test_nested_checkpoints(ran):
    inputs = problem()

    def inner(*tensors):
        return kept(attend, tensors, use_reentrant=False)

    with attnroute.override(backend="chunked"):
        out = kept(inner, inputs, use_reentrant=False)
    gradients(out, inputs)
    assert set(ran) == {"chunked"}


def test_a_graph_that_is_kept_recomputes_the_same_twice(ran):
    inputs = problem()
    with attnroute.override(backend="chunked"):
        out = kept(attend, inputs, use_reentrant=False).square().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    check_equal(first, second)
    assert ran == ["chunked"] * 3


def test_a_reentrant_recompute_prefers_what_ran_without_gradients(ran):
    """With gradients math would come after flash; the forward is made to choose it as an inference."""
    inputs = problem()

    def call(query, key, value):
        if torch.is_grad_enabled():
            return attend(query, key, value)
        with attnroute.override(prefer="chunked"):
            return attend(query, key, value)

    out = kept(call, inputs, use_reentrant=True)
    gradients(out, inputs)
    assert ran == ["chunked", "chunked"]


def test_the_environment_holds_everywhere(ran, monkeypatch):
    from attnroute import settings

    monkeypatch.setenv("ATTNROUTE_BACKEND", "chunked")
    settings.reload()
    try:
        inputs = problem()
        gradients(kept(attend, inputs, use_reentrant=False), inputs)
        assert ran == ["chunked", "chunked"]
    finally:
        monkeypatch.delenv("ATTNROUTE_BACKEND")
        settings.reload()


def test_autocast_and_determinism_are_those_of_the_forward(ran):
    inputs = problem()
    with torch.autocast("cpu", torch.bfloat16):
        out = kept(attend, inputs, use_reentrant=False)
    assert out.dtype == torch.bfloat16
    gradients(out.float(), inputs)
    assert ran == ["flash", "flash"]


def test_offloaded_tensors_beside_an_override(ran):
    """Hooks of other kinds are no checkpoints."""
    inputs = problem()
    with torch.autograd.graph.save_on_cpu(), attnroute.override(backend="chunked"):
        out = attend(*inputs)
    gradients(out, inputs)
    assert ran == ["chunked"]


class Again(torch.autograd.Function):
    """A backward of the user's own, which computes its attention anew inside of an override."""

    wishes = None

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return attend(query, key, value)

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad(), attnroute.override(**Again.wishes):
            out = attend(*inputs)
            Again.said = attnroute.explain(*inputs, is_causal=True).selected
        return torch.autograd.grad(out, inputs, grad)


OUTSIDE = {
    "nothing around": ({}, {}),
    "around the forward": ({"prefer": "math"}, {}),
    "around the backward": ({}, {"prefer": "math"}),
    "around both": ({"prefer": "math"}, {"prefer": "chunked"}),
}


@pytest.mark.parametrize("ban", ["flash", ("flash", "math"), ("flash", "chunked")], ids=str)
@pytest.mark.parametrize(("forward", "backward"), OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "another thread"])
def test_an_override_inside_of_a_backward_is_heard(ran, monkeypatch, ban, forward, backward, in_thread):
    monkeypatch.setattr(Again, "wishes", {"ban": ban})
    inputs = problem()
    with attnroute.override(**forward):
        out = Again.apply(*inputs)
    ran.clear()

    def back():
        with attnroute.override(**backward):
            out.sum().backward()

    if in_thread:
        thread = threading.Thread(target=back)
        thread.start()
        thread.join()
    else:
        back()
    assert len(ran) == 1
    assert ran[0] not in (ban, *ban)
    copies = [t.detach().requires_grad_() for t in inputs]
    check_equal([t.grad for t in inputs], torch.autograd.grad(attend(*copies).sum(), copies))


def test_an_override_inside_of_a_backward_is_what_explain_says(ran, monkeypatch):
    monkeypatch.setattr(Again, "wishes", {"backend": "chunked"})
    inputs = problem()
    out = Again.apply(*inputs)
    ran.clear()
    out.sum().backward()
    assert ran == [Again.said] == ["chunked"]


@REENTRANT
def test_a_recompute_keeps_what_both_blocks_of_its_forward_said(use_reentrant, ran):
    """The inner block is entered again in the recompute, the outer one is not."""
    inputs = problem()

    def call(*tensors):
        with attnroute.override(ban="flash"):
            return attend(*tensors)

    with attnroute.override(prefer="math"):
        out = kept(call, inputs, use_reentrant=use_reentrant)
    gradients(out, inputs)
    assert ran == ["math", "math"]
