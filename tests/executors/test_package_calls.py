"""The short way to the kernel of a package: the same results, few functions, and no tensor is kept alive."""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cudnn_checks import PADDED, SEQUENCES, inputs_of, plan_of, ragged_request
from support.cudnn_operators import Operators
from support.fa4_package import Package

import attnroute
from attnroute import masks
from attnroute.executors import first_call
from attnroute.executors.packages import cudnn_fe, fa4
from attnroute.executors.packages.cudnn_band import unattended_keys, unattended_queries
from attnroute.executors.packages.external import External
from attnroute.executors.packages.request import Gradients, Launched
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.prepare.bound import bind
from attnroute.masks.kept import keeper_of
from attnroute.memory import reset

OURS = str(Path(attnroute.__file__).parent)
NAMES = ("query", "key", "value")
CLEARED = "padding at the left"
"""The case whose left-out keys are cleared before."""
FORWARD, STEP = 10, 21
"""Functions of attnroute that a forward, and a forward with its backward, may call."""


class Kernel:
    """Gives the value for the output, and the output's gradient for every one."""

    gives_infinity = False

    def forward(self, request):
        shape = (request.query.shape[0], request.query.shape[2], request.query.shape[1])
        return Launched(request.value.clone(), torch.zeros(shape))

    def backward(self, request, result, grad_out):
        return Gradients(grad_out, grad_out, grad_out)


KERNEL = Kernel()
EXTERNAL = External("package_calls_test", KERNEL)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    torch.manual_seed(0)
    made = Package()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    operators = Operators()
    monkeypatch.setattr(cudnn_fe, "_operators", lambda: operators)
    reset()
    yield made
    reset()


def call_of(case, *, training):
    """Return inputs with the keeper of their mask, what owns it, and the repairs."""
    mask, *lengths = (PADDED | SEQUENCES)[case]
    inputs = inputs_of(mask, *lengths)
    inputs = replace(inputs, keeper=None if mask is None else keeper_of(mask))
    if not training:
        inputs.query, inputs.key, inputs.value = (
            t.detach() for t in (inputs.query, inputs.key, inputs.value)
        )
    repairs = ("to_varlen",) if case in SEQUENCES else ()
    return inputs, ("clear_left_out", *repairs) if case == CLEARED else repairs


def functions_called(function):
    count = 0

    def on_event(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "case", ["everything", "causal", "causal window", "documents", "padding", "one query", CLEARED]
)
@pytest.mark.parametrize("executor", [fa4.executor, cudnn_fe.executor], ids=["fa4", "cudnn_fe"])
@pytest.mark.parametrize("outermost", [1, 2], ids=["heads outermost", "tokens outermost"])
@pytest.mark.parametrize("with_sink", ["", "of the kernel", "through the log-sum-exp"])
def test_a_bound_call_gives_what_the_long_way_gives(executor, case, training, outermost, with_sink):
    def drawn(tensor):
        made = torch.randn_like(tensor).transpose(1, outermost).contiguous().transpose(1, outermost)
        return made.requires_grad_(training)

    inputs, repairs = call_of(case, training=training)
    if with_sink == "through the log-sum-exp":
        repairs = ("sink_from_lse", *repairs)
    inputs = replace(inputs, query=drawn(inputs.query), key=drawn(inputs.key), value=drawn(inputs.value))
    inputs = replace(inputs, sink=torch.randn(4) if with_sink else None)
    plan = replace(plan_of("package", *repairs, training=training), return_lse=False)
    bound = bind(executor, replace(inputs), plan, None)
    if training and "sink_from_lse" in repairs and "to_varlen" in repairs:
        # Its backward needs the mask, which what is bound keeps no longer than the mask lives.
        assert bound is None
        return
    for _ in range(2):
        given = [drawn(t) for t in (inputs.query, inputs.key, inputs.value)]
        sinks = [torch.randn(4).requires_grad_(training)] if with_sink else []
        again = dict(zip((*NAMES, "sink"), given + sinks, strict=False))
        want, _ = run_repaired(executor, replace(inputs, **again), plan)
        got = bound(*given, None, *sinks)
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
        if training:
            grad = torch.randn_like(want)
            wanted = torch.autograd.grad(want, given + sinks, grad)
            assert all(map(torch.equal, torch.autograd.grad(got, given + sinks, grad), wanted))


def test_it_keeps_no_tensor_alive_and_ends_with_its_prefix_sums(package):
    lengths = torch.tensor([9, 4])
    mask = masks.KeyPadding(lengths=lengths)
    inputs = inputs_of(mask, 6, 9)
    inputs = replace(inputs, keeper=keeper_of(mask))
    plan = replace(plan_of("fa4", "to_varlen", training=False), return_lse=False)
    given = [t.detach() for t in (inputs.query, inputs.key, inputs.value)]
    with torch.no_grad():
        bound = bind(fa4.executor, inputs, plan, mask)
    assert bound(*given, None) is not None
    seen = [weakref.ref(t) for t in (lengths, inputs.query, inputs.key, inputs.value)]
    del lengths, mask, inputs
    package.calls.clear()
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    assert bound(*given, None) is None


