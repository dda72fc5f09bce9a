"""A float mask beside a bias, each with a gradient in its dtype; a bias of more digits than the query."""

from __future__ import annotations

import math

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import Spy

import attnroute

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:, :1].expand(*t.shape),
}
BACKENDS = ("chunked", "math", None)


def problem(dtype):
    torch.manual_seed(0)
    return [torch.randn(2, 2, 20, 16, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


def normal(dtype, layout="contiguous", factor=1.0):
    return LAYOUTS[layout]((torch.randn(2, 2, 20, 20, dtype=torch.float64) * factor).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("second", DTYPES)
@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("query", [torch.float32, torch.float64])
def test_the_sum_has_the_digits_of_the_query(query, first, second, layout, backend):
    inputs = problem(query)
    mask, bias = normal(first, layout, 30.0), normal(second, layout, 30.0)
    out = attnroute.attention(*inputs, mask, bias=bias, backend=backend)
    want, _ = attend(*inputs, bias=mask.double() + bias.double())
    assert error(out, want) <= 10 * TOLERANCE[query] + (1e-4 if query != torch.float64 else 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("second", HALVES)
@pytest.mark.parametrize("first", HALVES)
@pytest.mark.parametrize("query", [*HALVES, torch.float32])
def test_gradients_come_in_the_dtype_of_each(query, first, second, backend):
    inputs = problem(query)
    mask, bias = normal(first).requires_grad_(), normal(second)[:1].clone().requires_grad_()
    out = attnroute.attention(*inputs, mask, bias=bias, backend=backend)
    grad = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, (*inputs, mask, bias), grad.to(out.dtype))
    copies = [t.detach().double().requires_grad_() for t in (*inputs, mask, bias)]
    want, _ = attend(*copies[:3], bias=copies[3] + copies[4])
    true = torch.autograd.grad(want, copies, grad)
    tolerance = 4 * max(TOLERANCE[dtype] for dtype in (query, first, second))
    assert error(out, want) <= tolerance
    for got, right, source in zip(found, true, (*inputs, mask, bias), strict=True):
        assert got.dtype == source.dtype
        assert error(got, right) <= tolerance


LARGE = (-60000.0, -1e4, -math.inf, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("first", LARGE)
@pytest.mark.parametrize("second", LARGE)
def test_large_negative_numbers_move_away_and_only_minus_infinity_leaves_out(
    query, dtype, first, second, backend
):
    """A whole row may be far away: then its keys share the weight, and none of them is left out."""
    inputs = [t.detach() for t in problem(query)]
    mask = torch.zeros(20, 20, dtype=dtype)
    bias = torch.zeros(1, 1, 20, 20, dtype=dtype)
    mask[:, 10:], bias[..., 10:] = first, second
    mask[5], bias[..., 5, :] = first, second
    mask[6], bias[..., 6, :7] = first, second
    with torch.no_grad():
        out = attnroute.attention(*inputs, mask, bias=bias, backend=backend)
        want, _ = attend(*inputs, bias=mask.double() + bias.double())
    # Scores of a float32 query lose what they have behind the digits of 120,000.
    coarse = query not in (torch.float64, torch.float16)
    rows = [n for n in range(20) if not (coarse and n in (5, 6))]
    assert error(out[:, :, rows], want[:, :, rows]) <= 10 * TOLERANCE[query] + 1e-5
    assert bool(out[:, :, 5].any()) == (first + second > -math.inf)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compiled(layout):
    inputs = [t.detach() for t in problem(torch.float32)]
    mask, bias = normal(torch.float16, factor=30.0), normal(torch.float16, factor=30.0)
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in inputs]
    run = torch.compile(attnroute.attention, backend="aot_eager", fullgraph=True)
    out = run(*given, mask, bias=bias, layout=layout)
    out = out.transpose(1, 2) if layout == "bshd" else out
    assert error(out, attend(*inputs, bias=mask.double() + bias.double())[0]) <= 3e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("query", HALVES)
def test_the_cpu_kernel_takes_a_float32_bias_beside_16_bits(query, layout):
    inputs, bias = problem(query), normal(torch.float32, layout)
    with Spy() as spy:
        out = attnroute.attention(*inputs, bias=bias)
    assert {"aten::_scaled_dot_product_flash_attention_for_cpu"} == {
        name for name in spy.seen if "attention" in name or "_to_copy" in name
    }
    grad = torch.randn_like(out)
    copies = [t.detach().double().requires_grad_() for t in inputs]
    want, _ = attend(*copies, bias=bias.double())
    assert error(out, want) <= TOLERANCE[query]
    for found, true in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, copies, grad.double()), strict=True
    ):
        assert error(found, true) <= 4 * TOLERANCE[query]
