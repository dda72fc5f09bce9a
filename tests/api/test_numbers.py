"""Every call equals the float64 reference, and the operator that ran is the one the decision named."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.spy import Spy

import attnroute
from attnroute import masks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTHS = st.sampled_from([1, 2, 3, 7, 8, 13, 16, 33])


@st.composite
def problems(draw):
    """Draw tensors in odd shapes and layouts, and everything that may mask or change the scores."""
    batch, groups, heads_kv = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
    )
    seqlen_q, seqlen_kv = draw(LENGTHS), draw(LENGTHS)
    head_dim_qk = draw(st.sampled_from([1, 4, 8, 20, 64]))
    head_dim_v = draw(st.sampled_from([head_dim_qk, head_dim_qk, 12]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(FLOATS))

    shift = draw(st.sampled_from([0.0, 3.0]))  # With 3.0 every score is far below zero: -72 at head_dim 64.

    def tensor(heads, length, width, mean=0.0):
        form = draw(st.sampled_from(["packed", "bshd", "row gap", "last stride", "shifted"]))
        values = torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64) + mean
        return _stored(values.to(dtype), form)

    query = tensor(heads_kv * groups, seqlen_q, head_dim_qk, shift)
    key = tensor(heads_kv, seqlen_kv, head_dim_qk, -shift)
    value = tensor(heads_kv, seqlen_kv, head_dim_v)
    shape = (batch, heads_kv * groups, seqlen_q, seqlen_kv)
    mask, allowed = draw(mask_of(shape, generator))
    bias = draw(st.sampled_from([None, None, (1,), (seqlen_q, seqlen_kv), (batch, 1, 1, seqlen_kv), shape]))
    if bias is not None:
        bias = torch.randn(bias, generator=generator, dtype=torch.float64).to(
            draw(st.sampled_from([dtype, torch.float32]))
        )
        if draw(st.booleans()):
            bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.3, -math.inf)
    return query, key, value, mask, allowed, bias, draw(st.booleans())


def _stored(values, form):
    """Return equal values in other memory: views that a model or a cache would pass."""
    if form == "bshd":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "row gap":
        return torch.cat([values, values], -1)[..., : values.shape[-1]]
    if form == "last stride":
        return values.transpose(2, 3).contiguous().transpose(2, 3)
    if form == "shifted":
        flat = torch.empty(values.numel() + 1, dtype=values.dtype)[1:]
        return flat.copy_(values.flatten()).view(values.shape)
    return values


def mask_of(shape, generator):
    batch, _, seqlen_q, seqlen_kv = shape

    @st.composite
    def build(draw):
        kinds = draw(
            st.lists(
                st.sampled_from(["causal", "window", "padding", "documents", "dense"]),
                max_size=2,
                unique=True,
            )
        )
        mask, allowed = None, torch.ones(1, 1, seqlen_q, seqlen_kv, dtype=torch.bool)
        for kind in kinds:
            if kind == "documents" and seqlen_q != seqlen_kv:
                continue
            node, part = _node(draw, kind, shape, generator)
            mask = node if mask is None else mask & node
            allowed = allowed & part
        return mask, allowed.expand(batch, -1, -1, -1)

    return build()


def _node(draw, kind, shape, generator):
    batch, heads, seqlen_q, seqlen_kv = shape
    rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None]
    alignment = draw(st.sampled_from(["top_left", "bottom_right"]))
    offset = seqlen_kv - seqlen_q if alignment == "bottom_right" else 0
    if kind == "causal":
        return masks.Causal(alignment), (columns <= rows + offset)[None, None]
    if kind == "window":
        left, right = draw(st.sampled_from([None, 0, 2, 9])), draw(st.sampled_from([None, 0, 3]))
        part = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
        part = part if left is None else part & (columns >= rows + offset - left)
        part = part if right is None else part & (columns <= rows + offset + right)
        return masks.Window(left, right, alignment), part[None, None]
    if kind == "padding":
        counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
        kept = columns < torch.tensor(counts)[:, None]
        form = draw(st.sampled_from(["ints", "tensor", "left", "keep"]))
        if form == "left":
            return masks.KeyPadding(left=counts), ~kept[:, None, None]
        node = {
            "ints": {"lengths": counts},
            "tensor": {"lengths": torch.tensor(counts)},
            "keep": {"keep": kept},
        }[form]
        return masks.KeyPadding(**node), kept[:, None, None]
    if kind == "documents":
        cut = draw(st.integers(0, seqlen_q))
        ids = (torch.arange(seqlen_q) >= cut).int()
        forms = {"lengths": [cut, seqlen_q - cut], "ids": ids, "cu_seqlens": torch.tensor([0, cut, seqlen_q])}
        form = draw(st.sampled_from(sorted(forms)))
        return masks.Documents(**{form: forms[form]}), (ids[:, None] == ids)[None, None]
    dense = draw(
        st.sampled_from([(seqlen_q, seqlen_kv), (batch, 1, 1, seqlen_kv), (1, heads, seqlen_q, seqlen_kv)])
    )
    tensor = torch.rand(dense, generator=generator) < 0.6
    return masks.Dense(tensor), tensor.expand(batch, heads, seqlen_q, seqlen_kv)


def _check(got, want, dtype, what, floor=0.1):
    assert error(got, want, floor) <= TOLERANCE[dtype], f"{what}: {error(got, want, floor):.3g}"


@given(problems(), st.sampled_from(["bhsd", "bshd"]))
def test_inference_equals_the_reference(problem, layout):
    query, key, value, mask, allowed, bias, causal = problem
    arguments = {"bias": bias, "return_lse": True}
    if causal:
        arguments |= {"is_causal": True, "causal_alignment": "bottom_right"}
        allowed = allowed & _bottom_right(query, key)
    want, want_lse = attend(query, key, value, allowed=allowed, bias=bias)
    given_tensors = [t.transpose(1, 2) if layout == "bshd" else t for t in (query, key, value)]
    decision = attnroute.explain(*given_tensors, mask, layout=layout, **arguments)
    with torch.no_grad(), Spy() as spy:
        out, lse = attnroute.attention(*given_tensors, mask, layout=layout, **arguments)
    assert spy.backends == {decision.selected}
    out = out.transpose(1, 2) if layout == "bshd" else out
    _check(out, want, query.dtype, "out")
    assert (out[want_lse == -math.inf] == 0).all()
    finite = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, finite)
    assert lse.dtype == torch.float32
    assert (lse.double() - want_lse)[finite].abs().max().item() <= 2e-2 if finite.any() else True


@given(problems())
def test_gradients_equal_the_reference(problem):
    query, key, value, mask, allowed, bias, causal = problem
    assume(query.dtype in (torch.float32, torch.float64))
    inputs = [t.detach().requires_grad_() for t in (query, key, value)]
    trained = inputs
    if bias is not None:
        bias = bias.detach().requires_grad_()
        trained = [*inputs, bias]
    arguments = {"is_causal": True, "causal_alignment": "top_left"} if causal else {}
    if causal:
        allowed = allowed & _top_left(query, key)
    decision = attnroute.explain(*inputs, mask, bias=bias, **arguments)
    with Spy() as spy:
        out = attnroute.attention(*inputs, mask, bias=bias, **arguments)
    assert spy.backends == {decision.selected}
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, trained, cotangent.to(out.dtype))
    want_out, _ = attend(*inputs, allowed=allowed, bias=bias)
    want = torch.autograd.grad(want_out, trained, cotangent.to(out.dtype).double())
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, want, strict=False):
        # A gradient is a difference of terms of order one, so its rounding is not relative to itself.
        _check(a, b, query.dtype, name, floor=2.0)


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
@given(problem=problems())
def test_every_backend_that_accepts_is_right(backend, problem):
    query, key, value, mask, allowed, bias, _ = problem
    decision = attnroute.explain(query, key, value, mask, bias=bias, backend=backend)
    assume(decision.selected == backend)
    with Spy() as spy:
        out = attnroute.attention(query, key, value, mask, bias=bias, backend=backend)
    assert spy.backends == {backend}
    want, want_lse = attend(query, key, value, allowed=allowed, bias=bias)
    _check(out, want, query.dtype, backend)
    assert (out[want_lse == -math.inf] == 0).all()


def _top_left(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()


def _bottom_right(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
