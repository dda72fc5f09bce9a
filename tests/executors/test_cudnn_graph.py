"""Graphs of the cuDNN frontend that are executed without its operators, on a stand-in for its module."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import cudnn_checks
from support.cudnn_checks import FORMS, PADDED, check, inputs_of
from support.cudnn_operators import Operators
from support.cudnn_torch_op import TorchOp

from attnroute.executors.packages import cudnn_fe, cudnn_graph
from attnroute.executors.protocol import Inputs
from attnroute.memory import remembered, reset

EXECUTOR = cudnn_fe.executor


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    torch.manual_seed(0)
    reset()
    made = Operators()
    monkeypatch.setattr(cudnn_fe, "_operators", lambda: made)
    yield made
    reset()


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made = TorchOp()
    monkeypatch.setattr(cudnn_graph, "_torch_op", lambda: made)
    return made


def sinks():
    return torch.randn(4, dtype=torch.float32).requires_grad_()


@pytest.mark.parametrize("form", ["packed", "bshd", "row gap"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("case", PADDED)
def test_graphs_give_the_definition(operators, package, case, with_sink, form):
    mask, *lengths = PADDED[case]
    if with_sink and lengths[0] > lengths[1]:
        mask = None
    for _ in range(2):
        inputs = inputs_of(mask, *lengths, form=form, sink=sinks() if with_sink else None)
        check(EXECUTOR, "cudnn_fe", mask, inputs)
    assert not operators.calls
    assert [graph.executions for graph in package.graphs] == [2, 2]


@pytest.mark.parametrize("grad_form", FORMS)
@pytest.mark.parametrize("form", ["packed", "bshd"])
def test_a_gradient_may_lie_anywhere(package, operators, form, grad_form):
    inputs = inputs_of(None, 5, 7, form=form)
    tensors = (inputs.query, inputs.key, inputs.value)
    out, _ = EXECUTOR.run(inputs, cudnn_checks.plan_of("cudnn_fe"))
    values = torch.randn(out.shape, dtype=out.dtype)
    wanted = torch.autograd.grad(out, tensors, values, retain_graph=True)
    grad = cudnn_checks.stored(values, grad_form)
    assert all(map(torch.equal, torch.autograd.grad(out, tensors, grad), wanted))
    assert [graph.executions for graph in package.graphs] == [1, 2]
    assert not operators.calls


def test_tensors_that_hooks_brought_back_in_other_memory_get_a_graph_of_their_own(package):
    inputs = inputs_of(None, 5, 7, form="bshd")
    tensors = (inputs.query, inputs.key, inputs.value)
    plan = cudnn_checks.plan_of("cudnn_fe")
    out, _ = EXECUTOR.run(inputs, plan)
    cotangent = torch.randn_like(out)
    wanted = torch.autograd.grad(out, tensors, cotangent)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda kept: kept):
        out, _ = EXECUTOR.run(inputs, plan)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, cotangent), wanted)
    assert [graph.executions for graph in package.graphs] == [2, 1, 1]


@pytest.mark.parametrize("change", ["misaligned", "last stride", "dtype"])
def test_what_the_operator_copies_or_refuses_is_left_to_it(operators, package, change):
    def drawn():
        if change == "misaligned":
            return torch.randn(2 * 4 * 5 * 8 + 1, dtype=torch.float64)[1:].view(2, 4, 5, 8)
        if change == "last stride":
            return torch.randn(2, 4, 5, 16, dtype=torch.float64)[..., ::2]
        return torch.randn(2, 4, 5, 8)

    tensors = [drawn().requires_grad_() for _ in range(3)]
    out, _ = EXECUTOR.run(Inputs(*tensors), cudnn_checks.plan_of("cudnn_fe"))
    out.sum().backward()
    assert [name for name, _ in operators.calls] == ["sdpa_fwd", "sdpa_bwd"]
    assert not any(graph.executions for graph in package.graphs)


@pytest.mark.parametrize("parts", [2, 3], ids=["no order of buffers", "another order of buffers"])
def test_a_release_whose_graphs_are_not_known_runs_its_operators(operators, package, monkeypatch, parts):
    def other(tensors, compute, order):
        return TorchOp._made(package, tensors, compute, order[::-1])[:parts]

    monkeypatch.setattr(package, "_made", other)
    inputs = inputs_of(None, 5, 7)
    check(EXECUTOR, "cudnn_fe", None, inputs)
    assert [name for name, _ in operators.calls] == ["sdpa_fwd", "sdpa_bwd"]


def test_a_module_that_lacks_something_is_not_used(monkeypatch):
    monkeypatch.undo()
    name = "cudnn.sdpa.fwd.torch_op"
    old = SimpleNamespace(execute=lambda **_: None)
    modules = {None: False, ModuleType(name): False, TorchOp(old): False, TorchOp(): True}
    for module, is_known in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
        cudnn_graph._torch_op.cache_clear()
        assert (cudnn_graph._torch_op() is not None) is is_known
    cudnn_graph._torch_op.cache_clear()


def test_ragged_batches_are_the_operators(operators, package):
    mask, *lengths = cudnn_checks.SEQUENCES["documents"]
    check(EXECUTOR, "cudnn_fe", mask, inputs_of(mask, *lengths), "to_varlen")
    assert not package.graphs


def test_threads_share_graphs_and_have_handles_of_their_own(package):
    inputs = inputs_of(None, 5, 7)
    plan = cudnn_checks.plan_of("cudnn_fe", training=False)
    detached = Inputs(*(t.detach() for t in (inputs.query, inputs.key, inputs.value)))
    found = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(EXECUTOR.run(detached, plan)[0]))
        thread.start()
        thread.join()
    assert len(found) == 3
    assert len(package.graphs) == 1


def test_graphs_are_forgotten_and_bounded(package):
    inputs = inputs_of(None, 5, 7)
    for _ in range(2):
        check(EXECUTOR, "cudnn_fe", None, inputs)
        reset()
    assert len(package.graphs) == 4
    owners = {memory.owner: memory.bound for memory in remembered()}
    assert owners["executors.packages.cudnn_graph._forward_graph"] == 256
    assert owners["executors.packages.cudnn_graph._backward_graph"] == 256
