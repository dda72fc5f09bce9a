"""chunked as the other half of a kernel: requests that it runs, and gradients from a log-sum-exp.

Everything is held against the definition. The backward gets the definition's output and log-sum-exp, rounded
as any kernel may round them, with either infinity in rows with no key.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cudnn_checks
from support.chunked_reference import allowed as allowed_by
from support.chunked_tiling import tiling
from support.cudnn_checks import HEADS, PADDED, SEQUENCES, allowed_of, inputs_of, plan_of, ragged_request
from support.reference import attend, error
from torch.fx.experimental.proxy_tensor import make_fx

from attnroute.executors.chunked import from_lse
from attnroute.executors.packages import fallback
from attnroute.executors.packages.request import Launched, padded, padded_lse, request_of, to_bhsd
from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import LoweredMask

NAMES = ("query", "key", "value", "sink")
OUTPUT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}
GRADIENT = {torch.float64: 1e-5, torch.float32: 5e-5, torch.bfloat16: 6e-2}
"""Largest errors of output and gradients; a log-sum-exp has float32's digits whatever the dtype."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def band_of(request, seqlen_q, seqlen_kv):
    """Return who may attend beside the diagonal that ends with the last query and key."""
    distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] - (seqlen_kv - seqlen_q)
    allowed = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    allowed = allowed if request.left is None else allowed & (distance >= -request.left)
    return allowed if request.right is None else allowed & (distance <= request.right)


def attended(request, query, key, value):
    """Return output and log-sum-exp in layout bhsd."""
    extras = {n: getattr(request, n) for n in ("scale", "softcap", "sink", "alibi_slopes")}
    allowed = band_of(request, query.shape[2], key.shape[2])
    return attend(query, key, value, allowed=allowed, **extras)


def defined(request):
    """Return output and log-sum-exp of a request by definition, a ragged one sequence by sequence."""
    tensors = (request.query, request.key, request.value)
    if not request.is_ragged:
        out, lse = attended(request, *(to_bhsd(request, t) for t in tensors))
        return to_bhsd(request, out), lse
    outs, lses = [], []
    for rows, keys in sequences_of(request):
        taken = (tensors[0][rows], tensors[1][keys], tensors[2][keys])
        out, lse = attended(request, *(t.transpose(0, 1)[None] for t in taken))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def sequences_of(request):
    """Return the queries of each sequence, and the keys of it that exist, as slices."""
    starts = request.cu_seqlens_kv[:-1].tolist()
    used = request.cu_seqlens_kv.diff() if request.used_kv is None else request.used_kv
    keys = [slice(start, start + count) for start, count in zip(starts, used.tolist(), strict=True)]
    return zip((slice(*ends) for ends in pairwise(request.cu_seqlens_q.tolist())), keys, strict=True)


def widened(request):
    """Return a request of float64 leaves with the same values, and those leaves."""
    found = {n: getattr(request, n) for n in NAMES}
    wide = {n: t.detach().double().requires_grad_() for n, t in found.items() if t is not None}
    return request._replace(**wide), list(wide.values())


def check(request, *, loosely=1.0):
    """Hold a request's output, log-sum-exp and every gradient against the definition."""
    dtype = request.query.dtype
    request = request._replace(**{n: t.detach() for n in NAMES if (t := getattr(request, n)) is not None})
    wide, leaves = widened(request)
    want, want_lse = defined(wide)
    out, lse = fallback.forward(request)
    assert (out.dtype, lse.dtype, out.shape) == (dtype, torch.float32, want.shape)
    assert error(out, want) <= OUTPUT[dtype] * loosely
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(out)
    wanted = torch.autograd.grad(want, leaves, cotangent.double())
    said, empty = want_lse.detach().float(), want_lse == -math.inf
    for nothing in (-math.inf, math.inf) if empty.any() else (-math.inf,):
        ran = Launched(want.detach().to(dtype), said.masked_fill(empty, nothing))
        hold(request, fallback.backward(request, ran, cotangent), wanted, GRADIENT[dtype] * loosely)


