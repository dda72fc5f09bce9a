"""What flex pays for one code per structure: windows as numbers and as tensors, lengths that vary, the host.

python benchmarks/flex_structure.py --out results.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

import torch
import triton.testing
from common import environment, save

from attnroute.executors.flex import program
from attnroute.executors.flex import run as flex
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks import Window
from attnroute.masks.lowered.form import FULL, Extent, mods

LENGTH: Final = 16384
PLAN: Final = Plan("flex", (), training=False, return_lse=False, device_type="cuda")


def call(length: int, heads: tuple[int, int], mask: Window) -> Any:
    """Return a function that runs flex once on random bfloat16 inputs of head_dim 128."""
    query, key, value = (
        torch.randn(1, n, length, 128, device="cuda", dtype=torch.bfloat16)
        for n in (heads[0], heads[1], heads[1])
    )
    lowered = mask.lower(FULL, Extent(1, heads[0], length, length, query.device))
    inputs = Inputs(query, key, value, lowered)
    return lambda: flex.run(inputs, PLAN)


def milliseconds(function: Any) -> float:
    """Return the median time on the device."""
    return round(triton.testing.do_bench(function, warmup=20, rep=100, return_mode="median"), 4)


def start(*, as_numbers: bool, told_whole: bool) -> None:
    """Set what is compared: bands in the text or in tensors; whether whole blocks are said to be whole."""
    taken = () if as_numbers else range(10**6, 10**6 + mods.CONSTANT_BANDS)
    mods._CONSTANTS.clear()  # noqa: SLF001 - what the executor decides by itself is set here
    mods._CONSTANTS.update(taken)  # noqa: SLF001
    program._of_band.cache_clear()  # noqa: SLF001
    flex.WHOLE = 128 if told_whole else 10**9


def variants() -> dict[str, float]:
    """Time one window in four ways, after another length has made the code one for all lengths."""
    found = {}
    for as_numbers in (True, False):
        for told_whole in (True, False):
            start(as_numbers=as_numbers, told_whole=told_whole)
            call(LENGTH // 2, (32, 8), Window(4095))()
            name = f"{'numbers' if as_numbers else 'tensors'}, {'told whole' if told_whole else 'not told'}"
            found[name] = milliseconds(call(LENGTH, (32, 8), Window(4095)))
            print(name, found[name])
    start(as_numbers=True, told_whole=True)
    return found


def host_microseconds() -> dict[str, float]:
    """Return the host's time for a tiny call, beside stock's."""
    query = torch.randn(1, 4, 128, 128, device="cuda", dtype=torch.bfloat16)
    calls = {
        "flex window": call(128, (4, 4), Window(30)),
        "stock": lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query),
    }
    return {name: _host(function) for name, function in calls.items()}


def _host(function: Any, rounds: int = 7, calls: int = 200) -> float:
    best = float("inf")
    for _ in range(rounds):
        function()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    return round(best * 1e6, 1)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with torch.no_grad():
        found = {"window_4096_at_16k_ms": variants(), "host_us": host_microseconds()}
    print(found["host_us"])
    save(out, {"environment": environment(), **found})


if __name__ == "__main__":
    main()
