"""`attention()` inside of torch.compile: one graph, the kernel and numbers of eager, few recompilations."""

from __future__ import annotations

import pytest
import torch
from support.compile_cases import CASES, problem, results
from support.spy import Spy
from torch._dynamo.utils import counters

import attnroute
from attnroute import masks
from attnroute.api import routes

LENGTHS = (64, 100, 130, 76)
"""The second length makes dynamo leave lengths open; the last two are of the same kind as the second."""


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def chosen():
    """The backends of all routes that were run or traced."""
    names = []

    def noting(route, _problem, run):
        output = run()
        names.append(route.plan.backend)
        return output

    routes.LISTENERS.append(noting)
    yield names
    routes.LISTENERS.remove(noting)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def causal(b, h, i, j):
    return j <= i


def check(name, lengths, chosen, *, train, backend="aot_eager"):
    """Hold a compiled call against the eager one at several lengths; return how many graphs that took."""
    case = CASES[name]
    run = compiled(case.call, backend)
    for length in lengths:
        chosen.clear()
        want = results(case.call, case, length, train=train)
        eager = set(chosen)
        chosen.clear()
        got = results(run, case, length, train=train)
        assert set(chosen) <= eager, f"eager ran {eager}, the graph has {set(chosen)}"
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_one_graph_equals_eager_at_every_length(name, train, chosen):
    graphs = check(name, LENGTHS, chosen, train=train)
    assert graphs <= 3, f"{graphs} graphs for {len(LENGTHS)} lengths"


@pytest.mark.parametrize(
    ("name", "train"), [("causal", True), ("documents_ids", False), ("sink", True), ("thd", False)]
)
def test_inductor_equals_eager(name, train, chosen):
    check(name, LENGTHS[:3], chosen, train=train, backend="inductor")


def test_eager_and_compiled_choose_the_same_where_a_rule_reads_the_length(chosen):
    """Lengths about which rows say different things have graphs of their own; no length has one alone."""
    run = compiled(attnroute.attention)
    for length in (130, 64, 100, 192, 320, 77, 576, 1000, 90):
        tensors = problem(length)
        torch.testing.assert_close(run(*tensors), attnroute.attention(*tensors))
    assert counters["stats"]["unique_graphs"] <= 4


def test_lengths_that_are_open_from_the_start(chosen):
    run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True), dynamic=True)
    for length in (64, 100, 1, 77, 1024, 333):
        tensors = problem(length)
        torch.testing.assert_close(run(*tensors), attnroute.attention(*tensors, is_causal=True))
    assert counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


OPEN = ("plain", "bshd", "window", "dense", "dense_turned", "bias_turned", "alibi", "sink", "softcap", "math")


@pytest.mark.parametrize("name", OPEN)
def test_every_size_open_from_the_start(name, chosen):
    """Batch, heads, lengths, head_dim and strides are the tracer's numbers, and so is what they make."""
    run = compiled(CASES[name].call, dynamic=True)
    for heads_kv, length in ((2, 64), (4, 100), (2, 77)):
        inputs = problem(length)
        inputs[1:] = [t.repeat_interleave(heads_kv // 2, 1) for t in inputs[1:]]
        extras = CASES[name].tensors(length, "cpu")
        torch.testing.assert_close(run(*inputs, *extras), CASES[name].call(*inputs, *extras))
    assert not counters["graph_break"]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_bounds_of_sequence_lengths_stay_open(train):
    def call(query, key, value, sums, longest):
        given = {"cu_seqlens_q": sums, "max_seqlen_q": longest, "is_causal": True}
        return attnroute.attention(query, key, value, layout="thd", **given)

    run = compiled(call)
    for lengths in ([30, 40], [50, 14, 9], [80, 33], [21, 5, 60, 7], [70, 3, 4], [90, 1], [12, 61]):
        sums = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        tensors = [torch.randn(sum(lengths), 4, 16, requires_grad=train) for _ in range(3)]
        outs = [function(*tensors, sums, max(lengths)) for function in (run, call)]
        torch.testing.assert_close(*outs)
        if train:
            grads = [torch.autograd.grad(out.sum(), tensors) for out in outs]
            torch.testing.assert_close(*grads)
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


def masked(mask, query, key, value):
    return attnroute.attention(query, key, value, mask)


def test_masks_from_outside_of_the_graph_and_from_arguments():
    outside, other = masks.Causal() & masks.Window(9), masks.Causal() & masks.Window(4)
    tensors = problem(70)
    want = masked(outside, *tensors)
    torch.testing.assert_close(compiled(lambda *t: masked(outside, *t))(*tensors), want)
    run = compiled(masked)
    torch.testing.assert_close(run(outside, *tensors), want)
    torch.testing.assert_close(run(other, *tensors), masked(other, *tensors))


class TestOverrides:
    """What `override()` says is a condition of a graph."""

    def test_a_graph_is_made_anew_under_another_override(self, chosen):
        run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True))
        tensors = problem(80)
        run(*tensors)
        plain = set(chosen)
        chosen.clear()
        with attnroute.override(backend="chunked"):
            run(*tensors)
            assert set(chosen) == {"chunked"}
            chosen.clear()
            with attnroute.override(backend="math"):
                run(*tensors)
            assert set(chosen) == {"math"}
        chosen.clear()
        run(*tensors)
        assert not chosen, "the first graph holds again"
        assert plain == {"flash"}

    def test_graphs_run_what_they_were_made_with(self):
        run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True))
        tensors = problem(80)
        for backend in ("chunked", "flash", "math", "chunked"):
            with attnroute.override(backend=backend):
                run(*tensors)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    run(*tensors)
            seen = {event.key for event in profile.key_averages()}
            assert ("attnroute::chunked" in seen) == (backend == "chunked")
            assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in seen) == (backend == "flash")

    def test_a_required_backend_that_cannot_run_is_an_error_with_its_reasons(self):
        run = compiled(lambda q, k, v: attnroute.attention(q, k, v, backend="cudnn"))
        with pytest.raises(RuntimeError, match="cudnn is required"):
            run(*problem(80))


