"""Facts about time: two kernels on long inputs, the host's share of a call, and one dtype that it needs."""

# ruff: noqa: SLF001 - torch's names for the operators begin with an underscore.

from __future__ import annotations

import time

import torch
from common import Run, side_by_side
from facts_common import DEVICE, Fact, band, flash, inputs, lower_flash, packed_flash
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

HOST_ROUNDS = 7
HOST_CALLS = 430


def rounded(times: dict[str, float]) -> dict[str, float]:
    """Round times to a ten-thousandth of their unit."""
    return {name: round(value, 4) for name, value in times.items()}


def window_16k() -> dict[str, float]:
    """Time a window of 4096 keys over 16384 tokens, forward, in milliseconds."""
    tensors = inputs(
        batch=1, heads_q=32, heads_kv=8, seqlen_q=16384, seqlen_kv=16384, head_dim=128, grad=False
    )
    mask = band(16384, 16384, -4095, 0)
    window = {"window_size_left": 4095, "window_size_right": 0}
    runs: dict[str, Run] = {
        "flash_win4096": lambda: lower_flash(*tensors, is_causal=False, **window),
        "flash_causal": lambda: flash(*tensors, is_causal=True),
        "stock_mask": lambda: sdpa(*tensors, attn_mask=mask, enable_gqa=True),
    }
    return rounded(side_by_side(runs, rounds=3))


def documents_8k() -> float:
    """Time eight packed causal documents of 1024 tokens, forward and backward, in milliseconds."""
    tensors = inputs(batch=1, heads_q=32, heads_kv=8, seqlen_q=8192, seqlen_kv=8192, head_dim=128)
    bounds = torch.arange(0, 8193, 1024, dtype=torch.int32, device=DEVICE)
    cotangent = torch.randn_like(tensors[0])

    def train() -> tuple[Tensor, ...]:
        out, _ = packed_flash(tensors, bounds, 1024, is_causal=True)
        return torch.autograd.grad(out, tensors, cotangent)

    return rounded(side_by_side({"train": train}, rounds=3))["train"]


def host_microseconds(run: Run) -> float:
    """Return the host's time for one call, the best of several rounds, in microseconds."""
    for _ in range(200):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(HOST_ROUNDS):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / HOST_CALLS)
    return round(min(times) * 1e6, 2)


def host_costs() -> dict[str, float]:
    """Time, on a tiny inference call, torch's chooser, the operators, and reading a tensor's properties."""
    query, key, value = tensors = inputs(
        batch=1, heads_q=2, heads_kv=2, seqlen_q=16, seqlen_kv=16, grad=False
    )
    rows = tuple(t.transpose(1, 2) for t in tensors)
    lower = torch.ops.aten._flash_attention_forward.default
    runs: dict[str, Run] = {
        "sdpa": lambda: sdpa(query, key, value),
        "cudnn": lambda: torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, False, 0.0, False, False
        ),
        "flash": lambda: torch._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False),
        "eff": lambda: torch._scaled_dot_product_efficient_attention(
            query, key, value, None, False, 0.0, False
        ),
        "fafwd": lambda: lower(*rows, None, None, 16, 16, 0.0, False, False),
        "data_ptr": query.data_ptr,
        "stride": query.stride,
        "shape": lambda: query.shape,
    }
    return {name: host_microseconds(run) for name, run in runs.items()}


def wide_product() -> str:
    """Return the dtype of a bfloat16 batched product that was asked for in float32."""
    matrix = torch.randn(2, 8, 8, device=DEVICE).bfloat16()
    return str(torch.bmm(matrix, matrix, out_dtype=torch.float32).dtype)


FACTS: dict[str, Fact] = {
    "time window16k": window_16k,
    "time docs8k train": documents_8k,
    "host us": host_costs,
    "bmm out_dtype": wide_product,
}
