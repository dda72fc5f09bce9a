"""What torch's fused attention kernels do, fact by fact: the `kernel-facts` that the tables cite.

python benchmarks/kernel_facts.py --list                 the keys; needs no GPU
python benchmarks/kernel_facts.py --out facts.json       every fact
python benchmarks/kernel_facts.py --only "flash br_win"  one fact, in this process, printed as JSON
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import facts_costs
import facts_danger
import facts_masks
import facts_scores
import facts_shapes
import torch
from common import progress, save

TOGETHER = {
    **facts_masks.FACTS,
    **facts_scores.FACTS,
    **facts_shapes.FACTS,
    **facts_costs.FACTS,
}
ALONE = facts_danger.FACTS
FACTS = {**TOGETHER, **ALONE}
LONGEST_SECONDS = 120
AT_A_TIME = 4


def raised(error: Exception) -> str:
    """Return an exception as a fact: its type and the first line of what it says."""
    return f"EXC {type(error).__name__}({str(error).partition(chr(10))[0][:300]!r})"


def observe(key: str) -> Any:
    """Run one fact here, from seed 0; what a kernel raises is the fact."""
    try:
        torch.manual_seed(0)
        found = FACTS[key]()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - no kind of failure is excepted
        return raised(error)
    return found


def observe_alone(key: str) -> Any:
    """Run one fact in a process of its own; a process that dies or hangs is the fact too."""
    command = [sys.executable, __file__, "--only", key]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"EXC no answer within {LONGEST_SECONDS} s"
    if not done.stdout.strip():
        return f"EXC the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return json.loads(done.stdout.splitlines()[-1])[key]


def usable() -> bool:
    """Say whether this process can still use the GPU: some CUDA errors stay until it ends."""
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def observe_together() -> dict[str, Any]:
    """Run the harmless facts here, and what is left in processes of their own should one not be harmless."""
    found: dict[str, Any] = {}
    healthy = True
    for key in TOGETHER:
        found[key] = observe(key) if healthy else observe_alone(key)
        progress(f"{key}: {found[key]}")
        healthy = healthy and usable()
    torch.cuda.empty_cache()
    return found


def observe_dangerous() -> dict[str, Any]:
    """Run the dangerous facts, a few processes at a time: nothing is timed here."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = dict(zip(ALONE, pool.map(observe_alone, ALONE), strict=True))
    for key, value in found.items():
        progress(f"{key}: {value}")
    return found


def main() -> None:
    """List the keys, print one fact, or run every fact and write one file."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the keys")
    what.add_argument("--only", metavar="KEY", help="run this fact in this process and print it as JSON")
    what.add_argument("--out", type=Path, metavar="FILE", help="run every fact and write this file")
    options = parser.parse_args()
    if options.list:
        print("\n".join(FACTS))
        return
    if options.only is not None and options.only not in FACTS:
        parser.error(f"--only needs one of the keys that --list prints; got {options.only!r}.")
    if not torch.cuda.is_available():
        parser.error("--only and --out need a CUDA GPU, and torch sees none; --list works without one.")
    if options.only is not None:
        print(json.dumps({options.only: observe(options.only)}))
    else:
        found = observe_together()
        save(options.out, found)
        save(options.out, found | observe_dangerous())


if __name__ == "__main__":
    main()
