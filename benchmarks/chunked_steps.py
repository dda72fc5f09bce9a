"""Where `chunked` spends time on a card: each kernel, each matmul alone, the host, and other sizes of tiles.

Prints short tables and writes everything as JSON. For about 80 seconds, in the order of how much is learned:

python benchmarks/chunked_steps.py --out chunked.json
python benchmarks/chunked_steps.py --out smoke.json --device cpu  # tiny; needs no GPU
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import progress, save
from torch import Tensor

from attnroute import attention
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.executors.chunked.call import matmul_into
from attnroute.executors.chunked.plan import Geometry, Limits, make_plan
from attnroute.tuning.timing import Samples, Step, Timing, clock_of

TURNS = 4
HOST_CALLS = 50
TOP = 12


@dataclass(frozen=True)
class Case:
    """One call in bfloat16 with contiguous tensors."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool = False
    train: bool = False

    def step(self, device: str, backend: str) -> Step:
        """Return the call through `attention()` on a backend."""

        def make(heads: int, length: int, head_dim: int) -> Tensor:
            size = (self.batch, heads, length, head_dim)
            return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=self.train)

        query = make(self.heads_q, self.seqlen_q, self.head_dim_qk)
        key = make(self.heads_kv, self.seqlen_kv, self.head_dim_qk)
        value = make(self.heads_kv, self.seqlen_kv, self.head_dim_v)
        grad = torch.randn(*query.shape[:3], self.head_dim_v, device=device, dtype=torch.bfloat16)
        leaves = (query, key, value) if self.train else ()
        run = partial(attention, query, key, value, is_causal=self.causal, backend=backend)
        return Step(run, leaves, grad)

    def smaller(self) -> Case:
        """Return a call that a CPU runs in a moment."""
        length = min(self.seqlen_q, 96), min(self.seqlen_kv, 96)
        return replace(self, batch=1, seqlen_q=length[0], seqlen_kv=length[1], head_dim_qk=40, head_dim_v=32)


CASES = (
    Case("d320_4k", 1, 8, 8, 4096, 4096, 320, 320),
    Case("d320_4k_mqa", 1, 8, 1, 4096, 4096, 320, 320),
    Case("d512_8k_train", 1, 16, 8, 8192, 8192, 512, 512, causal=True, train=True),
    Case("decode_576", 16, 16, 1, 1, 4096, 576, 512),
    Case("short_576", 16, 32, 8, 128, 128, 576, 512),
    Case("d320_4k_train", 1, 16, 8, 4096, 4096, 320, 320, causal=True, train=True),
    Case("d512_4k", 1, 8, 4, 4096, 4096, 512, 512, causal=True),
    Case("two_queries_576", 4, 32, 32, 2, 8192, 576, 512),
    Case("two_queries_320", 16, 64, 8, 2, 16384, 320, 320),
)


@contextmanager
def tiles(*, max_q: int | None = None, min_q: int | None = None, mega: int | None = None) -> Iterator[None]:
    """Let accelerators cut calls otherwise: queries per block, and 2**20 scores per tile."""
    usual = chunked_plan.ACCELERATOR
    changed = usual._replace(
        score_elements=usual.score_elements if mega is None else mega * 2**20,
        min_block_q=min_q or usual.min_block_q,
        max_block_q=max_q or usual.max_block_q,
    )
    with mock.patch.object(chunked_plan, "ACCELERATOR", changed):
        yield


VARIANTS: dict[str, Callable[[], Any]] = {
    "now": tiles,
    "q256": partial(tiles, max_q=256),
    "q512": partial(tiles, max_q=512),
    "q2048": partial(tiles, min_q=2048, max_q=2048),
    "s8": partial(tiles, mega=8),
    "s16": partial(tiles, mega=16),
    "s32": partial(tiles, mega=32),
    "s128": partial(tiles, mega=128),
}


def timed(step: Step, device: str) -> dict[str, Any]:
    """Return times of the device and the host, forward and backward apart, and extra bytes."""
    timing = Timing(step, clock_of(device), Samples())
    found = timing.warm_up()
    for _ in range(TURNS):
        timing.turn()
    return {**timing.samples.summary(), **found}


