"""Sinks on the CUDA kernels: what their forward and backward operators are given, held against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import backwards
from support.cuda_operators import CudaOperators, Launches, weights_kept
from support.fused_standins import Standins
from support.reference import attend
from support.repair_inputs import executor_of, inputs_of, lowered
from support.sink_cases import CASES, DENSE, EMPTY_ROWS, plan

from attnroute import masks
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.prepare.bound import bind
from attnroute.executors.prepare.sink import may_be_empty
from attnroute.masks.lowered.form import LoweredMask


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def prepared(mask, made, sizes, **rest):
    inputs = inputs_of(**{"seqlen_q": 9, "seqlen_kv": 9, **sizes}, **rest)
    inputs.sink = torch.randn(4)
    if mask is not None:
        inputs.mask = lowered(mask, inputs)
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.sink):
        tensor.requires_grad_()
    return inputs, ("sink_from_lse", *made)


def wanted(inputs, mask, kept=None):
    """Return output, log-sum-exp and the tensors that train; `kept` multiplies the weights."""
    allowed = None
    if mask is not None:
        batch, heads, seqlen_q, _ = inputs.query.shape
        allowed = mask.materialize(seqlen_q, inputs.key.shape[2], batch=batch, num_heads_q=heads)
    tensors = [inputs.query, inputs.key, inputs.value, inputs.sink]
    if kept is None:
        return *attend(*tensors[:3], allowed=allowed, bias=inputs.bias, sink=inputs.sink), tensors
    seqlen_kv, heads_kv = inputs.key.shape[2], inputs.key.shape[1]
    one = torch.eye(seqlen_kv).expand(inputs.query.shape[0], heads_kv, seqlen_kv, seqlen_kv)
    weights, lse = attend(inputs.query, inputs.key, one, allowed=allowed, bias=inputs.bias, sink=inputs.sink)
    value = inputs.value.double().repeat_interleave(inputs.query.shape[1] // heads_kv, 1)
    return weights * kept @ value, lse, tensors


def hold(found, want, tensors):
    (out, lse), (want_out, want_lse) = found, want
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, cotangent, retain_graph=True)
    for got, expected in zip(grads, torch.autograd.grad(want_out, tensors, cotangent.double()), strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_those_of_a_softmax_with_a_sink(case):
    backend, operators, mask, made, sizes = CASES[case]
    inputs, made = prepared(mask, made, sizes)
    *want, tensors = wanted(replace(inputs), mask)
    with CudaOperators() as mode:
        found = run_repaired(executor_of(backend), inputs, plan(backend, made))
        hold(found, want, tensors)
    assert tuple(mode.seen) == operators


@pytest.mark.parametrize("case", ["flash documents", "flash causal documents", "flash documents, window"])
def test_older_kernels_pad_the_log_sum_exp_of_documents(case):
    backend, _, mask, made, sizes = CASES[case]
    inputs, made = prepared(mask, made, sizes)
    *want, tensors = wanted(replace(inputs), mask)
    with CudaOperators(padded=True):
        hold(run_repaired(executor_of(backend), inputs, plan(backend, made)), want, tensors)


@pytest.mark.parametrize("case", CASES)
def test_without_a_gradient_only_the_forward_runs(case, monkeypatch):
    backend, operators, mask, made, sizes = CASES[case]
    inputs, made = prepared(mask, made, sizes)
    want, want_lse, _ = wanted(replace(inputs), mask)
    monkeypatch.delattr("attnroute.executors.prepare.sink._WithSink")
    with CudaOperators() as mode, torch.no_grad():
        out, lse = run_repaired(executor_of(backend), inputs, plan(backend, made, training=False))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert mode.seen == [operators[0]]


@pytest.mark.parametrize(
    "case",
    ["flash causal", "flash window", "flash documents", "cudnn mask", "efficient mask", "efficient corner"],
)
def test_dropped_weights_are_the_same_in_the_backward(case):
    backend, operators, mask, made, sizes = CASES[case]
    inputs, made = prepared(mask, made, sizes, dropout_p=0.3)
    places = (*inputs.query.shape[:3], inputs.key.shape[2])
    if "to_varlen" in made:
        inputs, made = prepared(mask, made[1:], {**sizes, "batch": 1}, dropout_p=0.3)
        places = (1, *places[1:])
    torch.manual_seed(5)
    kept = weights_kept(places, 0.3, torch.randint(2**31, (2,))[0])
    assert 0 < (kept == 0).sum() < kept.numel()
    *want, tensors = wanted(replace(inputs), mask, kept)
    torch.manual_seed(5)
    with CudaOperators() as mode:
        found = run_repaired(executor_of(backend), inputs, plan(backend, made))
        hold(found, want, tensors)
    assert tuple(mode.seen) == operators


@pytest.mark.parametrize("shape", [(9, 9), (1, 4, 9, 9), (2, 1, 1, 9)], ids=str)
def test_a_bias_of_efficient_gets_its_gradient(shape):
    inputs, made = prepared(masks.Causal(), ("expand_kv", *DENSE), {})
    inputs.bias = torch.randn(shape, requires_grad=True)
    *want, tensors = wanted(replace(inputs), masks.Causal())
    with CudaOperators():
        found = run_repaired(executor_of("efficient"), inputs, plan("efficient", made))
        hold(found, want, [*tensors, inputs.bias])


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_no_key_and_no_sink_is_nothing(backend):
    """Where a row has no key and the sink is -inf as well, nothing is left, and every gradient is 0 there."""
    inputs, made = prepared(EMPTY_ROWS, ("expand_kv", *DENSE), {})
    inputs.sink = torch.tensor([-math.inf, 0.5, -math.inf, 2.0], requires_grad=True)
    *want, tensors = wanted(replace(inputs), EMPTY_ROWS)
    with CudaOperators():
        out, lse = run_repaired(executor_of(backend), inputs, plan(backend, made))
        hold((out, lse), want, tensors[:3])
        (grad,) = torch.autograd.grad(out.sum(), inputs.sink)
    assert (lse == -math.inf).any()
    assert (grad == 0).tolist() == [True, False, True, False]


@pytest.fixture(params=["operators", "kernels"])
def steps(request, monkeypatch):
    """The correction in operators of torch, and in what stands in for kernels of ours."""
    if request.param == "kernels":
        standins = Standins(monkeypatch)
        yield standins
        assert standins.seen
    else:
        yield None


def bound(backend, *, train, mask=None, seqlen_kv=32):
    inputs = inputs_of(heads_kv=4, seqlen_q=32, seqlen_kv=seqlen_kv)
    inputs.sink = torch.randn(4)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.sink)
    for tensor in tensors:
        tensor.requires_grad_(train)
    if mask is not None:
        inputs.mask = lowered(mask, inputs)
    run = bind(
        executor_of(backend),
        inputs,
        plan(backend, ("sink_from_lse",), training=train, return_lse=False),
        None,
    )
    return tensors, lambda: run(*tensors[:3], None, tensors[3])


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_a_sink_takes_three_operators_beside_the_kernel(backend):
    """A call that is not large waits for the host, which each of them keeps for some microseconds."""
    _, run = bound(backend, train=False)
    with CudaOperators(), Launches() as launches:
        run()
    kernel, *rest = launches.seen
    assert backend in kernel
    assert rest == ["sub_", "sigmoid_", "mul_"]


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_a_trained_sink_takes_four_operators_before_and_four_behind(backend):
    """The kernel's own backward reads output and log-sum-exp with the sink in them."""
    tensors, run = bound(backend, train=True)
    with CudaOperators(), Launches() as launches:
        out = run()
        assert launches.seen[1:] == ["sub", "sigmoid", "mul_", "logaddexp"]
        grad = torch.randn_like(out)
        launches.seen.clear()
        torch.autograd.grad(out, tensors, grad)
    *rest, kernel = launches.seen
    assert backend in kernel
    assert rest == ["softplus_backward", "mul_", "sum", "neg_"]


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_where_triton_compiles_a_sink_takes_one_launch(backend, monkeypatch):
    standins = Standins(monkeypatch)
    tensors, run = bound(backend, train=False)
    want, _ = attend(*tensors[:3], sink=tensors[3])
    with CudaOperators(), Launches() as launches:
        out = run()
    assert standins.seen == ["shrink"]
    assert [name for name in launches.seen if "attention" in name] == launches.seen[:1]
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_where_triton_compiles_a_trained_sink_takes_one_launch_each_way(backend, monkeypatch):
    standins = Standins(monkeypatch)
    tensors, run = bound(backend, train=True)
    with CudaOperators():
        out = run()
        assert standins.seen == ["shrink and lse"]
        torch.autograd.grad(out, tensors, torch.randn_like(out))
    assert standins.seen == ["shrink and lse", "sink gradient"]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("trained", range(4))
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_one_alone_trains_on_the_short_way(backend, trained):
    tensors, run = bound(backend, train=True)
    want, _ = attend(*tensors[:3], sink=tensors[3])
    (expected,) = torch.autograd.grad(want.square().sum(), tensors[trained])
    for at, tensor in enumerate(tensors):
        tensor.requires_grad_(at == trained)
    with CudaOperators():
        (got,) = torch.autograd.grad(run().square().sum(), tensors[trained])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_a_write_into_the_output_before_the_backward_is_seen(backend):
    tensors, run = bound(backend, train=True)
    with CudaOperators():
        out = run()
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        out = run()
        with torch.no_grad():
            tensors[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("logit", [-200.0, -30.0, 30.0, 200.0, -math.inf])
@pytest.mark.parametrize(
    ("mask", "seqlen_kv"),
    [(None, 32), (masks.Window(3, 0), 32), (masks.Window(1, 0, "bottom_right"), 8)],
    ids=["no mask", "a key for each query", "queries without a key"],
)
def test_any_sink_trains_on_the_short_way(mask, seqlen_kv, logit):
    tensors, run = bound("flash", train=True, mask=mask, seqlen_kv=seqlen_kv)
    with torch.no_grad():
        tensors[3][1:] = logit
    allowed = (
        None if mask is None else mask.materialize(32, seqlen_kv, batch=tensors[0].shape[0], num_heads_q=4)
    )
    want, _ = attend(*tensors[:3], allowed=allowed, sink=tensors[3])
    with CudaOperators():
        out = run()
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
        cotangent = torch.randn_like(out)
        got = torch.autograd.grad(out, tensors, cotangent)
    expected = torch.autograd.grad(want, tensors, cotangent.double())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


BANDS = [
    (low, high) for low in (None, -40, -31, -3, 0, 2) for high in (None, -2, 0, 3, 40) if (low or 0) <= 31
]


@pytest.mark.parametrize(("low", "high"), BANDS)
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
def test_which_bands_leave_a_query_without_a_key(sizes, low, high):
    seqlen_q, seqlen_kv = sizes
    inputs = inputs_of(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    inputs.mask = LoweredMask(band_lo=low, band_hi=high)
    distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None]
    allowed = (distance >= (-99 if low is None else low)) & (distance <= (99 if high is None else high))
    assert may_be_empty(inputs) == (not allowed.any(-1).all())


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_what_autograd_may_ask_of_a_trained_sink(backend):
    tensors, run = bound(backend, train=True)
    with CudaOperators():
        backwards.check_again(run, tensors)
        backwards.check_forms(run, tensors)
