"""The short way of CUDA kernels: it runs what the long way runs, and few Python functions of ours."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from support.cuda_operators import CudaOperators, Launches
from support.repair_inputs import executor_of, inputs_of, lowered, stored
from support.sink_cases import CASES, DENSE, PADDING, plan
from torch.nn.attention import SDPBackend

from attnroute import masks
from attnroute.executors.aten import handover
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.prepare.bound import bind
from attnroute.masks.kept import keeper_of

OF_TORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BELOW = masks.Dense(torch.ones(9, 9, dtype=torch.bool).tril())
FINITE = masks.KeyPadding(lengths=[9, 4], finite=True)
MORE = {
    "flash, left window": ("flash", None, masks.Window(2, None, "bottom_right"), (), {}),
    "cudnn mask alone": ("cudnn", None, BELOW, DENSE, {}),
    "cudnn padding": ("cudnn", None, FINITE, DENSE, {}),
    "cudnn, cleared": ("cudnn", None, PADDING, ("clear_left_out", *DENSE, "zero_empty_rows"), {}),
    "efficient alone": ("efficient", None, None, (), {"heads_kv": 4}),
    "efficient causal alone": ("efficient", None, masks.Causal(), (), {"heads_kv": 4}),
    "efficient mask alone": ("efficient", None, BELOW, DENSE, {"heads_kv": 4}),
    "efficient corner alone": (
        "efficient",
        None,
        masks.Causal("bottom_right"),
        (),
        {"heads_kv": 4, "seqlen_q": 5},
    ),
}
NONE_YET = ("expand_kv", "pad_head_dim")
"""Calls with such repairs go the long way."""
BOUND = {
    name: case
    for name, case in {**CASES, **MORE}.items()
    if not set(case[3]) & set(NONE_YET) and not (name.startswith("cudnn") and case[2] is PADDING)
} | {"cudnn, cleared": MORE["cudnn, cleared"]}


def made(name, *, sink=False, train=False, form="packed", scale=None):
    """Return the executor, what makes inputs anew, the plan, and the mask that the user gave."""
    backend, _, mask, repairs, sizes = BOUND[name]
    sizes = {"seqlen_q": 9, "seqlen_kv": 9, **sizes}
    repairs = ("sink_from_lse", *repairs) if sink else repairs

    def fresh():
        inputs = inputs_of(**sizes, scale=scale)
        inputs.query, inputs.key, inputs.value = (
            stored(t, form).requires_grad_(train) for t in (inputs.query, inputs.key, inputs.value)
        )
        inputs.sink = torch.randn(4, requires_grad=train) if sink else None
        if mask is not None:
            inputs.mask, inputs.keeper = lowered(mask, inputs), keeper_of(mask)
        return inputs

    return executor_of(backend), fresh, plan(backend, repairs, training=train, return_lse=False), mask


def passed(inputs, given):
    tensors = (inputs.query, inputs.key, inputs.value, given)
    return tensors if inputs.sink is None else (*tensors, inputs.sink)


def select(monkeypatch, choice):
    """Make torch's function select a kernel, and note that it ran; it runs what the operator would."""
    ran = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: choice)
    operators = {
        SDPBackend.FLASH_ATTENTION.value: lambda q, k, v, _, dropout_p, causal, scale: (
            torch._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, False, scale=scale)
        ),
        SDPBackend.CUDNN_ATTENTION.value: lambda q, k, v, attn, dropout_p, causal, scale: (
            torch._scaled_dot_product_cudnn_attention(
                q, k, v, attn, True, dropout_p, causal, False, scale=scale
            )
        ),
        SDPBackend.EFFICIENT_ATTENTION.value: lambda q, k, v, attn, dropout_p, causal, scale: (
            torch._scaled_dot_product_efficient_attention(
                q,
                k,
                v,
                attn if attn is None else attn.expand(*q.shape[:3], -1),
                True,
                dropout_p,
                causal,
                scale=scale,
            )
        ),
    }

    def attention(query, key, value, attn, *, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        ran.append(attn)
        return operators[choice](query, key, value, attn, dropout_p, is_causal, scale)[0]

    monkeypatch.setattr(handover, "_attention", attention)
    return ran


@pytest.mark.parametrize("form", ["packed", "bshd"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("selects", [True, False], ids=["torch selects it", "torch selects another"])
def test_it_runs_what_the_long_way_runs(name, train, sink, form, selects, monkeypatch):
    backend = BOUND[name][0]
    executor, fresh, how, given = made(name, sink=sink, train=train, form=form)
    ran = select(monkeypatch, OF_TORCH[backend].value if selects else -1)
    with CudaOperators() as mode:
        run = bind(executor, fresh(), how, given)
        if sink and "to_varlen" in how.repairs:
            # A sink is added on the long way, from the log-sum-exp that the short one does not return.
            assert run is None
            return
        for _ in range(2):
            inputs = fresh()
            tensors = [t for t in (inputs.query, inputs.key, inputs.value, inputs.sink) if t is not None]
            mode.seen.clear()
            got, operators = run(*passed(inputs, given)), list(mode.seen)
            mode.seen.clear()
            want = run_repaired(executor, inputs, how)[0]
            assert operators == mode.seen
            torch.testing.assert_close(got, want)
            if train:
                for grad in (torch.randn_like(want), torch.randn(2, 9, 4, 8).transpose(1, 2)):
                    if grad.shape == want.shape:
                        grads = [
                            torch.autograd.grad(o, tensors, grad, retain_graph=True) for o in (got, want)
                        ]
                        torch.testing.assert_close(*grads, equal_nan=True)
    if not selects or sink:
        assert not ran


@pytest.mark.parametrize("name", ["flash, left window", "flash window", "efficient corner alone"])
def test_a_band_that_torch_has_no_argument_for_is_not_handed_over(name, monkeypatch):
    executor, fresh, how, given = made(name)
    ran = select(monkeypatch, OF_TORCH[BOUND[name][0]].value)
    with CudaOperators():
        bind(executor, fresh(), how, given)(*passed(fresh(), given))
    assert not ran


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient alone", "cudnn mask alone"])
def test_a_kernel_that_torch_selects_is_handed_over(name, monkeypatch):
    executor, fresh, how, given = made(name, scale=0.5)
    ran = select(monkeypatch, OF_TORCH[BOUND[name][0]].value)
    with CudaOperators():
        bind(executor, fresh(), how, given)(*passed(fresh(), given))
        assert len(ran) == 1
        monkeypatch.setattr(handover, "_SWITCHES", (object,))
        bound = bind(executor, fresh(), how, given)
        # The switch says something else in each call.
        bound(*passed(fresh(), given))
    assert len(ran) == 1


def test_packages_and_calls_with_a_bias_for_another_kernel_are_not_bound_in_general():
    inputs = inputs_of(heads_kv=4, alibi_slopes=torch.ones(4))
    assert bind(executor_of("chunked"), inputs, plan("chunked", (), return_lse=False), None) is None


# How much of ours runs.

CALLS = {
    ("flash, a sink", False): (4, 0),
    ("cudnn, a sink", False): (4, 0),
    ("flash window, a sink", False): (5, 0),
    ("cudnn mask alone, a sink", False): (6, 0),
    ("flash", False): (1, 0),
    ("cudnn", False): (1, 0),
    ("efficient alone", False): (1, 0),
    ("cudnn mask alone", False): (3, 0),
    ("flash", True): (5, 2),
    ("cudnn", True): (5, 2),
    ("efficient mask alone", True): (6, 2),
    ("flash padding", False): (5, 0),
    ("flash padding", True): (11, 2),
    ("flash documents", False): (7, 0),
    ("flash padding, one query", False): (4, 0),
}
"""Python functions of a call and of its backward."""


def ours(function, *args):
    """Return what a function returns, and how many functions of attnroute it calls."""
    count = 0

    def on_event(frame, event, _):
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and "attnroute" in name.rpartition("tests")[0] + name.rpartition("tests")[2]

    sys.setprofile(on_event)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return result, count


@pytest.mark.parametrize(("name", "train"), CALLS)
def test_a_call_and_its_backward_run_few_functions(name, train, monkeypatch):
    executor, fresh, how, given = made(name.removesuffix(", a sink"), sink=name.endswith("sink"), train=train)
    select(monkeypatch, -1)
    with CudaOperators():
        run = bind(executor, fresh(), how, given)
        run(*passed(fresh(), given))
        inputs = fresh()
        out, forward = ours(run, *passed(inputs, given))
        assert forward <= CALLS[name, train][0]
        if train:
            grad = torch.randn_like(out)
            _, backward = ours(torch.autograd.grad, out, (inputs.query, inputs.key, inputs.value), grad)
            assert backward <= CALLS[name, train][1]


def test_what_hooks_one_output_hooks_no_other_and_goes_again(monkeypatch):
    executor, fresh, how, given = made("flash", train=True)
    select(monkeypatch, -1)
    with CudaOperators():
        run = bind(executor, fresh(), how, given)
        inputs = [fresh() for _ in range(3)]
        outs = [run(*passed(own, given)) for own in inputs]
        seen = []
        handle = outs[1].register_hook(lambda grad: seen.append(1) or 2 * grad)
        grad = torch.randn_like(outs[0])
        found = [
            torch.autograd.grad(o, i.query, grad, retain_graph=True)[0]
            for o, i in zip(outs, inputs, strict=True)
        ]
        assert seen == [1]
        handle.remove()
        plain = torch.autograd.grad(outs[1], inputs[1].query, grad)[0]
        assert seen == [1]
        torch.testing.assert_close(found[1], 2 * plain)


@pytest.mark.parametrize("train", [False, True])
def test_padding_takes_an_operator_for_each_tensor_that_is_set_right(train, monkeypatch):
    executor, fresh, how, given = made("cudnn, cleared", train=train)
    select(monkeypatch, -1)
    with CudaOperators(), Launches() as launches:
        run = bind(executor, fresh(), how, given)
        inputs = fresh()
        launches.seen.clear()
        run(*passed(inputs, given))
    before, kernel, after = launches.seen[:2], launches.seen[2], launches.seen[3:]
    assert "cudnn" in kernel
    assert before == ["bitwise_and" if train else "where"] * 2
    assert after == ["masked_fill" if train else "masked_fill_"]


@pytest.mark.parametrize("number", [0, 1, 4, 6, 7, 9])
def test_each_switch_that_is_moved_takes_the_call_to_its_own_kernel(number, monkeypatch):
    """Versions of torch have different numbers of them."""
    ran = select(monkeypatch, SDPBackend.EFFICIENT_ATTENTION.value)
    stand = dict.fromkeys(range(number), True) | {"order": [1, 2]}
    monkeypatch.setattr(handover, "_SWITCHES", tuple(partial(stand.get, name) for name in range(number)))
    monkeypatch.setattr(handover, "_ORDER", lambda: list(stand["order"]))
    executor, fresh, how, given = made("efficient alone")
    with CudaOperators():
        run = bind(executor, fresh(), how, given)
        for name, moved in (dict.fromkeys(range(number), False) | {"order": [2, 1]}).items():
            before, stand[name] = stand[name], moved
            ran.clear()
            run(*passed(fresh(), given))
            assert not ran, name
            stand[name] = before
            run(*passed(fresh(), given))
            assert ran, name


def test_what_torch_moves_while_it_selects_is_no_change(monkeypatch):
    """Its first selection in a process puts cuDNN in front, for good."""
    order = ["flash"]
    ran = select(monkeypatch, SDPBackend.EFFICIENT_ATTENTION.value)

    def choose(*_, **__):
        order[0] = "cudnn"
        return SDPBackend.EFFICIENT_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(handover, "_SWITCHES", (lambda: order[0],))
    executor, fresh, how, given = made("efficient alone")
    with CudaOperators():
        run = bind(executor, fresh(), how, given)
        assert run(*passed(fresh(), given)) is not None
        order[0] = "math"
        assert run(*passed(fresh(), given)) is not None
    assert len(ran) == 1
