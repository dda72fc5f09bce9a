"""Masks as objects beside stock scaled_dot_product_attention with a tensor, in one run.

python benchmarks/masks_beside_stock.py --out results.json [--part window] [--part others] [--only sink]
python benchmarks/masks_beside_stock.py --out results.json --smoke    tiny sizes; also without a GPU
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import masks_cases as cases
from common import progress
from masks_common import (
    ON_GPU,
    Case,
    Job,
    Sizes,
    Steps,
    first_calls,
    forwards,
    kernels_of,
    passes,
    peak_extra_bytes,
    save,
    stock_forward,
    timed,
)
from masks_jobs import run_all
from masks_more import crossover_jobs, memory_jobs
from masks_right import right
from masks_tiles import tile_jobs

from attnroute import explain

SMOKE_JOBS = 2
"""Of each of the parts that compile much."""
MOST_AT_ONCE = 16


def beside(
    make: Callable[[Sizes], Case], sizes: Sizes, *backends: str, ratio_at_most: float | None = None
) -> Steps:
    """Time a case as routed, on some backends and with stock, and say what ran."""
    case = make(sizes)
    decision = explain(*case.inputs, **case.ours)
    verdict = decision.verdict(decision.selected or "")
    runs = {name: passes(case, run) for name, run in forwards(case, backends).items()}
    seconds, errors = first_calls(runs)
    yield
    stock = stock_forward(case)
    if stock is not None:
        late = {"stock": passes(case, stock)}
        errors |= first_calls(late)[1]
        runs |= late
    times = timed(runs, rounds=3, rep=60)
    yield
    extra = {name: peak_extra_bytes(run) for name, run in runs.items()}
    found: dict[str, Any] = {
        "selected": decision.selected,
        "repairs": list(verdict.repairs),
        "options": dict(verdict.options),
        "predicted_stock": None if decision.stock is None else decision.stock.backend,
        "errors": errors,
        "first_call_s": seconds,
        "ms": {"stock": None, **times},
        "ratio_to_stock": _ratios(times),
        "extra_MiB": {name: n and round(n / 2**20) for name, n in extra.items()},
        "kernels": {name: kernels_of(run) for name, run in runs.items()},
    }
    if ratio_at_most is not None:
        ratio = found["ratio_to_stock"].get("attnroute")
        met = ratio is not None and ratio <= ratio_at_most
        found["requirement"] = {"ratio_at_most": ratio_at_most, "met": met}
    return found


def _ratios(times: dict[str, float]) -> dict[str, float]:
    if "stock" not in times:
        return {}
    return {name: round(ms / times["stock"], 4) for name, ms in times.items() if name != "stock"}


def others(sizes: Sizes) -> dict[str, Job]:
    """Return a job for each of the other cases, beside the backend that the routed one competes with."""
    train_sink = partial(cases.sink_window, train=True)
    asked: dict[str, tuple[Callable[[Sizes], Case], str]] = {
        "softcap_causal_8k": (cases.softcap, "chunked"),
        "alibi_causal_8k": (cases.alibi, "chunked"),
        "sink_window_8k": (cases.sink_window, "flex"),
        "sink_window_8k_train": (train_sink, "flex"),
        "prefix_8k": (cases.prefix, "cudnn"),
        "left_padding_causal_4k": (cases.left_padding, "flash"),
        "documents_or_prefix_8k": (cases.combined, "cudnn"),
    }
    return {name: partial(beside, make, sizes, backend) for name, (make, backend) in asked.items()}


def right_jobs(sizes: Sizes) -> dict[str, Job]:
    """Return one job for each of the cases that are held against float64."""
    checked = (cases.window, cases.documents, cases.dense_causal, cases.sink_window)
    return {make.__name__: partial(right, make, sizes) for make in checked}


def one(name: str, make: Callable[[Sizes], Case], ratio_at_most: float) -> Callable[[Sizes], dict[str, Job]]:
    """Return the jobs of a part of one case that has a ratio to keep."""

    def jobs(sizes: Sizes) -> dict[str, Job]:
        return {name: partial(beside, make, sizes, "flash", ratio_at_most=ratio_at_most)}

    return jobs


PARTS: dict[str, Callable[[Sizes], dict[str, Job]]] = {
    "window": one("window_4096_16k", cases.window, 0.18),
    "documents": one("documents_1024_8k_train", cases.documents, 0.12),
    "dense_causal": one("dense_causal_8k", cases.dense_causal, 0.45),
    "others": others,
    "memory": memory_jobs,
    "right": right_jobs,
    "crossover": crossover_jobs,
    "tiles": tile_jobs,
}
COMPILE_MUCH = ("crossover", "tiles")


def line(part: str, name: str, found: dict[str, Any]) -> str:
    """Return one measurement as a line; the jobs of the other parts print theirs themselves."""
    if "error" in found:
        return f"{part} {name}: {found['error']}"
    if "ratio_to_stock" not in found:
        return f"{part} {name}: done"
    times = "  ".join(f"{run} {ms}" for run, ms in found["ms"].items())
    rest = [found["ratio_to_stock"], found.get("requirement"), found["errors"]]
    return f"{part} {name}: {found['selected']}; {times}; {' '.join(str(each) for each in rest if each)}"


def main() -> None:
    """Measure the parts that were asked for and write one file, anew after every job."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=tuple(PARTS))
    parser.add_argument("--only", default="", help="names of jobs that contain this")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that the script runs")
    cores = min(os.cpu_count() or 1, MOST_AT_ONCE)
    parser.add_argument("--at-once", type=int, default=cores, help="processes that compile together")
    options = parser.parse_args()
    if not (ON_GPU or options.smoke):
        parser.error("a GPU is needed, and torch sees none; --smoke runs without one.")
    sizes = Sizes(options.smoke)
    parts = options.part or tuple(PARTS)
    results: dict[str, Any] = {part: {} for part in parts}
    jobs: dict[str, Job] = {}
    for part in parts:
        most = SMOKE_JOBS if options.smoke and part in COMPILE_MUCH else None
        named = {name: job for name, job in PARTS[part](sizes).items() if options.only in name}
        jobs |= {f"{part}/{name}": job for name, job in islice(named.items(), most)}
    for where, found in run_all(jobs, options.at_once):
        part, _, name = where.partition("/")
        results[part][name] = found
        progress(line(part, name, found))
        save(options.out, results)


if __name__ == "__main__":
    main()
