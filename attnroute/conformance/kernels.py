"""Tells from a profile whose kernels ran."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnroute.tables.folders import Tables

_Result = TypeVar("_Result")
DEVICE_NAMES: Final = {
    "flash": r"pytorch_flash::",
    "cudnn": r"cudnn",
    "efficient": r"fmha_cutlass|attention_kernel|AttentionKernel|AttentionBackwardKernel",
    "cudnn_fe": r"cudnn",
    "te": r"cudnn",
    "fa4": r"kernel_cutlass_.*flash_attncute",
    "flex_fa4": r"kernel_cutlass_.*flash_attncute",
    "fa3": r"flash::FlashAttn(Fwd|Bwd)",
    "fa2": r"(?<!pytorch_)flash::flash_(fwd|bwd)",
}
"""What a backend's kernels are called on a CUDA device, as profiles show them."""
_LONGEST: Final = 120


class Seen(NamedTuple):
    """What a profile shows.

    Attributes:
        names: Of operators, on the host.
        kernels: Of kernels, on a CUDA device.
    """

    names: frozenset[str]
    kernels: tuple[str, ...]


def watched(run: Callable[[], _Result], device: str) -> tuple[_Result, Seen]:
    """Run, and return what it gave and what ran."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    # Without acc_events torch 2.11 warns at the first profile of a process.
    with profile(activities=activities, acc_events=True) as seen:
        result = run()
        if device == "cuda":
            torch.cuda.synchronize()
    events = list(seen.events() or ())
    kernels = {e.name[:_LONGEST] for e in events if str(e.device_type).endswith("CUDA")}
    return result, Seen(frozenset(e.name for e in events), tuple(sorted(kernels)))


def stranger(seen: Seen, backend: str, tables: Tables, helpers: Iterable[str]) -> str:
    """Return who ran in place of a backend, as a clause; "" where the backend ran, perhaps with helpers."""
    ran = {name for name, info in tables.backends.items() if seen.names.intersection(info.operators)}
    others = ran - {backend, *helpers}
    if backend not in ran or others:
        return f"{', '.join(sorted(others)) or 'no kernel'} ran"
    if seen.kernels and backend in DEVICE_NAMES and not own_kernels(seen, backend):
        return f"no kernel of its own ran on the device: {', '.join(seen.kernels[:5])}"
    return ""


def own_kernels(seen: Seen, backend: str) -> tuple[str, ...]:
    """Return the kernels of a profile that are a backend's own."""
    pattern = DEVICE_NAMES.get(backend)
    return () if pattern is None else tuple(name for name in seen.kernels if re.search(pattern, name))
