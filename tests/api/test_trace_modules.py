"""`trace()`: which module made a call, on which kernel that ran, forward, backward and in graphs."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute.api import recorder, routes

KERNELS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}


class Attention(nn.Module):
    """One layer, with torch's own function or with `attention()`."""

    def __init__(self, call, **named):
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.call, self.named = call, named

    def forward(self, tokens):
        heads = self.project(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.call(heads, heads * 2, heads, **self.named).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, *layers, recomputes=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": layer}) for layer in layers)
        self.recomputes = recomputes

    def forward(self, tokens):
        for layer in self.layers:
            attn = layer["attn"]
            new = checkpoint(attn, tokens, use_reentrant=False) if self.recomputes else attn(tokens)
            tokens = tokens + new
        return tokens


def stock_model(count=2, **named):
    return Model(*(Attention(F.scaled_dot_product_attention, **named) for _ in range(count)))


def routed_model(count=2, **named):
    return Model(*(Attention(attnroute.attention, **named) for _ in range(count)))


def tokens(seqlen=20):
    return torch.randn(2, seqlen, 32)


def places(calls):
    return [(p.model, p.module, p.count, p.backward) for call in calls for p in call.places]


def profiled(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    return result, [event.name for event in profile.events()]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1], ids=["flash", "math"])
def test_torchs_own_calls_name_the_kernel_that_ran(dropout_p):
    model = stock_model(dropout_p=dropout_p)
    with attnroute.trace() as trace:
        _, names = profiled(lambda: model(tokens()))
    assert trace.calls == ()
    (call,) = trace.stock
    assert [name for name, operator in KERNELS.items() if operator in names] == [call.backend]
    assert names.count(f"attention: {call.backend} of torch") == call.count == 2
    assert places([call]) == [("Model", "layers.0.attn", 1, 0), ("Model", "layers.1.attn", 1, 0)]
    assert call.line.startswith("fp32 b2 hq4 hkv4 sq20 skv20 d8")


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
def test_calls_of_attention_name_the_kernel_that_ran(backend):
    model = routed_model(backend=backend)
    with attnroute.trace() as trace:
        _, names = profiled(lambda: model(tokens()))
    assert trace.stock == ()
    assert [(call.backend, call.count) for call in trace.calls] == [(backend, 2)]
    assert names.count(f"attention: {backend}") == 2
    if backend in KERNELS:
        assert names.count(KERNELS[backend]) == 2
    assert not any(name.startswith("attention: ") for name in profiled(lambda: model(tokens()))[1])


def test_routed_calls_are_attnroutes_and_those_it_hands_back_are_torchs():
    model, query = stock_model(), torch.randn(2, 4, 0, 8)
    with attnroute.trace() as trace, attnroute.route_sdpa():
        model(tokens())
        F.scaled_dot_product_attention(query, query, query)
    assert [call.count for call in trace.calls] == [2]
    assert [(call.line, call.count) for call in trace.stock] == [("", 1)]
    with attnroute.route_sdpa(), attnroute.trace() as inner:
        model(tokens())
        F.scaled_dot_product_attention(query, query, query)
    assert places(inner.calls) == places(trace.calls)
    assert [call.count for call in inner.stock] == [1]


@pytest.mark.parametrize("make", [stock_model, routed_model], ids=["stock", "attnroute"])
def test_backward_passes_are_counted_and_timed(make):
    model = make()
    with attnroute.trace() as trace:
        out = model(tokens()).sum()
        out.backward(retain_graph=True)
        out.backward()
        later = model(tokens()).sum()
    later.backward()
    (call,) = trace.calls or trace.stock
    assert (call.count, call.clock) == (4, "host")
    assert [(place.count, place.backward) for place in call.places] == [(2, 2), (2, 2)]
    assert all(place.forward_ms > 0 and place.backward_ms > 0 for place in call.places)


@pytest.mark.parametrize("make", [stock_model, routed_model], ids=["stock", "attnroute"])
def test_recomputes_have_the_module_of_their_forward(make):
    model = make()
    model.recomputes = True
    with attnroute.trace() as trace:
        model(tokens()).sum().backward()
    found = [p for call in trace.calls or trace.stock for p in call.places]
    assert {(p.model, p.module) for p in found} == {("Model", f"layers.{n}.attn") for n in (0, 1)}
    assert sum(p.count for p in found) == 4
    assert sum(p.recomputed for p in found) == 2
    assert sum(p.backward for p in found) == 2


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("call", [F.scaled_dot_product_attention, attnroute.attention])
def test_a_trace_keeps_no_tensor_of_a_call_alive(call, recomputes):
    """What a checkpoint or autograd frees would else fill the device while a model trains under a trace."""
    made = []

    def inside(tensor):
        qkv = [tensor * factor for factor in (1, 2, 3)]
        made.extend(map(weakref.ref, qkv))
        return call(*qkv)

    query = torch.randn(1, 2, 8, 8, requires_grad=True)
    with attnroute.trace():
        out = checkpoint(inside, query, use_reentrant=False) if recomputes else inside(query)
        assert [found() is None for found in made] == [recomputes] * 3
        out.sum().backward()
    assert [found() for found in made] == [None] * len(made)