def hold(request, found, wanted, tolerance):
    """Hold gradients against true ones; those of sinks are float32, and rounded as the sinks are."""
    assert (found.sink is None) == (request.sink is None)
    tensors = [t for n in NAMES if (t := getattr(request, n)) is not None]
    for name, tensor, got, want in zip(NAMES, tensors, found, wanted, strict=False):
        is_sink = name == "sink"
        assert (got.dtype, got.shape) == (torch.float32 if is_sink else tensor.dtype, tensor.shape)
        assert error(got, want, floor=1.0) <= max(tolerance, GRADIENT[tensor.dtype] * is_sink), name


def sinks(heads=4, dtype=torch.float32):
    return torch.tensor([0.5, -2.0, 3.0, -math.inf, 60.0, 0.0])[:heads].to(dtype)


# Padded batches.


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("case", PADDED)
def test_bands_from_either_corner(case, with_sink, heads_first):
    mask, *lengths = PADDED[case]
    inputs = inputs_of(mask, *lengths, sink=sinks() if with_sink else None)
    request = request_of(inputs, plan_of("cudnn_fe"), heads_first=heads_first)
    if mask is not None:
        said = band_of(request, *lengths).expand(2, 4, *lengths)
        assert torch.equal(said, allowed_of(mask, inputs).expand(2, 4, *lengths))
    check(request)


def padded_request(*, batch=2, lengths=(9, 7), heads=HEADS, dims=(8, 5), dtype=torch.float64, **changes):
    """Return a padded request with fields changed, its tensors laid out as it says."""
    (seqlen_q, seqlen_kv), (heads_q, heads_kv), (qk, v) = lengths, heads, dims
    shapes = ((heads_q, seqlen_q, qk), (heads_kv, seqlen_kv, qk), (heads_kv, seqlen_kv, v))
    tensors = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
    if not changes.get("heads_first", False):
        tensors = [t.transpose(1, 2) for t in tensors]
    return cudnn_checks.request_of(None, *lengths, **dict(zip(NAMES[:3], tensors, strict=True)), **changes)


SLOPES = torch.tensor([0.5, 0.25, -0.125, 0.0])
EXTRAS = {
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of each row": {"alibi_slopes": torch.linspace(-0.5, 1.0, 8).view(2, 4)},
    "softcap": {"softcap": 1.5},
    "softcap, slopes and sinks": {"softcap": 1.5, "alibi_slopes": SLOPES, "sink": sinks()},
    "sinks in half precision": {"sink": sinks(dtype=torch.bfloat16)},
    "a negative scale": {"scale": -0.7},
    "no scale": {"scale": 0.0},
}


@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 1), (-1, None)])
@pytest.mark.parametrize("case", EXTRAS)
def test_what_else_a_score_has(case, band):
    check(padded_request(left=band[0], right=band[1], **EXTRAS[case]))


SIDES = st.none() | st.integers(-3, 9)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
LOGITS = st.lists(st.sampled_from([-math.inf, -30.0, -1.5, 0.0, 0.7, 6.0]), min_size=9, max_size=9)


@st.composite
def extras(draw, heads, batch):
    """Draw what both kinds of batches may have beside their sequences; what is random after it is seeded."""
    logits, generator = draw(st.none() | LOGITS), torch.manual_seed(draw(st.integers(0, 99)))
    slopes = torch.rand(*draw(st.sampled_from([(), (batch,)])), heads, generator=generator)
    return {
        "left": draw(SIDES),
        "right": draw(SIDES),
        "softcap": draw(st.sampled_from([0.0, 2.5])),
        "scale": draw(st.sampled_from([0.35, 1.0, -0.5])),
        "sink": None if logits is None else torch.tensor(logits[:heads]),
        "alibi_slopes": draw(st.sampled_from([None, slopes])),
    }


@st.composite
def padded_requests(draw):
    heads_kv, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    lengths = st.sampled_from([1, 2, 5, 33, 67])
    return padded_request(
        batch=batch,
        lengths=(draw(lengths), draw(lengths)),
        heads=(heads, heads_kv),
        dims=draw(st.sampled_from([(1, 3), (5, 8), (8, 8)])),
        dtype=draw(DTYPES),
        heads_first=draw(st.booleans()),
        **draw(extras(heads, batch)),
    )


@given(padded_requests())
@settings(max_examples=50)
def test_any_padded_batch(request):
    check(request)


