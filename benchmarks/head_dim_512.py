"""Head dimension 512 with shared heads: the cuDNN frontend's operator, the same by `attention()`, and stock.

The difference between the first two is what attnroute costs the host, as far as the kernel does not hide it.

python benchmarks/head_dim_512.py --out results.json
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
from backends import versions
from common import Run, progress, save
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention

SHAPES = {
    "d512_4k": (1, 8, 4, 4096),
    "d512_1k": (1, 8, 4, 1024),
    "d512_8k": (1, 16, 8, 8192),
}
"""Batch, query heads, key heads and length."""
HEAD_DIM = 512
STOCK_LIMIT = 4096
"""Tokens up to which stock is timed, which holds all scores."""


def runs_of(name: str) -> dict[str, Run]:
    """Return what is timed for one shape; all of it is causal."""
    batch, heads, heads_kv, length = SHAPES[name]

    def make(count: int) -> torch.Tensor:
        return torch.randn(batch, count, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    query, key, value = make(heads), make(heads_kv), make(heads_kv)
    importlib.import_module("cudnn.sdpa.fwd.torch_op")
    operator, scale = torch.ops.cudnn.sdpa_fwd, HEAD_DIM**-0.5
    runs: dict[str, Run] = {
        "operator": lambda: operator(query, key, value, scale, is_causal=True),
        "operator_without_lse": lambda: operator(query, key, value, scale, is_causal=True, return_lse=False),
        "attention_cudnn_fe": lambda: attention(query, key, value, is_causal=True, backend="cudnn_fe"),
        "attention": lambda: attention(query, key, value, is_causal=True),
    }
    if length <= STOCK_LIMIT:
        runs["stock"] = lambda: sdpa(query, key, value, is_causal=True, enable_gqa=True)
    return runs


def main() -> None:
    """Time every shape and write one file."""
    from triton.testing import do_bench

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {"packages": versions(), "ms": {}}
    with torch.no_grad():
        for name in SHAPES:
            times = {
                run: round(do_bench(call, warmup=25, rep=200, return_mode="median"), 4)
                for run, call in runs_of(name).items()
            }
            results["ms"][name] = times
            progress(f"{name}: {times}")
            save(options.out, results)


if __name__ == "__main__":
    main()
