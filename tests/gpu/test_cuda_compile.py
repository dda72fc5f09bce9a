"""The compile contract on a CUDA device: graphs and captures run the kernels that eager calls run."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from support.compile_cases import CASES, problem, results
from support.kernel_names import KERNELS, backend_seen, names_of
from torch._dynamo.utils import counters

import attnroute
from attnroute import masks, memory
from attnroute.api import lengths

pytestmark = pytest.mark.gpu

LENGTHS = (256, 320, 384, 200)
OPTIONS = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
UNBUILT = {"bias_objects": "fa2"}
"""The flash-attn that these runs had was built without ALiBi beside a softcap."""
FLEX = re.compile(r"flex_(attention|decoding)")


@pytest.fixture(autouse=True)
def forget_graphs(monkeypatch):
    # A graph takes lengths to vary from the second one on, which opens them; so are eager calls to do.
    monkeypatch.setattr(lengths, "VARIED", 2)
    memory.reset()
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def kernels(run):
    """Return the result of a run and the backends whose kernels the device ran."""
    result, on_device, names = names_of(run)
    found = backend_seen(on_device, names)
    if any(FLEX.search(name) for name in on_device):
        found.add("flex")
    if not found and any(re.search(KERNELS["math"], name) for name in on_device):
        # In a graph the composite is the operators that it is made of.
        found.add("math")
    return result, found


def check(name, *, train, backend):
    case = CASES[name]
    run = torch.compile(case.call, fullgraph=True, backend=backend)
    with attnroute.override(ban=UNBUILT[name]) if name in UNBUILT else nullcontext():
        compare(name, run, case, train=train)
    assert not counters["graph_break"]


def compare(name, run, case, *, train):
    for length in LENGTHS:
        results(run, case, length, train=train, **OPTIONS)
        results(case.call, case, length, train=train, **OPTIONS)
        got, compiled = kernels(lambda size=length: results(run, case, size, train=train, **OPTIONS))
        want, eager = kernels(lambda size=length: results(case.call, case, size, train=train, **OPTIONS))
        assert compiled == eager, f"{name} at {length}: the graph ran {compiled}, eager {eager}"
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_runs_the_kernels_of_eager(name, train):
    check(name, train=train, backend="aot_eager")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "name", ["causal", "bottom_right", "documents_sums", "thd", "disjunction", "sink", "required"]
)
def test_inductor_runs_the_kernels_of_eager(name, train):
    check(name, train=train, backend="inductor")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_few_graphs_serve_many_lengths(train):
    run = torch.compile(
        lambda q, k, v: attnroute.attention(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    for length in range(130, 4000, 110):
        run(*problem(length, train=train, **OPTIONS))
    # The first length has a graph of its own, until dynamo knows that it changes.
    assert counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


CAPTURED = {
    "cudnn": {"is_causal": True},
    "flash": {"is_causal": True},
    "efficient": {"is_causal": True},
    "flex": {"mask": masks.Causal() & masks.Window(100)},
    "chunked": {"is_causal": True},
}


def captured(call, tensors):
    """Warm up on a side stream, capture, and return the graph with its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*tensors)
    return graph, out


@pytest.mark.parametrize("backend", CAPTURED)
def test_a_captured_call_replays_on_new_inputs(backend):
    def call(query, key, value):
        return attnroute.attention(query, key, value, backend=backend, **CAPTURED[backend])

    tensors = problem(384, **OPTIONS)
    graph, out = captured(call, tensors)
    fresh = [torch.randn_like(t) for t in tensors]
    for place, new in zip(tensors, fresh, strict=True):
        place.copy_(new)
    graph.replay()
    torch.testing.assert_close(out, call(*fresh), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "chunked"])
def test_a_captured_training_step_replays_on_new_inputs(backend):
    def step(query, key, value):
        out = attnroute.attention(query, key, value, is_causal=True, backend=backend)
        return (out, *torch.autograd.grad(out.float().square().sum(), (query, key, value)))

    tensors = problem(384, train=True, **OPTIONS)
    graph, found = captured(step, tensors)
    fresh = [torch.randn_like(t).requires_grad_() for t in tensors]
    with torch.no_grad():
        for place, new in zip(tensors, fresh, strict=True):
            place.copy_(new)
    graph.replay()
    for got, want in zip(found, step(*fresh), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_first_call_inside_of_a_capture_goes_to_a_kernel_that_compiles_nothing():
    tensors = problem(448, **OPTIONS)
    attnroute.attention(*problem(64, **OPTIONS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnroute.attention(*tensors, masks.Causal() & masks.Window(77))
    graph.replay()
    want = attnroute.attention(*tensors, masks.Causal() & masks.Window(77))
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_reduce_overhead_captures_by_itself(train):
    def call(query, key, value):
        return attnroute.attention(query, key, value, is_causal=True)

    run = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        tensors = problem(512, train=train, **OPTIONS)
        torch.compiler.cudagraph_mark_step_begin()
        out = run(*tensors)
        torch.testing.assert_close(out, call(*tensors), rtol=2e-2, atol=2e-2)
        if train:
            got = torch.autograd.grad(out.float().sum(), tensors)
            want = torch.autograd.grad(call(*tensors).float().sum(), tensors)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_a_recompute_runs_the_kernel_of_the_forward(backend, use_reentrant):
    """The backward pass of CUDA tensors runs on a thread of its own, outside of every override."""

    def call(query, key, value):
        return attnroute.attention(query, key, value, is_causal=True)

    def step():
        tensors = problem(384, train=True, **OPTIONS)
        with attnroute.override(backend=backend):
            out = torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=use_reentrant)
        return (
            torch.autograd.grad(out.float().sum(), tensors)
            if not use_reentrant
            else out.float().sum().backward()
        )

    step()
    _, found = kernels(step)
    assert found == {backend}
