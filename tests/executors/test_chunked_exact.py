"""`chunked` against dense float64 attention: any mask, any feature, any tiling."""

from __future__ import annotations

import pytest
import torch
from executors.chunked_reference import error, reference, wide
from executors.chunked_tiling import tiling
from hypothesis import given, settings
from hypothesis import strategies as st

from attnroute.executors.chunked import chunked_attention
from attnroute.masks.lowered import FULL, LoweredMask

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 5e-6
LENGTH = st.sampled_from([1, 2, 5, 17, 33, 64, 70])
CHANCE = st.integers(0, 2).map(lambda n: n == 0)


@st.composite
def masks(draw, batch, heads, seqlen_q, seqlen_kv, generator):
    """Draw a conjunction of any of the parts that a lowered mask can have."""
    parts = {}
    edge = st.sampled_from([0, seqlen_kv - seqlen_q]) | st.integers(-40, 40)
    if draw(CHANCE):
        parts["band_lo"] = draw(edge)
    if draw(st.booleans()):
        parts["band_hi"] = draw(edge)
    if draw(CHANCE):
        rows = draw(st.sampled_from([1, batch]))
        parts["key_keep"] = torch.rand(rows, seqlen_kv, generator=generator) < 0.7
    if draw(CHANCE):
        parts |= draw(documents(batch, seqlen_q, seqlen_kv, generator))
    if draw(CHANCE):
        shape = broadcast(draw, batch, heads, seqlen_q, seqlen_kv)
        parts["dense"] = torch.rand(shape, generator=generator) < 0.7
    return LoweredMask(**parts)


@st.composite
def documents(draw, batch, seqlen_q, seqlen_kv, generator):
    if seqlen_q == seqlen_kv and draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, seqlen_q), max_size=3))
        bounds = (0, *sorted(inner), seqlen_q)
        ids = torch.bucketize(torch.arange(seqlen_q), torch.tensor(bounds[1:]), right=True)[None]
        return {"document_ids_q": ids, "document_ids_kv": ids, "document_bounds": bounds}
    rows = draw(st.sampled_from([1, batch]))
    return {
        "document_ids_q": torch.randint(0, 3, (rows, seqlen_q), generator=generator),
        "document_ids_kv": torch.randint(0, 3, (rows, seqlen_kv), generator=generator),
    }


def broadcast(draw, *sizes):
    return tuple(draw(st.sampled_from([1, size])) for size in sizes)


@st.composite
def features(draw, dtype, batch, heads, seqlen_q, seqlen_kv, generator):
    """Draw keyword arguments: bias, softcap, sink, ALiBi, scale."""

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    chosen = {"scale": draw(st.sampled_from([None, None, 0.0, -0.6]))}
    if draw(CHANCE):
        shape = broadcast(draw, batch, heads, seqlen_q, seqlen_kv)[draw(st.integers(0, 2)) :]
        bias = normal(*shape).to(draw(st.sampled_from([dtype, torch.float64])))
        if draw(CHANCE):
            bias[torch.rand(shape, generator=generator) < 0.4] = float("-inf")
        chosen["bias"] = bias.requires_grad_(draw(st.booleans()))
    if draw(CHANCE):
        chosen["softcap"] = 1.5
    if draw(CHANCE):
        chosen["sink"] = normal(heads).requires_grad_()
    if draw(CHANCE):
        shape = draw(st.sampled_from([(heads,), (batch, heads)]))
        # In half precision the output's rounding, times every distance, can exceed a gradient that cancels.
        wants_grad = dtype in {torch.float32, torch.float64} and draw(st.booleans())
        chosen["alibi_slopes"] = normal(*shape).abs().requires_grad_(wants_grad)
    return chosen


