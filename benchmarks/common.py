"""What every benchmark shares: the environment, side-by-side timing, float64 references on slices."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]


def environment() -> dict[str, str]:
    """Return card, driver, versions and date: what a number means nothing without."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "date": date.today().isoformat(),  # noqa: DTZ011 - a day, wherever the machine stands
    }


def side_by_side(runs: dict[str, Run], *, rounds: int = 5, rep: int = 100) -> dict[str, float]:
    """Time several runs in turn, round after round, and return the median of each in milliseconds."""
    from triton.testing import do_bench

    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(do_bench(run, warmup=25, rep=rep, return_mode="median"))
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def peak_extra_bytes(run: Run) -> int:
    """Return how far a run raises the allocated memory above what was there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ``|got - want| / |want|`` in float64; infinity where `got` is not finite."""
    if not torch.isfinite(got).all():
        return math.inf
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def kernels_of(run: Run) -> list[str]:
    """Return the names of the CUDA kernels of one run, from the profiler, and of our own marks."""
    run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    names = set()
    for event in profile.events():
        marked = event.name.startswith(
            ("attnroute::", "aten::_scaled_dot", "aten::_flash", "aten::_efficient")
        )
        if marked or str(event.device_type).endswith("CUDA"):
            names.add(event.name[:120])
    return sorted(names)


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON with the environment beside them."""
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n", encoding="utf-8")


def progress(text: str) -> None:
    """Print a line at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