class TestSurroundings:
    def test_inference_mode(self):
        run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True))
        tensors = problem(80)
        with torch.inference_mode():
            got = run(*tensors)
        torch.testing.assert_close(got, attnroute.attention(*tensors, is_causal=True))

    @pytest.mark.parametrize("inside", [False, True])
    def test_autocast(self, inside):
        def call(q, k, v):
            if not inside:
                return attnroute.attention(q, k, v, is_causal=True)
            with torch.autocast("cpu", torch.bfloat16):
                return attnroute.attention(q, k, v, is_causal=True)

        run, tensors = compiled(call), problem(80)
        with torch.autocast("cpu", torch.bfloat16):
            got, want = run(*tensors), call(*tensors)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoints(self, use_reentrant):
        def call(q, k, v):
            return attnroute.attention(q, k, v, is_causal=True)

        def kept(q, k, v):
            return torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=use_reentrant)

        tensors = problem(80, train=True)
        got = torch.autograd.grad(compiled(kept)(*tensors).square().sum(), tensors)
        want = torch.autograd.grad(call(*tensors).square().sum(), tensors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_several_checkpoints(self, dynamic):
        """dynamo reads the defaults of a function anew in each of them."""

        def call(q, k, v):
            return attnroute.attention(q, k, v, is_causal=True)

        def kept(q, k, v):
            for _ in range(2):
                q = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
            return attnroute.attention(q, k, v)

        def plain(q, k, v):
            return attnroute.attention(call(call(q, k, v), k, v), k, v)

        run = compiled(kept, dynamic=dynamic)
        for length in (80, 76, 90):
            tensors = problem(length, train=True)
            got = torch.autograd.grad(run(*tensors).square().sum(), tensors)
            want = torch.autograd.grad(plain(*tensors).square().sum(), tensors)
            torch.testing.assert_close(got, want)
        assert counters["stats"]["unique_graphs"] <= 2

    def test_vmap(self):
        tensors = [t[None].expand(3, *t.shape).clone() for t in problem(40)]

        def call(q, k, v):
            return torch.vmap(lambda *t: attnroute.attention(*t, is_causal=True))(q, k, v)

        torch.testing.assert_close(compiled(call)(*tensors), call(*tensors))

    def test_strides_make_graphs_of_their_own(self):
        run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True))
        plain = problem(80)
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in plain]
        torch.testing.assert_close(run(*plain), run(*strided))

    def test_a_dense_mask_is_read_anew_each_time(self):
        """No look into a mask is baked into a graph: its values may be others in the next call."""
        run = compiled(attnroute.attention)
        tensors = problem(300)
        lower = torch.ones(300, 300, dtype=torch.bool).tril()
        for mask in (lower, torch.ones_like(lower), lower.clone()):
            torch.testing.assert_close(run(*tensors, mask), attnroute.attention(*tensors, mask))


class TestFunctions:
    """Predicates and score functions stay outside of a graph, and say so where there may be only one."""

    def test_a_function_is_a_graph_break(self):
        mask = masks.Function(causal)
        tensors = problem(80)
        run = torch.compile(lambda *t: attnroute.attention(*t, mask) * 2, backend="aot_eager")
        torch.testing.assert_close(run(*tensors), attnroute.attention(*tensors, mask) * 2)

    def test_with_fullgraph_the_error_names_the_function(self):
        mask = masks.Function(causal)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="mask function or a score function"):
            compiled(lambda *t: attnroute.attention(*t, mask))(*problem(80))


def test_bad_arguments_keep_their_sentence():
    run = compiled(lambda q, k, v: attnroute.attention(q, k, v, window=(-3, 0)))
    with pytest.raises(RuntimeError, match="window requires a tuple"):
        run(*problem(80))


def test_a_second_derivative_of_an_operator_is_refused():
    run = compiled(lambda q, k, v: attnroute.attention(q, k, v, is_causal=True, backend="chunked"))
    tensors = problem(80, train=True)
    (grad,) = torch.autograd.grad(run(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad|once_differentiable"):
        torch.autograd.grad(grad.sum(), tensors[:1])


def test_eager_calls_after_a_graph_are_not_touched_by_it():
    """Nothing that a tracer made may be remembered for calls with real tensors."""
    tensors, ids = problem(80), torch.arange(80)[None] // 20
    mask = masks.Documents(ids=ids) & masks.Causal()
    run = compiled(lambda q, k, v: attnroute.attention(q, k, v, mask))
    graph = run(*tensors)
    with Spy() as spy:
        eager = attnroute.attention(*tensors, mask)
    assert spy.backends
    torch.testing.assert_close(graph, eager)