@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=120)
def test_output_lse_and_every_gradient(data, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, heads_kv, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    seqlen_q, seqlen_kv, heads = data.draw(LENGTH), data.draw(LENGTH), heads_kv * group
    head_dim_qk, head_dim_v = data.draw(st.sampled_from([(3, 5), (8, 8), (20, 12)]))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query = normal(batch, heads, seqlen_q, head_dim_qk).requires_grad_()
    key = normal(batch, heads_kv, seqlen_kv, head_dim_qk).requires_grad_()
    value = normal(batch, heads_kv, seqlen_kv, head_dim_v).requires_grad_()
    mask = data.draw(masks(batch, heads, seqlen_q, seqlen_kv, generator))
    chosen = data.draw(features(dtype, batch, heads, seqlen_q, seqlen_kv, generator))
    block_q = data.draw(st.sampled_from([None, 1, 7, 16]))
    with tiling(data.draw(st.sampled_from([1, 600, 2**24])), data.draw(st.sampled_from([1, 8, 64]))):
        out, lse = chunked_attention(query, key, value, mask, block_q=block_q, **chosen)
        grad_out, grad_lse = normal(*out.shape), normal(*lse.shape).float()
        has_key = torch.isfinite(lse)
        leaves = [query, key, value, *(t for t in chosen.values() if torch.is_tensor(t) and t.requires_grad)]
        grads = torch.autograd.grad(
            [out, lse], leaves, [grad_out, grad_lse.masked_fill(~has_key, float("nan"))]
        )

    wide_leaves = {
        id(leaf): wide(leaf) for leaf in (query, key, value, *chosen.values()) if torch.is_tensor(leaf)
    }
    arguments = {name: wide_leaves.get(id(value), value) for name, value in chosen.items()}
    want_out, want_lse = reference(*(wide_leaves[id(t)] for t in (query, key, value)), mask, **arguments)
    wanted = torch.autograd.grad(
        [want_out, want_lse],
        [wide_leaves[id(leaf)] for leaf in leaves],
        [grad_out.double(), grad_lse.double().masked_fill(~has_key, 0.0)],
    )
    assert torch.equal(has_key, torch.isfinite(want_lse))
    assert not out[~has_key].any()
    assert fits(out, want_out, dtype)
    assert error(lse[has_key], want_lse[has_key]) < max(TOLERANCE[dtype] / 100, LSE_TOLERANCE)
    for leaf, got, want in zip(leaves, grads, wanted, strict=True):
        assert got.shape == leaf.shape
        assert got.dtype == leaf.dtype
        assert close(got, want, TOLERANCE[dtype], lse.numel())


def fits(got, want, dtype):
    """Compare relative to `want`; where it is below what the dtype can round to, to that."""
    smallest = torch.finfo(dtype).smallest_normal * got.numel() ** 0.5
    difference = (got.double() - want).detach().norm()
    return error(got, want) < TOLERANCE[dtype] or float(difference) < smallest


def close(got, want, tolerance, rows):
    """Compare relative to `want`; where its terms cancel, to the rounding of as many terms of size 1."""
    return error(got, want) < tolerance or float((got.double() - want).norm()) < tolerance * rows**0.5


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("lengths", [(40, 40), (40, 90), (90, 40)])
def test_causal_in_several_query_and_key_blocks(dtype, lengths):
    torch.manual_seed(0)
    seqlen_q, seqlen_kv = lengths
    query = torch.randn(2, 4, seqlen_q, 16, dtype=torch.float64).to(dtype)
    key, value = torch.randn(2, 2, 2, seqlen_kv, 16, dtype=torch.float64).to(dtype)
    mask = LoweredMask(band_hi=seqlen_kv - seqlen_q)
    with tiling(300, 8) as plans:
        out, lse = chunked_attention(query, key, value, mask, block_q=16)
    assert max(len(block.keys) for block in plans[-1].blocks) > 1
    assert len(plans[-1].chunks) > 1
    want, want_lse = reference(wide(query), wide(key), wide(value), mask)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert error(out, want) < TOLERANCE[dtype]
    finite = torch.isfinite(want_lse)
    assert error(lse[finite], want_lse[finite]) < 1e-2 * TOLERANCE[dtype] + LSE_TOLERANCE


def test_gradcheck():
    torch.manual_seed(1)
    query = torch.randn(1, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, 7, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 1, 7, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, bias, sink, slopes):
        return chunked_attention(
            query, key, value, LoweredMask(band_hi=2), bias=bias, sink=sink, alibi_slopes=slopes, softcap=2.0,
            block_q=2,
        )[0]  # fmt: skip

    with tiling(12, 2):
        assert torch.autograd.gradcheck(attend, (query, key, value, bias, sink, slopes))


@pytest.mark.parametrize("shape", ["bshd", "sliced", "stride_0", "reversed_dims"])
def test_strides_do_not_matter(shape):
    torch.manual_seed(2)
    sizes = ((2, 4, 33, 8), (2, 2, 40, 8), (2, 2, 40, 8))
    make = {
        "bshd": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
        "sliced": lambda b, h, s, d: torch.randn(b, h + 1, s + 3, 2 * d)[:, 1:, 2 : s + 2, ::2],
        "stride_0": lambda b, h, s, d: torch.randn(b, 1, s, d).expand(b, h, s, d),
        "reversed_dims": lambda b, h, s, d: torch.randn(d, s, h, b).permute(3, 2, 1, 0),
    }[shape]
    tensors = [make(*size).requires_grad_() for size in sizes]
    packed = [t.detach().contiguous().requires_grad_() for t in tensors]
    mask = LoweredMask(band_hi=7)
    with tiling(700, 8):
        results = [chunked_attention(*args, mask, block_q=9) for args in (tensors, packed)]
        grads = [
            torch.autograd.grad(r[0].sum() + r[1].sum(), a)
            for r, a in zip(results, (tensors, packed), strict=True)
        ]
    for got, want in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        assert error(got, want) < 1e-6


def test_heads_that_share_a_key_head_equal_repeated_ones():
    torch.manual_seed(3)
    query = torch.randn(2, 6, 20, 8)
    key, value = torch.randn(2, 2, 2, 20, 8)
    out, lse = chunked_attention(query, key, value, FULL)
    repeated = [t.repeat_interleave(3, 1) for t in (key, value)]
    want, want_lse = chunked_attention(query, *repeated, FULL)
    assert error(out, want) < 1e-6
    assert error(lse, want_lse) < 1e-6


def test_bounds_alone_mask_documents():
    torch.manual_seed(4)
    query, key, value = torch.randn(3, 1, 2, 50, 8)
    bounds = (0, 13, 13, 40, 50)
    ids = torch.bucketize(torch.arange(50), torch.tensor(bounds[1:]), right=True)[None]
    got, _ = chunked_attention(query, key, value, LoweredMask(document_bounds=bounds), block_q=8)
    want, _ = reference(
        wide(query), wide(key), wide(value), LoweredMask(document_ids_q=ids, document_ids_kv=ids)
    )
    assert error(got, want) < 1e-5
