"""Memory of a window over documents, and where flex overtakes the kernels beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import Run, progress
from masks_cases import build, documents, window
from masks_common import (
    Case,
    Job,
    Sizes,
    Steps,
    draw,
    first_calls,
    forwards,
    passes,
    peak_extra_bytes,
    timed,
)
from torch import Tensor

from attnroute import attention, explain, masks

MEMORY_LENGTHS = (8192, 16384, 32768, 65536)
MOST_GROWTH = 2.2
"""Of the peak, from 32k to 64k tokens."""

CROSSOVER_LENGTHS = (2048, 4096, 8192, 16384)
CROSSOVER: dict[str, Callable[..., Case]] = {
    "documents_1024": documents,
    "window_1024": partial(window, width=1024),
    "window_4096": partial(window, width=4096),
}
BACKENDS = ("flex", "flash", "cudnn")
FAR_BEHIND = 3.0
"""A backend that takes so many times as long as the fastest takes no part, and is timed by single calls."""


def memory(sizes: Sizes, *, train: bool) -> Steps:
    """Measure how far a call raises the allocated memory, with a mask that is new and one that is kept."""
    found: dict[str, Any] = {}
    for length in MEMORY_LENGTHS:
        found[str(length)] = row = _memory_at(sizes, sizes.tokens(length), train=train)
        progress(f"memory {'training' if train else 'inference'} {length}: {row}")
    for kind in ("bytes_new_mask", "bytes_kept_mask"):
        last, before = (found[str(length)][kind] for length in MEMORY_LENGTHS[:-3:-1])
        found[f"growth_{kind}"] = round(last / before, 3) if last and before else None
    growths = [value for name, value in found.items() if name.startswith("growth_")]
    met = all(growth is not None and growth <= MOST_GROWTH for growth in growths)
    found["requirement"] = {"growth_at_most": MOST_GROWTH, "met": met}
    return found
    yield  # Nothing is timed.


def _memory_at(sizes: Sizes, length: int, *, train: bool) -> dict[str, Any]:
    def mask() -> masks.Mask:
        return masks.Window(sizes.tokens(4096) - 1) & masks.Documents(lengths=(length // 4,) * 4)

    kept = mask()
    case = build(sizes, length, {"mask": kept}, lambda i, j: j <= i, train=train, heads=(8, 2))
    cotangent = draw(*case.inputs[0].shape)

    def run(said: masks.Mask) -> Tensor | tuple[Tensor, ...]:
        out = attention(*case.inputs, mask=said)
        return torch.autograd.grad(out, case.inputs, cotangent) if train else out

    run(kept)
    peaks = {
        "bytes_new_mask": peak_extra_bytes(lambda: run(mask())),
        "bytes_kept_mask": peak_extra_bytes(lambda: run(kept)),
    }
    per_token = {f"{name}_per_token": n and round(n / length, 1) for name, n in peaks.items()}
    return {"selected": explain(*case.inputs, **case.ours).selected, **peaks, **per_token}


def crossover(kind: str, sizes: Sizes, *, train: bool, batch: int) -> Steps:
    """Time flex, FLASH and cuDNN, where each may run, at every length.

    The first length is compiled for itself and those after it together, as in a program that uses them so.
    """
    runs: dict[int, dict[str, Run]] = {}
    found: dict[str, dict[str, Any]] = {}
    for length in CROSSOVER_LENGTHS[2:] if sizes.smoke else CROSSOVER_LENGTHS:
        case = CROSSOVER[kind](sizes, length=length, train=train, batch=batch)
        if _is_causal_alone(case):
            continue
        runs[length] = _on_backends(case)
        seconds, errors = first_calls(runs[length])
        found[str(length)] = {
            "selected": explain(*case.inputs, **case.ours).selected,
            "first_call_s": seconds,
            "errors": errors,
        }
    yield
    for length, ready in runs.items():
        row = found[str(length)]
        row["ms"] = timed(ready, rounds=2, rep=25, far=FAR_BEHIND)
        times = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        name = f"{kind} {'training' if train else 'forward'} B{batch} {length}"
        progress(f"{name}: {times}  ({row['selected']} as routed)  {row['errors'] or ''}")
    return found


def _is_causal_alone(case: Case) -> bool:
    """A window as wide as the sequence rules nothing out."""
    mask, length = case.ours["mask"], case.inputs[0].shape[2]
    return isinstance(mask, masks.Window) and mask.left is not None and mask.left >= length - 1


def _on_backends(case: Case) -> dict[str, Run]:
    runs = forwards(case, BACKENDS)
    del runs["attnroute"]
    return {name: passes(case, run) for name, run in runs.items()}


def crossover_jobs(sizes: Sizes) -> dict[str, Job]:
    """Return one job for each kind of mask, batch size and phase."""
    return {
        f"{kind} {'training' if train else 'forward'} B{batch}": partial(
            crossover, kind, sizes, train=train, batch=batch
        )
        for kind in CROSSOVER
        for batch in (1, 4)
        for train in (False, True)
    }


def memory_jobs(sizes: Sizes) -> dict[str, Job]:
    """Return one job for each phase."""
    return {
        "inference": partial(memory, sizes, train=False),
        "training": partial(memory, sizes, train=True),
    }
