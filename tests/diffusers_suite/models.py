"""Small models of diffusers inside of `route_sdpa()`, and with the backend "attnroute"."""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers_suite.families import FAMILIES, made
from support.routed import counted_calls
from torch._dynamo.testing import CompileCounterWithBackend

import attnroute
from attnroute.errors import ArgumentError
from attnroute.integrations.diffusers import register

register()
diffusers.utils.logging.set_verbosity_error()
ASKING = [name for name, family in FAMILIES.items() if family.asks]
WAYS = [(name, "block") for name in FAMILIES] + [(name, "backend") for name in ASKING]
QUERY, KEY = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 4, 16)


@pytest.fixture(autouse=True)
def fresh():
    """Compile anew, and leave diffusers' process-wide choice of a backend as it was."""
    torch.compiler.reset()
    with attention_backend("native"):
        yield
    torch.compiler.reset()


def prepared(name, way):
    """Return a model, its inputs, and the block in which its attention is ours."""
    model, inputs = made(name)
    if way == "backend":
        model.set_attention_backend("attnroute")
        return model, inputs, nullcontext()
    return model, inputs, attnroute.route_sdpa()


def trained(model, inputs):
    """Return the output and the gradients of all parameters that have one."""
    out = model(**inputs)[0]
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    return [out, *torch.autograd.grad(out.square().mean(), parameters, allow_unused=True)]


@pytest.mark.parametrize("kernel", [None, "chunked"])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_model_gives_what_it_gave_and_every_call_is_routed(name, way, kernel):
    model, inputs = made(name)
    with torch.no_grad():
        want, calls = counted_calls(lambda: model(**inputs)[0])
        model, inputs, block = prepared(name, way)
        chosen = nullcontext() if kernel is None else attnroute.override(backend=kernel)
        with attnroute.trace() as trace, chosen, block:
            got = model(**inputs)[0]
    assert {call.backend for call in trace.calls} == {kernel or "flash"}
    assert sum(call.count for call in trace.calls) == calls > 0
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_training_gives_the_gradients_that_it_gave(name, way):
    want = trained(*made(name))
    model, inputs, block = prepared(name, way)
    with attnroute.trace() as trace, attnroute.override(backend="chunked"), block:
        got = trained(model, inputs)
    assert {call.backend for call in trace.calls} == {"chunked"}
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_compiled_model_has_as_many_graphs_as_with_torchs_own_attention(name, way):
    model, inputs = made(name)
    stock, ours = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        want = torch.compile(model, backend=stock)(**inputs)[0]
        torch.compiler.reset()
        model, inputs, block = prepared(name, way)
        with attnroute.trace() as trace, attnroute.override(backend="chunked"), block:
            got = torch.compile(model, backend=ours)(**inputs)[0]
    assert {(call.how, call.backend) for call in trace.calls} == {("compiled", "chunked")}
    assert ours.frame_count == stock.frame_count
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def dispatched(backend, *, mask=None, key=KEY, **named):
    with attnroute.trace() as trace, attention_backend(backend):
        out = dispatch_attention_fn(QUERY, key, key, mask, **named)
    return out, sum(call.count for call in trace.calls)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.2},
    "padding, (batch, keys)": {"mask": torch.tensor([[True] * 9, [True] * 5 + [False] * 4])},
    "added, (batch, keys)": {"mask": torch.randn(2, 9)},
    "queries and keys": {"mask": torch.rand(6, 9) > 0.3},
    "gqa": {"key": KEY[:, :, :2], "enable_gqa": True},
}


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS)
def test_a_call_of_the_backend_means_what_it_means_natively(given):
    want, none = dispatched("native", **given)
    got, one = dispatched("attnroute", **given)
    assert (none, one) == (0, 1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_what_the_backend_cannot_do_is_refused():
    with pytest.raises(ArgumentError, match="return_lse requires False"):
        dispatched("attnroute", attention_kwargs={"return_lse": True})
    with pytest.raises(ArgumentError, match="no context parallelism"):
        dispatched("attnroute", parallel_config=object())


def test_registering_again_is_harmless():
    register()
    model, inputs, _ = prepared("flux", "backend")
    model.set_attention_backend("native")
    with attnroute.trace() as trace, torch.no_grad():
        model(**inputs)
    assert not trace.calls


def test_the_code_on_the_page_routes_a_pipeline(monkeypatch):
    model, inputs = made("flux")
    load = "from_pretrained"
    monkeypatch.setattr(diffusers.DiffusionPipeline, load, lambda _name: SimpleNamespace(transformer=model))
    runpy.run_path(str(Path(__file__).with_name("page.py")))
    with attnroute.trace() as trace, torch.no_grad():
        model(**inputs)
    assert [call.count for call in trace.calls] == [2]
