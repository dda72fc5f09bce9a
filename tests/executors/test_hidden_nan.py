"""NaN in a query, which torch's CPU kernel hides and no decision can see: docs/deviations.md tells of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnroute

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SPOILT = 3


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 8, 16, generator=generator).to(dtype) for _ in range(3))
    query[:, :, SPOILT, 5] = torch.nan
    return query, key, value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_gives_what_stock_gives_with_the_same_kernel(dtype, is_causal):
    tensors = inputs(dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    found = attnroute.attention(*tensors, is_causal=is_causal, backend="flash")
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "math"])
def test_others_show_it_and_keep_it_to_its_query(backend, dtype, is_causal):
    out = attnroute.attention(*inputs(dtype), is_causal=is_causal, backend=backend)
    assert out[:, :, SPOILT].isnan().all()
    assert out.isnan().sum() == out[:, :, SPOILT].numel()
