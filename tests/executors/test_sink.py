"""Sinks on a kernel that has none, through the log-sum-exp: torch's CPU flash kernel against float64."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.repair_inputs import executor_of, inputs_of, reference
from support.spy import Spy, ran
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute import masks
from attnroute.engine.decide import decide
from attnroute.executors.prepare import apply as repairs
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Executor, Plan
from attnroute.masks.lowered.form import FULL
from attnroute.question.host import Host
from attnroute.question.line import parse

BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
NAMES = ("query", "key", "value", "sink")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tensors(batch=2, heads=4, heads_kv=2, seqlen_q=7, seqlen_kv=9, head_dim=8, dtype=torch.float32):
    shapes = ((heads, seqlen_q), (heads_kv, seqlen_kv), (heads_kv, seqlen_kv))
    made = [torch.randn(batch, *shape, head_dim).to(dtype).requires_grad_() for shape in shapes]
    return [*made, torch.randn(heads, requires_grad=True)]


def attention(query, key, value, sink, mask=None, *, backend="flash", **rest):
    return attnroute.attention(query, key, value, mask, sink=sink, backend=backend, **rest)


def grads_of(out, leaves, cotangent):
    return torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def check(leaves, mask=None, allowed=None, bias=None, **rest):
    """Hold output, log-sum-exp and every gradient against the definition, and see which operators ran."""
    want, want_lse = attend(*leaves[:3], allowed=allowed, bias=bias, sink=leaves[3])
    cotangent = torch.randn_like(want).to(leaves[0].dtype)
    with ran("flash") as spy:
        out, lse = attention(*leaves, mask, bias=bias, return_lse=True, **rest)
        grads = grads_of(out, leaves, cotangent)
    assert spy.seen.count(BACKWARD) == 1
    assert (out.dtype, lse.dtype, lse.requires_grad) == (leaves[0].dtype, torch.float32, False)
    tolerance = TOLERANCE[leaves[0].dtype]
    assert error(out, want) <= tolerance
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=max(1e-5, tolerance / 10))
    wanted = grads_of(want, leaves, cotangent)
    for name, leaf, got, expected in zip(NAMES, leaves, grads, wanted, strict=True):
        assert got.dtype == leaf.dtype
        assert error(got, expected.double(), floor=2.0) <= 2 * tolerance, name


@st.composite
def problems(draw):
    heads_kv, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "batch": draw(st.integers(1, 3)),
        "heads": heads_kv * group,
        "heads_kv": heads_kv,
        "seqlen_q": draw(st.sampled_from([1, 2, 7, 31, 33, 65])),
        "seqlen_kv": draw(st.sampled_from([1, 3, 32, 57, 65])),
        "head_dim": draw(st.sampled_from([1, 5, 8, 16])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
    }
    logits = st.sampled_from([-math.inf, -80.0, -1.5, 0.0, 0.7, 6.0, 60.0])
    sinks = draw(st.lists(logits, min_size=sizes["heads"], max_size=sizes["heads"]))
    kind = draw(st.sampled_from(["none", "causal", "window", "padding", "dense", "bias"]))
    return (
        sizes,
        sinks,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kind,
        draw(st.integers(0, 99)),
    )


def mask_of(kind, batch, heads, seqlen_q, seqlen_kv):
    if kind == "dense":
        allowed = torch.rand(batch, heads, seqlen_q, seqlen_kv) < 0.5
        allowed[:, :, seqlen_q // 2] = False
        return masks.Dense(allowed)
    lengths = [n * seqlen_kv // batch for n in range(batch)]
    made = {
        "causal": masks.Causal("bottom_right"),
        "window": masks.Window(4, 1),
        "padding": masks.KeyPadding(lengths=lengths),
    }
    return made.get(kind)


@given(problems())
@settings(max_examples=60)
def test_it_is_the_softmax_with_one_more_logit(problem):
    sizes, sinks, sink_dtype, kind, seed = problem
    torch.manual_seed(seed)
    leaves = [*tensors(**sizes)[:3], torch.tensor(sinks).to(sink_dtype).requires_grad_()]
    places = tuple(sizes[n] for n in ("batch", "heads", "seqlen_q", "seqlen_kv"))
    mask, bias, allowed = mask_of(kind, *places), None, None
    if mask is not None:
        allowed = mask.materialize(*places[2:], batch=places[0], num_heads_q=places[1])
    if kind == "bias":
        bias = torch.randn(places).masked_fill(torch.rand(places) < 0.3, -math.inf).to(sizes["dtype"])
    check(leaves, mask, allowed, bias)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_that_of_finite_differences(masked, layout):
    leaves = [t.detach().double().requires_grad_() for t in tensors(1, 2, 1, 4, 5, 3)]
    mask = masks.Dense(torch.rand(4, 5) < 0.5) if masked else None

    def run(query, key, value, sink):
        given_tensors = [t.transpose(1, 2) if layout == "bshd" else t for t in (query, key, value)]
        return attention(*given_tensors, sink, mask, layout=layout)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 0)}, {"scale": 0.3}], ids=str)
def test_chunked_says_the_same(options):
    """Its sinks are its own."""
    leaves = tensors(seqlen_q=40, seqlen_kv=40)
    found = []
    for backend in ("flash", "chunked"):
        with ran(backend):
            out, lse = attention(*leaves, backend=backend, return_lse=True, **options)
            found.append((out, lse, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_nothing_but_a_sink_is_zeros():
    allowed = torch.ones(7, 9, dtype=torch.bool).tril(-2)
    leaves = tensors()
    check(leaves, masks.Dense(allowed), allowed)
    out, lse = attention(*leaves, masks.Dense(allowed), return_lse=True)
    assert not out[:, :, :2].any()
    assert torch.equal(lse[:, :, :2], leaves[3].detach()[None, :, None].expand(2, 4, 2))


def test_a_sink_of_minus_infinity_is_none():
    *leaves, _ = tensors()
    allowed = torch.ones(7, 9, dtype=torch.bool).tril(-2)
    sink = torch.full((4,), -math.inf, requires_grad=True)
    out, lse = attention(*leaves, sink, masks.Dense(allowed), return_lse=True)
    want, want_lse = attention(*leaves, None, masks.Dense(allowed), return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    cotangent = torch.randn_like(out)
    *grads, grad_sink = grads_of(out, [*leaves, sink], cotangent)
    for got, expected in zip(grads, grads_of(want, leaves, cotangent), strict=True):
        torch.testing.assert_close(got, expected)
    assert not grad_sink.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("logit", [-1000.0, -150.0, 0.0, 150.0])
def test_scores_far_below_zero(logit, dtype):
    query = (torch.rand(2, 4, 7, 8) + 6).to(dtype).requires_grad_()
    key, value = (-query.detach()).requires_grad_(), torch.randn(2, 4, 7, 8).to(dtype).requires_grad_()
    check([query, key, value, torch.full((4,), logit, requires_grad=True)])


def test_inference_runs_the_forward_alone(monkeypatch):
    leaves = tensors()
    want, _ = attend(*leaves[:3], sink=leaves[3])
    monkeypatch.delattr("attnroute.executors.prepare.sink._WithSink")
    with torch.no_grad(), Spy() as spy:
        out = attention(*leaves)
        assert "aten::logaddexp" not in spy.seen
    assert error(out, want) <= TOLERANCE[torch.float32]
    with torch.inference_mode():
        assert torch.equal(attention(*(t.detach() for t in leaves)), out)
    assert not attention(*(t.detach() for t in leaves)).requires_grad


def test_calls_without_a_sink_never_come_here(monkeypatch):
    monkeypatch.delattr(repairs, "run_with_sink")
    *leaves, _ = tensors()
    for options in ({}, {"window": (3, 0), "causal_alignment": "top_left"}):
        attention(*leaves, None, **options).sum().backward()


def test_only_the_sink_trains():
    *leaves, sink = tensors()
    detached = [t.detach() for t in leaves]
    want, _ = attend(*detached, sink=sink)
    with Spy() as spy:
        out = attention(*detached, sink)
        (grad,) = torch.autograd.grad(out.sum(), sink)
    assert BACKWARD not in spy.seen
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), sink)[0])


@pytest.mark.parametrize("trained", range(4), ids=NAMES)
def test_each_alone_gets_the_gradient_it_gets_beside_the_others(trained):
    leaves = tensors()
    every = torch.autograd.grad(attention(*leaves).sum(), leaves)
    alone = [t.detach().requires_grad_(n == trained) for n, t in enumerate(leaves)]
    (grad,) = torch.autograd.grad(attention(*alone).sum(), alone[trained])
    assert torch.equal(grad, every[trained])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    leaves = tensors()
    want = torch.autograd.grad(attention(*leaves).sum(), leaves)
    checkpoint(attention, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, grad) for t, grad in zip(leaves, want, strict=True))


def test_what_is_kept_for_the_backward_can_be_put_elsewhere():
    leaves = tensors()
    want = torch.autograd.grad(attention(*leaves).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().numpy(), torch.from_numpy):
        out = attention(*(t for t in leaves))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True))


def test_a_mask_that_was_made_a_bias_is_not_kept_for_the_backward():
    leaves, allowed = tensors(), torch.rand(7, 9) < 0.5
    out = attention(*leaves, masks.Dense(allowed))
    kept = weakref.ref(allowed)
    del allowed
    gc.collect()
    assert kept() is None
    out.sum().backward()


def test_deterministic_gradients_are_the_same_every_time():
    leaves = tensors(seqlen_q=65, seqlen_kv=65)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (torch.autograd.grad(attention(*leaves).square().sum(), leaves) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_second_derivative_is_refused():
    leaves = tensors()
    (grad,) = torch.autograd.grad(attention(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|is not implemented"):
        grad.sum().backward()


# Beside other preparations.


def plan(*made, **rest):
    fields = {"backend": "flash", "training": True, "return_lse": True, "device_type": "cpu", **rest}
    return Plan(repairs=("sink_from_lse", *made), **fields)


def prepared(**sizes):
    inputs = inputs_of(**sizes)
    inputs.sink = torch.randn(inputs.query.shape[1], requires_grad=True)
    leaves = [t.requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    return inputs, [*leaves, inputs.sink]


@pytest.mark.parametrize(
    "made", [("pad_head_dim",), ("expand_kv", "contiguous"), ("expand_kv", "pad_head_dim")], ids="+".join
)
def test_copies_before_the_kernel(made):
    inputs, leaves = prepared(head_dims=(5, 5))
    want, want_lse = attend(*leaves[:3], sink=leaves[3])
    out, lse = run_repaired(executor_of("flash"), inputs, plan(*made))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(out)
    expected = grads_of(want, leaves, cotangent)
    for got, wanted in zip(grads_of(out, leaves, cotangent), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "made", [("split_batch",), ("split_heads",), ("split_batch", "split_heads")], ids=str
)
@pytest.mark.parametrize("training", [False, True])
def test_pieces_have_the_sinks_of_their_heads(made, training, monkeypatch):
    inputs, leaves = prepared(batch=7, heads=6, heads_kv=3)
    rest = {"training": training}
    with torch.set_grad_enabled(training):
        whole = run_repaired(executor_of("flash"), replace(inputs), plan(**rest))
        monkeypatch.setattr(repairs, "GRID_LIMIT", 4)
        pieces = run_repaired(executor_of("flash"), replace(inputs), plan(*made, **rest))
    for got, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, expected)
    if training:
        pairs = zip(
            *(torch.autograd.grad(o.square().sum(), leaves) for o in (pieces[0], whole[0])), strict=True
        )
        for got, expected in pairs:
            torch.testing.assert_close(got, expected)


def test_rows_that_are_set_to_zero_keep_their_sink():
    """A kernel that gives something else for them is set right first."""
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(-2)

    def careless(inputs, given_plan):
        out, lse = reference(inputs, given_plan)
        empty = ~allowed.any(-1)
        return out.masked_fill(empty[:, None], 3.0), lse.masked_fill(empty, 4.0)

    reference.seen = []
    inputs, _ = prepared()
    inputs.mask = replace(FULL, dense=allowed)
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, allowed=allowed, sink=inputs.sink)
    with torch.no_grad():
        out, lse = run_repaired(Executor(careless), inputs, plan("zero_empty_rows", training=False))
    assert error(out, want) <= TOLERANCE[torch.float64]
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("window", [(127, 0), (None, 0)], ids=["sliding", "full"])
@pytest.mark.parametrize("seqlen_q", [200, 3, 1])
def test_layers_of_gpt_oss(window, seqlen_q):
    """Its heads are 64 wide, eight share one of key and value, and every other layer sees 128 keys."""
    leaves = tensors(1, 16, 2, seqlen_q, 200, 64, torch.bfloat16)
    leaves[3] = torch.randn(16).bfloat16().requires_grad_()
    keys = torch.arange(200)
    distance = keys[None] - keys[-seqlen_q:, None]
    allowed = (distance <= 0) & (distance >= (-300 if window[0] is None else -window[0]))
    check(leaves, None, allowed, window=window, causal_alignment="bottom_right")


def test_a_ragged_batch():
    lengths_q, lengths_kv = torch.tensor([5, 0, 9]), torch.tensor([8, 2, 6])
    query, key, value, sink = tensors(1, seqlen_q=14, seqlen_kv=16)
    ids = [torch.repeat_interleave(torch.arange(3), lengths) for lengths in (lengths_q, lengths_kv)]
    want, want_lse = attend(query, key, value, allowed=ids[0][:, None] == ids[1], sink=sink)
    sums = [torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32) for lengths in (lengths_q, lengths_kv)]
    options = {"layout": "thd", "cu_seqlens_q": sums[0], "cu_seqlens_kv": sums[1]}
    longest = {"max_seqlen_q": 9, "max_seqlen_kv": 8, "return_lse": True}
    packed = [t[0].transpose(0, 1) for t in (query, key, value)]
    out, lse = attention(*packed, sink, **options, **longest)
    torch.testing.assert_close(out.transpose(0, 1)[None].double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[None].double(), want_lse, rtol=1e-5, atol=1e-5)
    leaves, cotangent = (query, key, value, sink), torch.randn_like(out)
    expected = grads_of(want, leaves, cotangent.transpose(0, 1)[None])
    for got, wanted in zip(grads_of(out, leaves, cotangent), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-4, atol=1e-5)


# The decision.

HOST = Host(arch="sm_90", versions={"torch": "2.11.0", "cuda": "13.0", "cudnn": "9.19.0"})


@pytest.mark.parametrize("words", ["causal", "causal train", "causal train lse", "window=127,0 train"])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_kernels_that_return_a_log_sum_exp_take_sinks(backend, words):
    plain = parse(f"bf16 b2 hq16 hkv16 sq4096 skv4096 d64 {words}")
    without, verdict = (decide(call, HOST).verdict(backend) for call in (plain, plain.with_(sink=True)))
    assert (without.status, verdict.status) == ("eligible", "eligible")
    assert set(verdict.repairs) == {*without.repairs, "sink_from_lse"}
    answers = {f.rule: f for f in verdict.findings}
    assert answers[f"any/{backend}/feature-sink"].repaired_by == "sink_from_lse"


def test_the_composite_has_no_log_sum_exp_and_takes_none():
    decision = decide(parse("fp32 b1 hq4 hkv4 sq64 skv64 d64 sink"), HOST)
    assert decision.verdict("math").status == "rejected"


def test_documents_with_a_sink_are_a_ragged_batch():
    call = parse("bf16 b1 hq16 hkv2 sq4096 skv4096 d64 causal documents=1000,3096 train sink")
    verdict = decide(call, HOST).verdict("flash")
    assert (verdict.status, verdict.repairs) == ("eligible", ("to_varlen", "sink_from_lse"))
