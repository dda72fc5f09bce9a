"""What the gradient of an output is when a kernel's backward gets it, wherever it lay before."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from support import backwards
from support.cuda_operators import CudaOperators, Launches
from support.reference import attend
from support.repair_inputs import executor_of, inputs_of, lowered, stored
from support.sink_cases import CASES, DENSE, EMPTY_ROWS, PADDING, plan
from torch.fx.experimental.proxy_tensor import make_fx

from attnroute import masks
from attnroute.executors import strides
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.strides import fitted, is_packed

torch.manual_seed(0)


def odd_rows(values):
    wide = values.new_zeros(*values.shape[:-1], values.shape[-1] + 1)
    return wide[..., 1:].copy_(values)


FORMS = {
    "as it was": lambda g: g.clone(),
    "contiguous": lambda g: g.contiguous().clone(memory_format=torch.contiguous_format),
    "tokens outermost": lambda g: stored(g.contiguous(), "bshd"),
    "sequence outermost": lambda g: g.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "row gap": lambda g: stored(g, "row gap"),
    "odd rows": odd_rows,
    "starts between": lambda g: stored(g, "shifted"),
    "last stride": lambda g: stored(g, "last stride"),
    "a number": lambda g: g[:1, :1, :1, :1].expand_as(g),
    "one row": lambda g: g[:, :, :1].expand_as(g),
    "one head": lambda g: g[:, :1].expand_as(g),
}
"""Gradients in other memory; some hold other numbers than were given."""
BELOW = masks.Dense(torch.ones(9, 9, dtype=torch.bool).tril())
ROUTES = {
    **{(case, sink): CASES[case] for case in CASES for sink in (True, False)},
    ("cudnn mask", False): ("cudnn", (), BELOW, DENSE, {}),
    ("efficient mask", False): ("efficient", (), BELOW, ("expand_kv", *DENSE), {}),
}
"""By name and whether there is a sink: without one, rows that have no key need preparations of their own."""
ROUTES = {
    which: route for which, route in ROUTES.items() if which[1] or route[2] not in (EMPTY_ROWS, PADDING)
}


def made(case, *, sink, form="packed"):
    """Return the inputs of a route, and the call of it that gives output and log-sum-exp."""
    backend, _, mask, repairs, sizes = ROUTES[case, sink]
    inputs = inputs_of(**{"seqlen_q": 9, "seqlen_kv": 9, **sizes})
    inputs.query, inputs.key, inputs.value = (
        stored(t, form).requires_grad_() for t in (inputs.query, inputs.key, inputs.value)
    )
    inputs.sink = torch.zeros(4, requires_grad=True) if sink else None
    if mask is not None:
        inputs.mask = lowered(mask, inputs)
    repairs = ("sink_from_lse", *repairs) if sink else repairs
    leaves = [inputs.query, inputs.key, inputs.value]

    def run():
        given = type(inputs)(*leaves, inputs.mask, sink=inputs.sink)
        return run_repaired(executor_of(backend), given, plan(backend, repairs))

    return leaves, run


@pytest.mark.parametrize(("case", "sink"), ROUTES)
def test_a_backward_gets_a_gradient_that_its_kernel_reads(case, sink):
    """Held against float64; the operators refuse what the real ones misread."""
    mask = ROUTES[case, sink][2]
    for form in ("packed", "bshd", "row gap"):
        leaves, run = made(case, sink=sink, form=form)
        sizes = {"batch": leaves[0].shape[0], "num_heads_q": 4}
        lengths = leaves[0].shape[2], leaves[1].shape[2]
        allowed = None if mask is None else mask.materialize(*lengths, **sizes)
        want, _ = attend(*leaves, allowed=allowed, sink=torch.zeros(4) if sink else None)
        with CudaOperators() as mode:
            out, _ = run()
            for lie in FORMS.values():
                grad = lie(torch.randn_like(out))
                got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
                true = torch.autograd.grad(want, leaves, grad.double(), retain_graph=True)
                for one, expected in zip(got, true, strict=True):
                    torch.testing.assert_close(one.double(), expected.double(), rtol=1e-4, atol=1e-5)
        assert len(mode.gradients) == len(FORMS)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("case", ["flash", "flash window", "flash documents", "cudnn", "efficient mask"])
def test_what_autograd_may_ask_of_the_backward(case, sink):
    leaves, run = made(case, sink=sink)
    with CudaOperators():
        backwards.check_again(lambda: run()[0], leaves)
        backwards.check_forms(lambda: run()[0], leaves)


@pytest.mark.parametrize("as_output", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lies", ["contiguous", "tokens outermost", "sequence outermost"])
def test_a_gradient_that_fits_is_passed_on_and_another_is_copied(lies, form, as_output):
    out = FORMS[lies](torch.randn(2, 3, 5, 8))
    grad = FORMS[form](torch.randn_like(out))
    got = fitted(grad, out, as_output=as_output)
    assert torch.equal(got, grad)
    assert is_packed(got)
    fits = grad.stride() == out.stride() if as_output else is_packed(grad)
    assert (got is grad) == (fits and form != "starts between")
    if got is not grad or as_output:
        assert got.stride() == out.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lies", ["contiguous", "tokens outermost", "sequence outermost"])
def test_a_large_gradient_is_moved_in_words_where_its_rows_are_whole_words(lies, form, dtype, monkeypatch):
    monkeypatch.setattr(strides, "_SMALL", 0)
    out = FORMS[lies](torch.randn(2, 3, 5, 8, dtype=dtype))
    grad = FORMS[form](torch.randn_like(out))
    with Launches() as launches:
        got = fitted(grad, out, as_output=True)
    assert torch.equal(got, grad)
    assert got.stride() == out.stride()
    assert launches.seen == ([] if got is grad else ["new_empty_strided", "copy_"])


def test_a_copy_of_a_gradient_can_be_differentiated(monkeypatch):
    monkeypatch.setattr(strides, "_SMALL", 0)
    out = stored(torch.randn(2, 3, 5, 8), "bshd")
    grad = torch.randn(2, 3, 5, 8, requires_grad=True)
    fitted(grad, out, as_output=True).square().sum().backward()
    torch.testing.assert_close(grad.grad, 2 * grad)


@pytest.mark.parametrize("samples", [1, 3])
def test_gradients_of_several_outputs_at_once(samples):
    """No sample has an address of its own; in the copy each lies as the output does."""
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    seen = []

    class Kept(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(ctx, tensor):
            return stored(tensor.detach(), "bshd")

        @staticmethod
        def backward(ctx, grad):
            seen.append(fitted(grad, stored(query.detach(), "bshd"), as_output=True))
            return seen[-1]

    grads = torch.randn(2, 3, 5, 8, samples + 1)[..., 1:].permute(4, 0, 1, 2, 3)
    (got,) = torch.autograd.grad(Kept.apply(query), query, grads, is_grads_batched=True)
    assert torch.equal(got, grads)
    assert len(seen) == 1


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("form", ["contiguous", "last stride"])
def test_a_graph_has_the_copy_where_it_is_needed_alone(backend, form):
    repairs = ("expand_kv",) if backend == "efficient" else ()

    def step(query, key, value, grad):
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        given = inputs_of()
        given.query, given.key, given.value = leaves
        out, _ = run_repaired(executor_of(backend), given, plan(backend, repairs, return_lse=False))
        lies = grad.transpose(2, 3) if form == "last stride" else grad
        return torch.autograd.grad(out, leaves, torch.empty_like(out) if form == "contiguous" else lies)

    tensors = [torch.randn(2, 4, 8, 8, device="meta", dtype=torch.float16) for _ in range(4)]
    graph = make_fx(step, tracing_mode="fake")(*tensors).graph
    (kernel,) = (
        n for n in graph.nodes if str(n.target).partition(".default")[0].endswith("attention_backward")
    )
    copies = [n for n in graph.nodes if "clone" in str(n.target) and n in kernel.args[0].all_input_nodes]
    assert bool(copies) == (form == "last stride")


def test_a_saved_output_warns_of_no_hook():
    """torch.save warns about hooks that it leaves out, and nobody asked for ours."""
    _, run = made("flash", sink=False)
    with CudaOperators(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(run()[0], io.BytesIO())


def test_inference_leaves_nothing_on_the_output():
    _, run = made("flash", sink=False)
    with CudaOperators(), torch.no_grad():
        assert run()[0]._backward_hooks is None
