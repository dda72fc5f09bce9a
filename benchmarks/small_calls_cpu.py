"""Calls on the CPU that only `chunked` takes, dropout and a bias that trains, beside stock in one run.

python benchmarks/small_calls_cpu.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnroute import attention, explain

SHAPES = ((1, 4, 16, 32), (1, 8, 64, 64), (2, 8, 128, 64), (1, 8, 256, 64), (1, 8, 512, 64))
"""Batch, heads, length, head_dim."""
ROUNDS = 31
SECONDS = 0.7
"""Per call at most; a long one has fewer rounds."""


def side_by_side(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each run in microseconds; all take turns, so that a busy host meets all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while len(times["ours"]) < ROUNDS + 3 and time.perf_counter() - start < SECONDS * len(runs):
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - before)
    return {name: median(taken[min(3, len(taken) - 1) :]) * 1e6 for name, taken in times.items()}


def measure(kind: str, batch: int, heads: int, length: int, head_dim: int, *, train: bool) -> None:
    """Print the times of one shape."""
    leaves = [torch.randn(batch, heads, length, head_dim, requires_grad=train) for _ in range(3)]
    given: dict[str, object] = {"is_causal": kind == "causal dropout"}
    ours: dict[str, object] = {"is_causal": kind == "causal dropout"}
    if kind == "trained bias":
        leaves.append(torch.randn(1, heads, length, length, requires_grad=True))
        given["attn_mask"], ours["bias"] = leaves[3], leaves[3]
    else:
        given["dropout_p"] = ours["dropout_p"] = 0.1

    def full(function: Callable[..., torch.Tensor], words: dict[str, object]) -> Callable[[], object]:
        def run() -> object:
            out = function(*leaves[:3], **words)
            return torch.autograd.grad(out.sum(), leaves) if train else out

        return run

    times = side_by_side({"stock": full(scaled_dot_product_attention, given), "ours": full(attention, ours)})
    chosen = explain(*leaves[:3], **ours).selected  # type: ignore[arg-type]
    ratio = round(times["ours"] / times["stock"], 2)
    rounded = {name: round(taken, 1) for name, taken in times.items()}
    print(kind, batch, heads, length, head_dim, "train" if train else "infer", chosen, rounded, ratio)


def main() -> None:
    """Print the times of every shape, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for kind, ways in (
        ("dropout", (False, True)),
        ("causal dropout", (False, True)),
        ("trained bias", (True,)),
    ):
        for shape in SHAPES:
            for train in ways:
                measure(kind, *shape, train=train)


if __name__ == "__main__":
    main()