@pytest.mark.parametrize("make", [stock_model, routed_model], ids=["stock", "attnroute"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["whole", "layers"])
def test_graphs_name_their_modules_and_have_no_counts(make, per_layer):
    torch.compiler.reset()
    model = make(1 if per_layer else 2)
    run = model
    if per_layer:
        model.layers[0]["attn"].compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with attnroute.trace() as trace:
        for _ in range(3):
            run(tokens()).sum().backward()
    calls = trace.calls or trace.stock
    assert {(call.how, call.backend, call.count) for call in calls} == {("compiled", "flash", None)}
    found = [(p.model, p.module, p.count) for call in calls for p in call.places]
    assert sorted(found) == [("Model", f"layers.{n}.attn", None) for n in range(1 if per_layer else 2)]
    torch.compiler.reset()


def test_code_that_dynamo_gives_up_is_recorded_as_it_runs():
    torch.compiler.reset()
    layers = [nn.TransformerEncoderLayer(32, 4, size, dropout=0.0, batch_first=True) for size in (48, 64, 80)]
    model, given = nn.Sequential(*layers), tokens()
    want = model(given)
    for layer in layers:
        layer.compile(backend="aot_eager")
    with attnroute.trace() as trace, torch._dynamo.config.patch(cache_size_limit=1):
        got = model(given)
    torch.testing.assert_close(got, want)
    counts = {p.module: p.count for call in trace.stock for p in call.places}
    assert counts == {"0.self_attn": None, "1.self_attn": 1, "2.self_attn": 1}
    torch.compiler.reset()


def test_multi_head_attention_is_seen_inside():
    module, query = nn.MultiheadAttention(32, 4, batch_first=True), tokens()
    want = module(query, query, query, need_weights=False)[0]
    with attnroute.trace() as trace:
        got = module(query, query, query, need_weights=False)[0]
    torch.testing.assert_close(got, want)
    assert places(trace.stock) == [("MultiheadAttention", "", 1, 0)]


def test_wrappers_have_no_part_in_a_path():
    model = torch.compile(stock_model(), backend="eager")
    with attnroute.trace() as trace, torch.compiler.set_stance("force_eager"):
        model(tokens())
    assert [p.module for call in trace.stock for p in call.places] == ["layers.0.attn", "layers.1.attn"]
    assert {p.model for call in trace.stock for p in call.places} == {"Model"}


def test_a_call_outside_of_modules_has_no_place():
    query = torch.randn(1, 2, 8, 4)
    with attnroute.trace() as trace:
        F.scaled_dot_product_attention(query, query, query)
    assert places(trace.stock) == [("", "", 1, 0)]


def test_a_call_that_raises_is_torchs_error_and_not_counted():
    query = torch.randn(1, 2, 8, 4)
    with attnroute.trace() as trace:
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            F.scaled_dot_product_attention(query, query, query, torch.zeros(8, 3))
        with pytest.raises(TypeError, match="scaled_dot_product_attention"):
            F.scaled_dot_product_attention(query)
    assert trace.stock == ()


def test_traces_inside_of_each_other_count_torchs_calls_once():
    model = stock_model()
    with attnroute.trace() as outer:
        model(tokens())
        with attnroute.trace() as inner:
            model(tokens())
    assert ([c.count for c in outer.stock], [c.count for c in inner.stock]) == ([4], [2])
    assert torch._C._len_torch_function_stack() == 0
    assert recorder.ACTIVE == routes.LISTENERS == []


def test_attention_in_other_threads_is_seen_and_torchs_function_is_not():
    stock, routed = stock_model(), routed_model()
    with attnroute.trace() as trace:
        thread = threading.Thread(target=lambda: (stock(tokens()), routed(tokens())))
        thread.start()
        thread.join()
    assert [call.count for call in trace.calls] == [2]
    assert trace.stock == ()


def test_a_trace_that_is_left_in_another_thread_says_so():
    trace, errors = attnroute.trace(), []
    trace.__enter__()

    def leave():
        try:
            trace.__exit__()
        except attnroute.OverrideError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "trace() requires a block to be left in the thread" in errors[0]
    with attnroute.trace():
        pass
    torch.overrides._pop_mode()
    assert recorder.ACTIVE == routes.LISTENERS == []


def test_a_decorated_function_is_recorded_at_each_call():
    block, model = attnroute.trace(), stock_model()

    @block
    def step():
        model(tokens())

    step()
    step()
    model(tokens())
    assert [call.count for call in block.stock] == [4]


def test_what_finds_no_room_is_counted(monkeypatch):
    monkeypatch.setattr(recorder, "KINDS_KEPT", 1)
    monkeypatch.setattr(recorder, "PLACES_KEPT", 1)
    model = stock_model()
    with attnroute.trace() as trace:
        model(tokens())
        for seqlen in (21, 22):
            model(tokens(seqlen))
    assert (places(trace.stock), trace.recording.left_out) == ([("Model", "layers.0.attn", 1, 0)], 5)
    assert "5 calls of further kinds found no room" in str(trace)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_a_trace_ends_no_program_that_has_a_causal_bias_of_torch(bias, compiled):
    def call(query):
        return F.scaled_dot_product_attention(query, query, query, bias(8, 8))

    query = torch.randn(2, 4, 8, 16)
    torch.compiler.reset()
    code = torch.compile(call, backend="aot_eager") if compiled else call
    with attnroute.trace():
        got = code(query)
    torch.testing.assert_close(got, call(query))
