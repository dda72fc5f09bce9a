"""Where `chunked` overtakes the memory-efficient kernel above head_dim 256, both through `attention()`.

python benchmarks/wide_heads.py --out results.json``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import Run, progress, save, side_by_side

from attnroute import attention

CALLS = (
    (8, 16, 8, 512, 512, 320, False),
    (8, 16, 8, 512, 512, 512, False),
    (1, 16, 8, 1024, 1024, 512, False),
    (1, 16, 8, 2048, 2048, 512, False),
    (1, 8, 8, 4096, 4096, 320, False),
    (8, 16, 8, 512, 512, 320, True),
    (2, 16, 8, 256, 256, 512, True),
    (1, 16, 8, 1024, 1024, 512, True),
    (1, 16, 8, 2048, 2048, 320, True),
    (8, 16, 4, 1, 4096, 512, False),
)
"""Batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, train."""


def measure(call: tuple[int, int, int, int, int, int, bool]) -> dict[str, float]:
    """Return median milliseconds of both backends, causal where there is more than one query."""
    batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, train = call

    def make(heads: int, length: int) -> torch.Tensor:
        size = (batch, heads, length, head_dim)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=train)

    inputs = make(heads_q, seqlen_q), make(heads_kv, seqlen_kv), make(heads_kv, seqlen_kv)
    cotangent = torch.randn_like(inputs[0])

    def run_on(backend: str) -> Run:
        def run() -> None:
            out = attention(*inputs, is_causal=seqlen_q > 1, backend=backend)
            if train:
                torch.autograd.grad(out, inputs, cotangent)

        return run

    times = side_by_side({name: run_on(name) for name in ("chunked", "efficient")}, rounds=3, rep=40)
    return {name: round(ms, 4) for name, ms in times.items()}


def main() -> None:
    """Measure every call and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = {}
    for call in CALLS:
        found[str(call)] = measure(call)
        progress(f"{call}: {found[str(call)]}")
    save(options.out, {"ms": found})


if __name__ == "__main__":
    main()
