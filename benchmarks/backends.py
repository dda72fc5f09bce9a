"""Every eligible backend beside stock scaled_dot_product_attention, in one run per shape.

python benchmarks/backends.py --out results.json [--only llama] [--skip-slow]
"""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from beside_stock import passes, row_error
from common import Run, kernels_of, progress, save, side_by_side
from shapes import LARGE_HEADS, SHAPES, Shape
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention, explain

PACKAGES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "transformer-engine",
    "triton",
    "xformers",
)
SLOW = frozenset({"math"})
FAR_BEHIND = frozenset({"chunked", "efficient"})
"""Not timed up to head_dim 256, where they take several times as long as the rest."""

MORE = (
    Shape("gemma512_prefill_8k", 1, 16, 8, 8192, 8192, 512, 512, "causal", False),
    Shape("gemma512_prefill_1k", 1, 8, 4, 1024, 1024, 512, 512, "causal", False),
    Shape("gemma320_prefill_4k", 1, 16, 8, 4096, 4096, 320, 320, "causal", False),
    Shape("gemma512_decode_4k", 8, 8, 4, 1, 4096, 512, 512, "none", False),
    Shape("window1k_8k", 1, 32, 8, 8192, 8192, 128, 128, "window", False, 1024),
    Shape("window4k_16k_train", 1, 32, 8, 16384, 16384, 128, 128, "window", True, 4096),
    Shape("docs_8k", 1, 32, 8, 8192, 8192, 128, 128, "documents", False, 1024),
    Shape("docs_2k_train", 4, 32, 8, 2048, 2048, 128, 128, "documents", True, 512),
    Shape("prefill_512", 8, 32, 8, 512, 512, 128, 128, "causal", False),
    Shape("prefill_1k", 4, 32, 8, 1024, 1024, 128, 128, "causal", False),
    Shape("prefill_2k", 2, 32, 8, 2048, 2048, 128, 128, "causal", False),
    Shape("train_1k", 8, 32, 8, 1024, 1024, 128, 128, "causal", True),
    Shape("train_2k_d64", 4, 16, 16, 2048, 2048, 64, 64, "causal", True),
    Shape("siglip_d72_train", 16, 16, 16, 1024, 1024, 72, 72, "none", True),
    Shape("d256_prefill_8k", 1, 16, 8, 8192, 8192, 256, 256, "causal", False),
)
"""Lengths and head dims between those that were measured first."""


def versions() -> dict[str, str]:
    """Return the versions of the packages whose kernels take part."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def candidates(shape: Shape, inputs: tuple[torch.Tensor, ...]) -> tuple[str, list[str]]:
    """Return what is selected, and every eligible backend that is worth a timing."""
    decision = explain(*inputs, **shape.ours())
    worth = [b for b in decision.order if b not in SLOW]
    if max(shape.head_dim_qk, shape.head_dim_v) <= 256:
        worth = [b for b in worth if b not in FAR_BEHIND or b == decision.selected]
    return decision.selected or "none", worth


def runs_of(
    shape: Shape, inputs: tuple[torch.Tensor, ...], backends: list[str]
) -> tuple[dict[str, Run], dict[str, Run], dict[str, str]]:
    """Return what is timed, the forwards alone, both by name with stock, and what each failure said."""
    query, key, value = inputs
    stock_mask, our_mask = shape.stock(), shape.ours()
    is_gqa = shape.heads_q != shape.heads_kv
    forwards: dict[str, Run] = {
        "stock": lambda: sdpa(query, key, value, enable_gqa=is_gqa, **stock_mask),
        **{b: lambda name=b: attention(query, key, value, backend=name, **our_mask) for b in backends},
    }
    runs, failures = {}, {}
    for name, forward in forwards.items():
        try:
            run = passes(shape, forward, inputs)
            run()
            runs[name] = run
        except Exception as error:  # noqa: BLE001 - a backend that fails is a result
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return runs, forwards, failures


def measure(shape: Shape, *, rounds: int) -> dict[str, Any]:
    """Time stock and every candidate, and say how far each is from float64."""
    torch.manual_seed(0)
    inputs = shape.tensors()
    selected, backends = candidates(shape, inputs)
    runs, forwards, failures = runs_of(shape, inputs, backends)
    found: dict[str, Any] = {"selected": selected, "failures": failures}
    ours = [name for name in runs if name != "stock"]
    found["errors"] = {b: round(row_error(shape, forwards[b]().detach(), inputs), 5) for b in ours}
    found["kernels"] = kernels_of(runs[selected]) if selected in runs else []
    times = side_by_side(runs, rounds=rounds)
    found["ms"] = {name: round(ms, 4) for name, ms in times.items()}
    if selected in times and "stock" in times:
        found["ratio_to_stock"] = round(times[selected] / times["stock"], 4)
    fastest = min((b for b in times if b != "stock"), key=times.__getitem__, default=None)
    found["fastest"] = fastest
    progress(f"{shape.name}: {selected}, fastest {fastest} {found['ms']} {found['failures'] or ''}")
    return found


def main() -> None:
    """Measure the shapes that were asked for and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="names of shapes that contain this")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, Any] = {"packages": versions(), "shapes": {}}
    for shape in (*SHAPES, *MORE, *LARGE_HEADS):
        if options.only and not any(part in shape.name for part in options.only):
            continue
        results["shapes"][shape.name] = measure(shape, rounds=options.rounds)
        save(options.out, results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
