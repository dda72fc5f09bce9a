"""`chunked` on a CUDA device: fused and plain steps against float64, memory, graph capture."""

from __future__ import annotations

import pytest
import torch
from support.chunked_compare import Drawn, chunked_attention
from support.chunked_compare import compare as compare_all
from support.chunked_reference import error, reference, wide
from support.chunked_tiling import tiling
from support.spy import profiled

import attnroute
from attnroute import masks
from attnroute.errors import ArgumentError
from attnroute.executors.chunked import call as chunked_call
from attnroute.masks.lowered.form import FULL, LoweredMask, MaskFunction

pytestmark = pytest.mark.gpu

CAUSAL = LoweredMask(band_hi=0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FEATURES = ("causal", "window", "padding", "documents", "dense", "bias", "softcap", "sink", "alibi")


@pytest.fixture(params=["fused", "plain"])
def steps(request, monkeypatch):
    """Run with the Triton kernels and with plain torch."""
    chosen = chunked_call.fused_steps() if request.param == "fused" else chunked_call.EAGER_STEPS
    assert chosen is not None, "this test needs triton"
    monkeypatch.setattr(chunked_call, "steps_for", lambda _: chosen)
    return chosen


def inputs(*, heads=4, heads_kv=2, seqlen_q=200, seqlen_kv=200, dim=72, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        made = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
        return made.to(dtype).requires_grad_()

    return normal(2, heads, seqlen_q, dim), *(normal(2, heads_kv, seqlen_kv, dim) for _ in range(2))


def feature(name, dtype):
    """Return a mask and keyword arguments that exercise one feature at 200 queries and keys, 4 heads."""
    ids = torch.arange(200, device="cuda")[None]
    bias = torch.linspace(-1, 1, 4 * 200, device="cuda").view(4, 1, 200).to(dtype)
    return {
        "causal": (CAUSAL, {}),
        "window": (LoweredMask(band_lo=-33, band_hi=5), {}),
        "padding": (LoweredMask(key_keep=ids < torch.tensor([[150], [63]], device="cuda")), {}),
        "documents": (
            LoweredMask(
                band_hi=0,
                document_ids_q=ids // 70,
                document_ids_kv=ids // 70,
                document_bounds=(0, 70, 140, 200),
            ),
            {},
        ),
        "dense": (LoweredMask(dense=(ids + ids.mT) % 3 != 0), {}),
        "bias": (CAUSAL, {"bias": bias.requires_grad_(), "softcap": 3.0}),
        "softcap": (CAUSAL, {"softcap": 3.0}),
        "sink": (CAUSAL, {"sink": torch.linspace(-1, 2, 4, device="cuda").to(dtype).requires_grad_()}),
        "alibi": (FULL, {"alibi_slopes": torch.linspace(0.01, 0.3, 4, device="cuda").requires_grad_()}),
    }[name]


def compare(tensors, mask, arguments, tolerance):
    leaves = [*tensors, *(t for t in arguments.values() if torch.is_tensor(t))]
    out, lse = chunked_attention(*tensors, mask, **arguments)
    ones = [torch.ones_like(out), torch.ones_like(lse)]
    grads = torch.autograd.grad([out, lse], leaves, ones)
    wides = {id(leaf): wide(leaf) for leaf in leaves}
    wanted_arguments = {name: wides.get(id(value), value) for name, value in arguments.items()}
    want = reference(*(wides[id(t)] for t in tensors), mask, **wanted_arguments)
    wanted = torch.autograd.grad(want, [wides[id(leaf)] for leaf in leaves], [t.double() for t in ones])
    assert error(out, want[0]) < tolerance
    assert error(lse, want[1]) < max(tolerance / 100, 1e-6)
    for got, expected in zip(grads, wanted, strict=True):
        assert error(got, expected) < tolerance


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_features_against_float64(steps, name, dtype):
    mask, arguments = feature(name, dtype)
    with tiling(40_000, 64):
        compare(inputs(dtype=dtype), mask, arguments, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_programs_and_score_functions_against_float64(steps, dtype):
    drawn = Drawn(0, dtype, "cuda")
    table, gain = drawn.normal(4, 7).requires_grad_(), drawn.normal(4).requires_grad_()

    def make(table, gain):
        return lambda score, _b, h, i, j: torch.tanh(score * gain[h]) + table[h, (i - j) % 7]

    rows = MaskFunction(lambda b, h, i, j: (i + j + b + h) % 5 != 0)
    near = LoweredMask(band_lo=-9), LoweredMask(functions=(MaskFunction(lambda _b, _h, _i, j: j % 3 == 0),))
    mask = LoweredMask(band_hi=4, either=(near,), exclude=(LoweredMask(band_lo=2),), functions=(rows,))
    with tiling(40_000, 64):
        for score in (None, (make, (table, gain))):
            compare_all(drawn, drawn.tensors((2, 4, 200, 137), 72, heads_kv=2), mask, score=score)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_diagonal_for_each_query_against_float64(steps, dtype):
    drawn = Drawn(1, dtype, "cuda")
    diagonal = torch.arange(90, device="cuda") * 3 // 2
    ids_q, ids_kv = torch.arange(90, device="cuda")[None] // 30, torch.arange(140, device="cuda")[None] // 50
    mask = LoweredMask(
        band_lo=-20, band_hi=0, diagonal=diagonal, document_ids_q=ids_q, document_ids_kv=ids_kv
    )
    with tiling(4_000, 64):
        compare_all(drawn, drawn.tensors((1, 4, 90, 140), 64, heads_kv=2), mask)


@pytest.mark.parametrize("sizes", [(1, 1, 8), (129, 333, 33), (1025, 5000, 64), (700, 700, 512)])
def test_odd_sizes_and_long_rows_against_float64(steps, sizes):
    seqlen_q, seqlen_kv, dim = sizes
    mask = LoweredMask(band_hi=seqlen_kv - seqlen_q)
    tensors = inputs(heads=2, heads_kv=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, dim=dim)
    compare(tensors, mask, {}, TOLERANCE[torch.bfloat16])


def test_rows_without_a_key_give_zeros(steps):
    tensors = inputs()
    out, lse = chunked_attention(*tensors, LoweredMask(band_hi=-5))
    grads = torch.autograd.grad(out.float().sum() + lse[:, :, 5:].sum(), tensors)
    assert not out[:, :, :5].any()
    assert (lse[:, :, :5] == float("-inf")).all()
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_float64_stays_float64():
    tensors = inputs(dtype=torch.float64)
    compare(tensors, CAUSAL, {}, 1e-10)


def test_fused_and_plain_steps_drop_alike(monkeypatch):
    results = []
    for chosen in (chunked_call.fused_steps(), chunked_call.EAGER_STEPS):
        monkeypatch.setattr(chunked_call, "steps_for", lambda _, chosen=chosen: chosen)
        tensors = inputs(dtype=torch.float32)
        torch.manual_seed(3)
        out, _ = chunked_attention(*tensors, CAUSAL, dropout_p=0.3, block_q=64)
        results.append((out, *torch.autograd.grad(out.pow(2).sum(), tensors)))
    for fused, plain in zip(*results, strict=True):
        assert error(fused, plain) < 1e-5


@pytest.mark.parametrize("name", ["causal", "documents", "sink"])
def test_compiled_equals_eager(name):
    by_token = masks.Documents(ids=torch.arange(200, device="cuda") // 70) & masks.Causal()
    sink = torch.linspace(-1, 2, 4, device="cuda", dtype=torch.bfloat16)
    arguments = {
        "causal": {"mask": masks.Causal()},
        "documents": {"mask": by_token},
        "sink": {"mask": masks.Causal(), "sink": sink.requires_grad_()},
    }[name]

    def attend(*tensors):
        return attnroute.attention(*tensors, backend="chunked", **arguments)

    results = []
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        tensors = inputs()
        with profiled("chunked"):
            out = run(*tensors)
        results.append((out, *torch.autograd.grad(out, tensors, torch.ones_like(out))))
    torch.compiler.reset()
    for got, want in zip(*results[::-1], strict=True):
        assert error(got, want) < 1e-3


def test_training_at_8k_needs_less_than_a_gibibyte_and_a_half():
    query = torch.randn(1, 16, 8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = torch.randn(2, 1, 8, 8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = chunked_attention(query, key, value, CAUSAL)
    torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30


def test_replay_of_a_captured_graph_follows_its_inputs():
    # Leaves of its own for each stream: autograd remembers the stream on which a leaf was first used.
    warm, captured, plain = ([t.detach().requires_grad_() for t in inputs()] for _ in range(3))

    def train(tensors):
        out, _ = chunked_attention(*tensors, CAUSAL)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(warm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(captured)
    with torch.no_grad():
        for tensor in (*captured, *plain):
            tensor.copy_(tensor.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    for replayed, want in zip(got, train(plain), strict=True):
        assert error(replayed, want) < 1e-3


def test_dropout_is_refused_while_a_graph_is_captured():
    tensors = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
        with pytest.raises(ArgumentError, match="dropout_p requires 0 while a CUDA graph is captured"):
            chunked_attention(*tensors, CAUSAL, dropout_p=0.1)
