"""Calls that may take the host longer than the device: what each backend takes in a row of equal calls.

A kernel of 20 us is no faster than the code before it. Each time is that of many calls one after the other
without a wait between them, so it is the larger of the host's and the device's share.

python benchmarks/small_calls.py --out results.json [--only causal] [--seconds 200]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from backends import runs_of, versions
from common import Run, progress, save
from shapes import Shape

from attnroute import explain

SIZES = (
    (1, 4, 4, 128),
    (1, 8, 8, 1024),
    (1, 32, 8, 512),
    (1, 32, 8, 1024),
    (1, 32, 8, 2048),
    (1, 32, 8, 4096),
)
SIZES += ((4, 32, 8, 512), (4, 32, 8, 1024), (4, 32, 8, 2048), (16, 16, 16, 256))
"""Batch, query heads, key heads and length: from a call that is all host to one that is all device."""
WIDE = ((1, 4, 4, 128), (1, 8, 4, 256), (1, 8, 4, 512), (1, 8, 4, 1024), (1, 8, 4, 2048), (4, 16, 8, 1024))
WIDE += ((1, 8, 4, 4096),)
BANDS = ((1, 32, 8, 512), (1, 32, 8, 1024), (1, 32, 8, 2048), (4, 32, 8, 1024), (1, 32, 8, 4096))
LEFT_OUT = frozenset({"math", "chunked", "flex", "flex_fa4", "efficient"})
"""Not timed up to head_dim 256: slower on the device and on the host than others."""
WITH_WIDE = frozenset({"math", "flex"})
WIDTH = 256
"""Of windows and of documents."""
KINDS = ((128, "causal"), (64, "none"), (128, "window"), (256, "causal"), (128, "documents"))
KINDS += ((512, "causal"), (320, "causal"))


def shapes() -> Iterator[Shape]:
    """Yield every shape."""
    for train in (False, True):
        for head_dim, mask in KINDS:
            banded = mask in ("window", "documents")
            for batch, heads, heads_kv, length in WIDE if head_dim > 256 else BANDS if banded else SIZES:
                name = f"{mask}_d{head_dim}_{batch}_{heads}_{heads_kv}_{length}{'_train' * train}"
                sizes = (batch, heads, heads_kv, length, length, head_dim, head_dim)
                yield Shape(name, *sizes, mask, train, WIDTH * banded)


def in_a_row(run: Run, *, seconds: float = 0.012) -> float:
    """Return the milliseconds of one call among many without a wait between them."""
    run()
    torch.cuda.synchronize()
    count, taken = 4, 0.0
    while taken < seconds:
        count = count * 2
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
    return taken / count * 1e3


def candidates(shape: Shape, inputs: tuple[torch.Tensor, ...]) -> tuple[str, list[str]]:
    """Return what is selected, and every eligible backend that is worth a timing."""
    decision = explain(*inputs, **shape.ours())
    skipped = WITH_WIDE if shape.head_dim_qk > 256 else LEFT_OUT
    return decision.selected or "none", [b for b in decision.order if b not in skipped]


def measure(shape: Shape, *, rounds: int) -> dict[str, Any]:
    """Time stock and every candidate by name."""
    torch.manual_seed(0)
    inputs = shape.tensors()
    selected, named = candidates(shape, inputs)
    runs, _, failures = runs_of(shape, inputs, named)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(in_a_row(run))
    ms = {name: round(sorted(each)[len(each) // 2], 4) for name, each in times.items()}
    progress(f"{shape.name}: {selected} {ms} {failures or ''}")
    return {"selected": selected, "ms": ms, "failures": failures}


def main() -> None:
    """Measure every shape and write the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="names of shapes that contain this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape after this long")
    options = parser.parse_args()
    start = time.monotonic()
    results: dict[str, Any] = {"packages": versions(), "shapes": {}}
    for shape in shapes():
        if options.only and not any(part in shape.name for part in options.only):
            continue
        if time.monotonic() - start > options.seconds:
            progress(f"{shape.name} and what follows: no time is left")
            break
        results["shapes"][shape.name] = measure(shape, rounds=options.rounds)
        save(options.out, results)


if __name__ == "__main__":
    main()