# Ragged batches.


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", SEQUENCES)
def test_rows_as_sequences(case, training, with_sink):
    """Among them single queries whose keys begin behind the padding of the first row."""
    mask, *lengths = SEQUENCES[case]
    inputs = inputs_of(mask, *lengths, sink=sinks() if with_sink else None)
    request = request_of(inputs, plan_of("cudnn_fe", "to_varlen", training=training))
    detached = request._replace(**{n: getattr(request, n).detach() for n in NAMES[:3]})
    out, lse = fallback.forward(detached)
    found = padded(request, out, inputs.query.shape[0]), padded_lse(request, lse, inputs.query)
    tensors = (inputs.query, inputs.key, inputs.value)
    wanted = attend(*tensors, allowed=allowed_of(mask, inputs), sink=inputs.sink)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-5)
    check(request)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(band, with_sink):
    """Among them queries without keys, keys without queries and more queries than keys."""
    check(ragged_request(left=band[0], right=band[1], sink=sinks() if with_sink else None))


@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 1)])
def test_slopes_of_sequences(band):
    check(ragged_request(([3, 0, 5, 1],) * 2, alibi_slopes=SLOPES, softcap=2.0, left=band[0], right=band[1]))


@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_keys_that_are_left_out_have_no_part_in_anything(band):
    used = torch.tensor([2, 0, 6, 3], dtype=torch.int32)
    request = ragged_request(([3, 2, 4, 1], [5, 3, 6, 4]), used_kv=used, left=band[0], right=band[1])
    check(request)
    out, lse = fallback.forward(request)
    grads = fallback.backward(request, Launched(out, lse), torch.randn_like(out))
    unused = torch.cat([torch.arange(n) >= u for n, u in zip([5, 3, 6, 4], used.tolist(), strict=True)])
    assert not grads.key[unused].any()
    assert not grads.value[unused].any()


def test_keys_before_the_first_sequence_are_left_out():
    used = torch.tensor([4, 2], dtype=torch.int32)
    request = ragged_request(([2, 1], [4, 3]), used_kv=used, left=3, right=1)
    key, value = (torch.cat([torch.randn(3, 2, 8).double(), t]) for t in (request.key, request.value))
    check(request._replace(key=key, value=value, cu_seqlens_kv=request.cu_seqlens_kv + 3))


@st.composite
def ragged_requests(draw):
    heads_kv = draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    counts = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5)
    counts = draw(counts.filter(lambda c: all(map(any, list(zip(*c, strict=True))[:2]))))
    dtype, (qk, v) = draw(DTYPES), draw(st.sampled_from([(1, 3), (5, 8)]))
    fields = draw(extras(heads, 1)) | {"alibi_slopes": None}
    queries, keys, used = zip(*counts, strict=True)
    shapes = ((sum(queries), heads, qk), (sum(keys), heads_kv, qk), (sum(keys), heads_kv, v))
    fields |= {n: torch.randn(shape).to(dtype) for n, shape in zip(NAMES, shapes, strict=False)}
    if draw(st.booleans()):
        used = [min(u, n) for u, n in zip(used, keys, strict=True)]
        fields["used_kv"] = torch.tensor(used, dtype=torch.int32)
    return ragged_request((queries, keys), **fields)


@given(ragged_requests())
@settings(max_examples=50)
def test_any_ragged_batch(request):
    check(request)


# Numbers and tiles.


@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, -1)])
@pytest.mark.parametrize("ragged", [False, True])
def test_scores_far_below_zero(ragged, band):
    """Weights are made from scores of thousands less a log-sum-exp that float32 rounds to 1e-4."""
    made = ragged_request() if ragged else padded_request(dims=(8, 8))
    request = made._replace(query=made.query + 40, key=made.key - 40, left=band[0], right=band[1])
    lse = defined(request)[1]
    assert lse[lse > -math.inf].max() < -2000
    check(request, loosely=100.0)


@pytest.mark.parametrize("score_elements", [64, 512])
@pytest.mark.parametrize("heads_first", [False, True])
def test_several_tiles(heads_first, score_elements):
    request = padded_request(lengths=(131, 77), left=70, right=20, sink=sinks(), heads_first=heads_first)
    with tiling(score_elements) as plans:
        check(request)
    assert all(len(p.blocks) > 1 and len(p.chunks) > 1 for p in plans)
    assert any(len(block.keys) > 1 for p in plans for block in p.blocks)


