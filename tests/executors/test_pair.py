"""A kernel's forward with chunked's backward: what runs, and whether it is the attention of the definition.

The kernel is CUDNN_FE with the package's operators written in float64, which are asked for forwards alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cudnn_checks
from support.chunked_reference import allowed as allowed_by
from support.cudnn_checks import PADDED, SEQUENCES, allowed_of, hold, inputs_of, plan_of, sinks, trained
from support.pair_runs import FORWARD, NAMES, PAIR, check, pair, refuse, wanted, watched, with_forward
from support.reference import TOLERANCE, attend, error
from support.repair_inputs import lowered, stored
from support.spy import Spy
from torch.utils.checkpoint import checkpoint

from attnroute import masks
from attnroute.errors import KernelRefusedError
from attnroute.executors.aten import flash
from attnroute.executors.chunked import from_lse
from attnroute.executors.packages import cudnn_fe
from attnroute.executors.prepare import apply as repairs
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import ForwardResult, Inputs
from attnroute.memory import reset


@pytest.fixture
def package():
    with watched() as made:
        yield made
    reset()


# Beside each preparation.


@pytest.mark.parametrize("sink", ["none", "own", "sink_from_lse"])
@pytest.mark.parametrize("shift", cudnn_checks.ADVERSARIAL)
@pytest.mark.parametrize("case", PADDED)
def test_padded_batches(package, case, shift, sink):
    mask, *lengths = PADDED[case]
    inputs = inputs_of(mask, *lengths, shift=shift, sink=None if sink == "none" else sinks())
    check(package, mask, inputs, *(("sink_from_lse",) if sink == "sink_from_lse" else ()))
    assert (package.forward.get("sinks") is not None) == (sink == "own")


@pytest.mark.parametrize("sink", ["none", "own", "sink_from_lse"])
@pytest.mark.parametrize("case", SEQUENCES)
def test_rows_as_sequences(package, case, sink):
    mask, *lengths = SEQUENCES[case]
    made = ("to_varlen", "sink_from_lse") if sink == "sink_from_lse" else ("to_varlen",)
    check(package, mask, inputs_of(mask, *lengths, sink=None if sink == "none" else sinks()), *made)
    assert (package.forward.get("sinks") is not None) == (sink == "own")
    assert package.forward["cu_seqlens_q"] is not None


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("case", ["padding", "padding at the left"])
def test_what_padding_leaves_out_holds_nan(package, case, cleared):
    """The forward's sequences keep it out; chunked's backward reads the whole rows."""
    mask, *lengths = SEQUENCES[case]
    inputs = inputs_of(mask, *lengths)
    left_out = ~allowed_of(mask, inputs)[:, :1, :1].transpose(2, 3)
    with torch.no_grad():
        for tensor in (inputs.key, inputs.value):
            tensor.masked_fill_(left_out, math.nan)
    out, _ = pair(inputs, *(("clear_left_out",) if cleared else ()), "to_varlen")
    grads = torch.autograd.grad(out, trained(inputs), torch.ones_like(out))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads) == cleared


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(package, band, with_sink):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band, sink=sinks() if with_sink else None)
    check(package, mask, inputs, "to_varlen")


DOCUMENTS = {name: mask for name, (mask, *lengths) in SEQUENCES.items() if 1 not in lengths}
COPIES = ("sink_from_lse", "expand_kv", "pad_head_dim", "contiguous")


def narrow(name, dims, form, dtype):
    """Return a mask and inputs of heads that are no multiples of 8."""
    mask = {"none": None, "window": masks.Window(3, 1), **DOCUMENTS}[name]
    seqlen_q = SEQUENCES[name][1] if name in SEQUENCES else 9
    shapes = ((4, seqlen_q, dims[0]), (2, 9, dims[0]), (2, 9, dims[1]))
    tensors = [stored(torch.randn(2, *s).to(dtype), form).detach().requires_grad_() for s in shapes]
    inputs = Inputs(*tensors, sink=sinks())
    return mask, inputs if mask is None else replace(inputs, mask=lowered(mask, inputs))


@given(
    st.sampled_from(["none", "window", *DOCUMENTS]),
    st.lists(st.sampled_from(COPIES), unique=True),
    st.sampled_from([(5, 3), (8, 5), (3, 8)]),
    st.sampled_from(cudnn_checks.FORMS),
)
@settings(max_examples=40)
def test_any_preparations_together(name, copies, dims, form):
    mask, inputs = narrow(name, dims, form, torch.float64)
    made = (*(("to_varlen",) if name in DOCUMENTS else ()), *copies)
    with watched() as package:
        check(package, mask, inputs, *made)
    passed = package.forward
    assert (passed["q"].shape[1] == passed["k"].shape[1]) == ("expand_kv" in copies)
    assert (passed.get("sinks") is None) == ("sink_from_lse" in copies)
    assert passed["q"].shape[-1] == (8 if "pad_head_dim" in copies else dims[0])
    assert passed["attn_scale"] == pytest.approx(dims[0] ** -0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["window", "causal documents"])
def test_narrower_dtypes(package, name, dtype):
    mask, inputs = narrow(name, (5, 3), "bshd", dtype)
    wide = replace(inputs, **{n: getattr(inputs, n).detach().double().requires_grad_() for n in NAMES})
    want, _ = wanted(mask, wide)
    out, _ = pair(inputs, *COPIES, *(("to_varlen",) if name in DOCUMENTS else ()))
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, trained(inputs), cotangent)
    assert out.dtype == dtype
    assert error(out, want) <= TOLERANCE[dtype]
    expected = torch.autograd.grad(want, trained(wide), cotangent.double())
    for tensor, got, true in zip(trained(inputs), grads, expected, strict=True):
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert error(got, true, floor=2.0) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("made", [("split_batch",), ("split_heads",), ("split_batch", "split_heads")])
def test_pieces(package, monkeypatch, made):
    monkeypatch.setattr(repairs, "GRID_LIMIT", 2)
    inputs = inputs_of(masks.Causal(), 5, 5, batch=4, sink=sinks())
    hold(pair(inputs, "sink_from_lse", *made), wanted(masks.Causal(), inputs), trained(inputs))
    assert package.names == FORWARD * 2 ** len(made)
    assert len(package.asked) == 2 ** len(made)


# What is asked for, and what is kept.


def test_the_log_sum_exp_carries_no_gradient(package):
    inputs = inputs_of(None, 5, 7)
    out, lse = pair(inputs)
    assert (out.requires_grad, lse.requires_grad, lse.dtype) == (True, False, torch.float32)
    plan = replace(plan_of("cudnn_fe", PAIR), return_lse=False)
    assert run_repaired(cudnn_fe.executor, inputs, plan)[1] is None


def test_a_second_derivative_is_refused(package):
    inputs = inputs_of(None, 5, 7)
    (grad,) = torch.autograd.grad(pair(inputs)[0].square().sum(), inputs.query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("made", [(), ("sink_from_lse",)], ids=str)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)], ids=str)
def test_only_gradients_that_are_wanted_are_computed(package, which, made):
    inputs = inputs_of(masks.Causal(), 7, 7, sink=sinks())
    every = torch.autograd.grad(pair(inputs, *made)[0].sum(), trained(inputs))
    few = {n: getattr(inputs, n).detach().requires_grad_(i in which) for i, n in enumerate(NAMES)}
    package.asked.clear()
    pair(replace(inputs, **few), *made)[0].sum().backward()
    assert package.asked == [tuple(i in which for i in range(4))]
    for number, name in enumerate(NAMES):
        grad = few[name].grad
        assert torch.equal(grad, every[number]) if number in which else grad is None


def test_the_kernel_is_run_as_for_inference(package):
    """Its own backward never runs, so that it need keep nothing for one."""
    plans, forward = [], cudnn_fe.executor.pair.forward
    spied = lambda i, p: plans.append((p, torch.is_grad_enabled())) or forward(i, p)  # noqa: E731
    plan = plan_of("cudnn_fe", PAIR, deterministic=True, options=(("tile", 64),))
    out, _ = run_repaired(with_forward(spied), inputs_of(None, 5, 7), replace(plan, return_lse=False))
    assert out.requires_grad
    assert plans == [(replace(plan, training=False, return_lse=True), False)]


@pytest.mark.parametrize("training", [False, True])
def test_other_calls_never_come_here(package, monkeypatch, training):
    monkeypatch.delattr(repairs, "run_pair")
    monkeypatch.delattr(from_lse, "gradients")
    inputs = inputs_of(masks.Causal(), 7, 7)
    plan = plan_of("cudnn_fe", training=training)
    with torch.set_grad_enabled(training):
        out, _ = run_repaired(cudnn_fe.executor, inputs, plan)
    torch.testing.assert_close(out, wanted(masks.Causal(), inputs)[0], rtol=1e-5, atol=1e-6)
    if training:
        out.sum().backward()
    assert package.names == (["sdpa_fwd", "sdpa_bwd"] if training else FORWARD)


def test_without_gradients_the_forward_runs_alone(package):
    inputs = inputs_of(masks.Causal(), 7, 7, sink=sinks())
    with torch.no_grad():
        out, lse = pair(inputs, "sink_from_lse")
    want, want_lse = wanted(masks.Causal(), inputs)
    torch.testing.assert_close(out, want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=1e-5, atol=1e-5)
    assert (out.requires_grad, package.names, package.asked) == (False, FORWARD, [])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(package, reentrant):
    inputs = inputs_of(masks.Causal(), 7, 7, sink=sinks())
    tensors = trained(inputs)
    cotangent = torch.randn_like(inputs.query)

    def run(query, key, value, sink):
        return pair(Inputs(query, key, value, inputs.mask, sink=sink), "sink_from_lse")[0]

    plain = torch.autograd.grad(run(*tensors), tensors, cotangent)
    package.calls.clear()
    checkpoint(run, *tensors, use_reentrant=reentrant).backward(cotangent)
    assert package.names == FORWARD * 2
    assert all(torch.equal(t.grad, grad) for t, grad in zip(tensors, plain, strict=True))


def test_what_is_kept_for_the_backward_can_be_put_elsewhere(package):
    inputs = inputs_of(masks.Causal(), 7, 7, sink=sinks())
    want = torch.autograd.grad(pair(inputs)[0].sum(), trained(inputs))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):
        out, _ = pair(inputs)
    found = torch.autograd.grad(out.sum(), trained(inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert [tuple(t.shape) for t in kept] == [tuple(t.shape) for t in (*trained(inputs), out, out[..., 0])]


@pytest.mark.parametrize("name", [*NAMES, "out"])
def test_a_tensor_that_was_changed_in_between_is_noticed(package, name):
    inputs = inputs_of(None, 5, 7, sink=sinks())
    out, _ = pair(inputs)
    with torch.no_grad():
        (out if name == "out" else getattr(inputs, name)).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# Other kernels, refusals and graphs.


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=str)
def test_softcap_and_slopes_are_those_of_both(package, slopes, softcap, nothing):
    """The kernel is the definition, with either infinity in rows with no key."""

    def forward(given, plan):
        extras = {n: getattr(given, n) for n in ("scale", "softcap", "alibi_slopes", "sink")}
        allowed = allowed_by(given.mask, (2, 4, 9, 6))
        out, lse = attend(given.query, given.key, given.value, allowed=allowed, **extras)
        return ForwardResult(out, lse.masked_fill(lse == -math.inf, nothing).float())

    mask = masks.Window(2, 1, "bottom_right")
    extras = {"softcap": softcap, "alibi_slopes": slopes and torch.rand(slopes).double(), "scale": 0.6}
    inputs = inputs_of(mask, 9, 6, sink=sinks(), **extras)
    out, lse = pair(inputs, executor=with_forward(forward))
    tensors = (inputs.query, inputs.key, inputs.value)
    want = attend(*tensors, allowed=allowed_of(mask, inputs), sink=inputs.sink, **extras)
    assert (lse == nothing).any()
    hold((out, lse.masked_fill(lse == math.inf, -math.inf)), want, trained(inputs))


@pytest.mark.parametrize("made", [(), ("sink_from_lse",)], ids=str)
def test_a_kernel_of_torch(made):
    """The CPU's flash kernel has a backward of its own, which does not run."""
    torch.manual_seed(0)
    inputs = inputs_of(masks.Causal(), 7, 7, dtype=torch.float32, sink=sinks() if made else None)
    want = wanted(masks.Causal(), inputs)
    plan = replace(plan_of("flash", PAIR, "expand_kv", *made), device_type="cpu")
    with Spy() as spy:
        hold(run_repaired(flash.executor, replace(inputs), plan), want, trained(inputs))
    assert spy.seen.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 1
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" not in spy.seen


def test_a_mask_that_was_made_a_tensor():
    """The kernel reads the tensor where chunked reads the mask."""
    torch.manual_seed(0)
    mask = masks.KeyPadding(lengths=[9, 3])
    inputs = inputs_of(mask, 6, 9, dtype=torch.float32)
    plan = replace(plan_of("flash", PAIR, "materialize_mask", "expand_kv", "cast_mask"), device_type="cpu")
    hold(run_repaired(flash.executor, replace(inputs), plan), wanted(mask, inputs), trained(inputs))


@pytest.mark.parametrize("may_reroute", [False, True])
def test_a_refusal_is_the_callers(package, monkeypatch, may_reroute):
    """Nothing was launched yet, so that another backend can take the call."""
    monkeypatch.setattr(package, "sdpa_fwd", refuse)
    with pytest.raises(KernelRefusedError, match="head_dim 512 is not supported"):
        pair(inputs_of(None, 5, 7), may_reroute=may_reroute)
    assert package.asked == []


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(package, repairs):
    cudnn_checks.check_backwards(cudnn_fe.executor, "cudnn_fe", PAIR, *repairs)
