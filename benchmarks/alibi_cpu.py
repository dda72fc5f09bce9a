"""ALiBi on the CPU: slopes as they are given, beside the same term as a dense bias, and in chunked.

python benchmarks/alibi_cpu.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from attnroute import attention, explain

SHAPES = ((1, 4, 16, 32), (1, 8, 64, 64), (2, 8, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64))
"""Batch, heads, length, head_dim."""
ROUNDS = 15


def side_by_side(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least time of each run in microseconds; all take turns, so that a busy host meets all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 3):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: round(min(taken[3:]) * 1e6, 1) for name, taken in times.items()}


def measure(batch: int, heads: int, length: int, head_dim: int, *, train: bool) -> None:
    """Print the times of one shape."""
    qkv = [torch.randn(batch, heads, length, head_dim, requires_grad=train) for _ in range(3)]
    slopes, places = torch.rand(heads), torch.arange(length)
    bias = -slopes[:, None, None] * (places[:, None] - places).abs()

    def full(**given: object) -> Callable[[], object]:
        def run() -> object:
            out = attention(*qkv, **given)  # type: ignore[call-overload]
            return torch.autograd.grad(out.sum(), qkv) if train else out

        return run

    times = side_by_side(
        {
            "slopes": full(alibi_slopes=slopes),
            "dense": full(bias=bias[None]),
            "chunked": full(alibi_slopes=slopes, backend="chunked"),
        }
    )
    chosen = explain(*qkv, alibi_slopes=slopes).selected
    print(batch, heads, length, head_dim, "training" if train else "inference", chosen, times)


def main() -> None:
    """Print the times of every shape, on one thread."""
    torch.set_num_threads(1)
    for shape in SHAPES:
        for train in (False, True):
            measure(*shape, train=train)


if __name__ == "__main__":
    main()