def test_a_refusal_sends_it_the_long_way(monkeypatch):
    inputs, _ = call_of("causal", training=False)
    plan = replace(plan_of("package_calls_test", training=False), return_lse=False)
    bound = bind(EXTERNAL.executor, inputs, plan, None)
    tensors = (inputs.query, inputs.key, inputs.value)
    assert bound(*tensors, None) is not None

    def refuse(_):
        msg = "the package refuses"
        raise ValueError(msg)

    monkeypatch.setattr(KERNEL, "forward", refuse, raising=False)
    assert bound(*tensors, None) is None


@pytest.mark.parametrize("change", [{"alibi_slopes": torch.ones(4)}, {"dropout_p": 0.1}])
def test_what_has_more_tensors_or_chance_is_bound_by_no_package(change):
    inputs, _ = call_of("causal", training=False)
    plan = replace(plan_of("fa4", training=False), return_lse=False)
    assert fa4.executor.bind(replace(inputs, **change), plan) is None


def test_few_functions_stand_before_a_kernel():
    inputs, _ = call_of("causal", training=True)
    tensors = [torch.randn(2, 4, 9, 8).requires_grad_() for _ in range(3)]
    grad = torch.randn(2, 4, 9, 8)
    of_training, of_inference = (
        bind(EXTERNAL.executor, replace(inputs), replace(plan_of("t", training=on), return_lse=False), None)
        for on in (True, False)
    )

    def step():
        torch.autograd.grad(of_training(*tensors, None), tensors, grad)

    for _ in range(2):
        step()
        with torch.no_grad():
            of_inference(*tensors, None)
    with torch.no_grad():
        assert functions_called(lambda: of_inference(*tensors, None)) <= FORWARD
    assert functions_called(step) <= STEP


def test_a_package_that_compiles_costs_no_more_once_it_did(monkeypatch):
    monkeypatch.setattr(first_call, "_LISTENERS", {})
    inputs, _ = call_of("causal", training=True)
    tensors = [torch.randn(2, 4, 9, 8).requires_grad_() for _ in range(3)]
    plan = replace(plan_of("t", training=True), return_lse=False)
    run = bind(EXTERNAL.executor, replace(inputs), plan, None)

    def step():
        torch.autograd.grad(run(*tensors, None).sum(), tensors)

    for _ in range(2):
        step()
    silent = functions_called(step)
    first_call.listen("package_calls_test", lambda *_: None)
    step()
    assert functions_called(step) == silent


@pytest.mark.parametrize("case", ["causal", "documents"])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("executor", [EXTERNAL.executor, cudnn_fe.executor], ids=["fake", "cudnn_fe"])
def test_a_call_is_one_node_and_its_output_may_be_written(executor, bound, case):
    inputs, repairs = call_of(case, training=True)
    leaves = [t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    inputs = replace(inputs, query=leaves[0], key=leaves[1], value=leaves[2])
    plan = replace(plan_of("package", *repairs, training=True), return_lse=False)
    run = bind(executor, replace(inputs), plan, None)
    out = run(*leaves, None) if bound else run_repaired(executor, inputs, plan)[0]
    grads = [node.variable for node, _ in out.grad_fn.next_functions if node is not None]
    assert len(grads) == len(leaves)
    assert all(map(operator.is_, grads, leaves))
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_output_that_the_package_made_a_view_may_be_written():
    inputs, _ = call_of("causal", training=True)
    leaves = [t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    run = bind(fa4.executor, replace(inputs), replace(plan_of("fa4", training=True), return_lse=False), None)
    wanted = torch.autograd.grad(run(*leaves, None).sum() * 2.0, leaves)
    assert all(map(torch.equal, torch.autograd.grad(run(*leaves, None).mul_(2.0).sum(), leaves), wanted))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("case", ["causal", "padding"])
def test_what_is_saved_goes_where_hooks_bring_it(package, case, bound):
    inputs, repairs = call_of(case, training=True)
    leaves = [t.detach() for t in (inputs.query, inputs.key, inputs.value)]
    plan = replace(plan_of("fa4", *repairs, training=True), return_lse=False)
    run = bind(fa4.executor, replace(inputs), plan, None)
    tensors = [t.requires_grad_() * 1.0 for t in leaves]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        out = (
            run(*tensors, None)
            if bound
            else run_repaired(fa4.executor, replace(inputs, **dict(zip(NAMES, tensors, strict=True))), plan)[
                0
            ]
        )
    seen = [weakref.ref(t) for t in tensors]
    del tensors
    package.calls.clear()
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    assert all(t is not None for t in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(
    ("left", "right", "may"), [(None, None, False), (None, 0, False), (2, 1, False), (3, -1, True)]
)
def test_tokens_of_self_attention_attend_themselves(left, right, may):
    request = ragged_request(left=left, right=right)
    ours = request._replace(cu_seqlens_kv=request.cu_seqlens_q, key=request.query, value=request.query)
    assert ours.may_leave_rows_empty is may
    assert bool(unattended_queries(ours).any() | unattended_keys(ours).any()) is may
    assert ours._replace(used_kv=torch.ones(6, dtype=torch.int32)).may_leave_rows_empty
    assert request.may_leave_rows_empty