# Gradients alone, as a pair asks for them.

TENSORS = ("key_keep", "document_ids_q", "document_ids_kv", "diagonal")
MASKS = {
    "band": ({"band_lo": -3, "band_hi": 2}, ()),
    "documents": ({"band_hi": 1, "document_bounds": (0, 4, 9)}, TENSORS[1:3]),
    "padding": ({"band_lo": -4}, TENSORS[:1]),
    "sequences": ({"band_lo": -2, "band_hi": 1}, TENSORS),
}
"""Numbers of a mask, and which tensors it has."""
EVERY = (True, True, True, True)


def parts():
    """Return query, key, value, sink and slopes of one call, and then what `TENSORS` names."""
    made = padded_request(lengths=(9, 9), heads_first=True, sink=sinks(dtype=torch.float64))
    keep = torch.arange(9) < torch.tensor([[6], [0]])
    ids = (torch.arange(9)[None] >= 4).int()
    diagonal = torch.arange(9, dtype=torch.int32) + torch.tensor([1] * 4 + [-1] * 5, dtype=torch.int32)
    return (*made[:3], made.sink, SLOPES, keep, ids, ids.clone(), diagonal)


def asked_of(case, query, key, value, sink, slopes, *rest):
    numbers, names = MASKS[case]
    taken = {n: t for n, t in zip(TENSORS, rest, strict=True) if n in names}
    mask = LoweredMask(**numbers, **taken)
    return Inputs(query, key, value, mask, sink=sink, alibi_slopes=slopes, scale=0.3, softcap=3.0)


def problem(case):
    """Return the tensors of a call, output, log-sum-exp and a cotangent, and the gradients by definition."""
    tensors = parts()
    leaves = [t.clone().requires_grad_() for t in tensors[:4]]
    inputs = asked_of(case, *leaves, *tensors[4:])
    allowed = allowed_by(inputs.mask, (2, 4, 9, 9))
    said = {n: getattr(inputs, n) for n in ("scale", "softcap", "sink", "alibi_slopes")}
    want, lse = attend(*leaves[:3], allowed=allowed, **said)
    cotangent = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, cotangent)
    return tensors, (want.detach(), lse.detach().float(), cotangent), wanted


def close(found, wanted, asked):
    for name, got, want, wants in zip(NAMES, found, wanted, asked, strict=True):
        assert (got is not None) == wants, name
        if got is not None:
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert error(got, want, floor=1.0) <= GRADIENT[torch.float64], name


@pytest.mark.parametrize("case", MASKS)
def test_only_what_is_wanted_is_computed(case):
    tensors, ran, wanted = problem(case)
    for asked in product([False, True], repeat=4):
        close(from_lse.gradients(asked_of(case, *tensors), *ran, asked), wanted, asked)


@pytest.mark.parametrize("case", MASKS)
def test_autocast_changes_nothing(case):
    tensors, ran, wanted = problem(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(from_lse.gradients(asked_of(case, *tensors), *ran, EVERY), wanted, EVERY)


def traced(case, asked):
    """Return `gradients` as a function of tensors alone, with those that are not asked for left out."""

    def run(*tensors):
        found = from_lse.gradients(asked_of(case, *tensors[:-3]), *tensors[-3:], asked)
        return [g for g in found if g is not None]

    return run


@pytest.mark.parametrize("asked", [EVERY, (False, True, False, True), (True, False, False, False)], ids=str)
@pytest.mark.parametrize("case", MASKS)
def test_a_tracer_sees_one_operator(case, asked):
    tensors, ran, wanted = problem(case)
    graph = make_fx(traced(case, asked), tracing_mode="fake")(*tensors, *ran)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count("attnroute.chunked_backward.default") == 1
    assert not [t for t in targets if "bmm" in t]
    found = iter(graph(*tensors, *ran))
    close([next(found) if wants else None for wants in asked], wanted, asked)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", MASKS)
def test_inside_of_a_graph(case, backend):
    torch._dynamo.reset()
    tensors, ran, wanted = problem(case)
    inside = torch.compiler.allow_in_graph(traced(case, EVERY))

    def call(*given_tensors):
        return [grad * 2 for grad in inside(*given_tensors)]

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    close(compiled(*tensors, *ran), [grad * 2 for grad in wanted], EVERY)