def kernels(run: Callable[[], Any]) -> list[list[Any]]:
    """Return the kernels that take the most time: name, launches, milliseconds together; then the sums."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        kept = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    del kept
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("attnroute::"):
            found[event.name][0] += 1
            found[event.name][1] += event.device_time / 1e3
    rows = [[name[:150], count, round(ms, 4)] for name, (count, ms) in found.items()]
    rows.sort(key=lambda row: -row[2])
    return [*rows[:TOP], ["all", sum(row[1] for row in rows), round(sum(row[2] for row in rows), 4)]]


def host(run: Callable[[], Any]) -> list[list[Any]]:
    """Return the Python functions that take the host the longest: where, calls and microseconds per run."""
    run()
    profile = cProfile.Profile()
    # In its own thread the backward of a GPU would not be seen.
    with torch.autograd.set_multithreading_enabled(False), profile:
        for _ in range(HOST_CALLS):
            run()
    rows = []
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = f"{'/'.join(file.split('/')[-2:])}:{line} {name}"
        rows.append([place, calls / HOST_CALLS, round(1e6 * own / HOST_CALLS, 1)])
    rows.sort(key=lambda row: -row[2])
    return rows[: 2 * TOP]


def matmuls(case: Case, device: str) -> dict[str, list[float]]:
    """Return milliseconds and TFLOP/s of each matmul of the widest tile alone, by what it writes."""
    shape = Geometry(case.batch, case.heads_kv, case.heads_q // case.heads_kv, case.seqlen_q, case.seqlen_kv)
    limits = Limits(band_hi=0) if case.causal else Limits()
    plan = make_plan(shape, limits, chunked_plan.ACCELERATOR)
    units, rows, keys = plan.chunks[0].units, plan.block_q * shape.group, plan.tile_keys
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    query, key = make(units, rows, case.head_dim_qk), make(units, keys, case.head_dim_qk)
    value, probs = make(units, keys, case.head_dim_v), make(units, rows, keys)
    key_t, probs_t, value_t = key.mT, probs.mT, value.mT
    grad = make(units, rows, case.head_dim_v)
    forms = {
        "scores": (query, key_t),
        "grad_probs": (grad, value_t),
        "total": (probs, value),
        "grad_value": (probs_t, grad),
        "grad_query": (probs, key),
    }
    found = {}
    wide = torch.float32 if device == "cuda" else torch.bfloat16
    for name, (a, b) in forms.items():
        for dtype, adds in ((wide, False), (wide, True), (torch.bfloat16, False)):
            out = torch.zeros(units, a.shape[1], b.shape[2], device=device, dtype=dtype)

            def run(out: Tensor = out, a: Tensor = a, b: Tensor = b, *, adds: bool = adds) -> Tensor:
                matmul_into(out, a, b, accumulate=adds)
                return out

            ms = timed(Step(run, (), out), device)["fwd_ms"]
            work = 2 * units * a.shape[1] * a.shape[2] * b.shape[2]
            what = f"{name} {'+=' if adds else '='} {str(dtype)[6:]}"
            found[what] = [ms, round(work / max(ms, 1e-6) / 1e9, 1)]
    return found


class Report:
    """What was measured, until the time is up."""

    def __init__(self, device: str, seconds: float) -> None:
        """Start the clock."""
        self.device, self.until = device, time.monotonic() + seconds
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, case: Case, name: str, measure: Callable[[], Any]) -> Any:
        """Measure one thing unless the time is up; an error is noted in its place."""
        if time.monotonic() > self.until:
            return None
        try:
            found = measure()
        except RuntimeError as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        self.found.setdefault(case.name, {})[name] = found
        return found

    def variants(self, case: Case, names: list[str]) -> None:
        """Time a call cut in other ways."""
        for name in names:
            step = case.step(self.device, "chunked")
            with VARIANTS[name]():
                progress(f"{case.name} {name}: {self.add(case, name, partial(timed, step, self.device))}")

    def parts(self, case: Case) -> None:
        """Look into one call: its kernels, and its host time by Python function."""
        step = case.step(self.device, "chunked")
        step.run()
        self.table(case, "kernels forward", self.add(case, "kernels forward", partial(kernels, step.forward)))
        if case.train:
            out = step.forward()
            backward = partial(kernels, partial(step.backward, out))
            self.table(case, "kernels backward", self.add(case, "kernels backward", backward))
            del out
        self.table(case, "host us", self.add(case, "host us", partial(host, step.run)))

    def table(self, case: Case, title: str, rows: Any) -> None:
        """Print the rows of one table."""
        print(f"-- {case.name}: {title}")
        for row in rows if isinstance(rows, list) else [[str(rows)]]:
            print("  ", *(str(part)[:110] for part in reversed(row)), sep="  ", flush=True)


def main() -> None:
    """Measure what time allows, print it and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--only", default="", help="calls whose names contain this")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if options.device == "cpu":
        cases = [case.smaller() for case in cases]
    report = Report(options.device, options.seconds)
    for case in cases:
        report.variants(case, ["now"])
        step = case.step(options.device, "efficient")
        if options.device == "cuda":
            progress(f"{case.name} efficient: {report.add(case, 'efficient', partial(timed, step, 'cuda'))}")
        report.parts(case)
    for case in cases:
        found = report.add(case, "matmuls", partial(matmuls, case, options.device))
        progress(f"{case.name} matmuls [ms, TFLOP/s]: {json.dumps(found)}")
    for case in cases:
        report.variants(case, [name for name in VARIANTS if name != "now"])
    if options.device == "cuda":
        save(options.out, {"calls": report.found})
    else:
        options.out.write_text(json.dumps(report.found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
