"""`chunked` against dense float64 attention: any mask, any feature, any tiling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_compare import LSE_TOLERANCE, TOLERANCE, Drawn, chunked_attention, compare
from support.chunked_reference import error, reference, wide
from support.chunked_strategies import features, masks
from support.chunked_tiling import tiling

from attnroute.masks.lowered.form import FULL, LoweredMask

LENGTH = st.sampled_from([1, 2, 5, 17, 33, 64, 70])


@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=120)
def test_output_lse_and_every_gradient(data, dtype, seed):
    drawn = Drawn(seed, dtype)
    batch, heads_kv, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    sizes = (batch, heads_kv * group, data.draw(LENGTH), data.draw(LENGTH))
    tensors = drawn.tensors(sizes, *data.draw(st.sampled_from([(3, 5), (8, 8), (20, 12)])), heads_kv=heads_kv)
    mask = data.draw(masks(*sizes, drawn.generator))
    chosen = data.draw(features(dtype, *sizes, drawn.generator))
    with tiling(data.draw(st.sampled_from([1, 600, 2**24])), data.draw(st.sampled_from([1, 8, 64]))):
        compare(drawn, tensors, mask, chosen, block_q=data.draw(st.sampled_from([None, 1, 7, 16])))


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
