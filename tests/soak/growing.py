"""100,000 calls of ever new shapes and masks: the memory of the process is flat after the first 20,000."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from pathlib import Path

import torch

import attnroute
from attnroute import masks

CALLS = 100_000
SETTLED = 20_000
"""Calls after which every memory has reached its bound."""
ROOM_MB = 8.0
"""What allocators may keep for themselves, in 80,000 calls."""


def resident_mb():
    """Return the memory of this process in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def mask_of(rng, batch, seqlen):
    """Return a new mask of a random kind."""
    edge = rng.randrange(1, seqlen + 1)
    window = masks.Window(edge, rng.choice([0, None, 2]))
    kinds = (
        lambda: None,
        masks.Causal,
        lambda: window,
        lambda: masks.KeyPadding(lengths=[rng.randrange(1, seqlen + 1) for _ in range(batch)]),
        lambda: masks.Documents(lengths=[edge, seqlen - edge]),
        lambda: torch.rand(seqlen, seqlen) < 0.9,
        lambda: masks.Causal() & masks.Documents(ids=torch.arange(seqlen) // 3),
        lambda: ~masks.Function(lambda _b, _h, i, j: j > i + edge),
        lambda: window | masks.PrefixLM([edge] * batch),
    )
    # The last ones are evaluated pair by pair, which takes most of the time.
    return rng.choices(kinds, weights=[4, 4, 4, 2, 2, 2, 1, 1, 1])[0]()


def call(rng):
    """Make one call of a shape that has hardly been there before."""
    batch, heads = rng.choice([1, 2]), rng.choice([1, 2, 4])
    seqlen, head_dim = rng.randrange(2, 64), rng.choice([2, 4, 8, 16])
    query = torch.randn(batch, heads, seqlen, head_dim)
    numbers = {}
    if rng.random() < 0.2:
        numbers["scale"] = rng.uniform(0.1, 2.0)
    if rng.random() < 0.05:
        numbers["softcap"] = rng.uniform(1.0, 50.0)
    mask = mask_of(rng, batch, seqlen)
    attnroute.attention(query, query, query, mask, **numbers)


def main():
    """Print the memory at every tenth of the calls, and compare."""
    torch.set_num_threads(1)
    rng, start, found = random.Random(0), time.monotonic(), {}
    with torch.no_grad():
        for n in range(1, CALLS + 1):
            call(rng)
            if n % (CALLS // 10) == 0:
                found[n] = round(resident_mb(), 1)
    grown = round(max(mb for n, mb in found.items() if n > SETTLED) - found[SETTLED], 1)
    print(json.dumps({"mb_after": found, "grown_mb": grown, "seconds": round(time.monotonic() - start)}))
    assert grown <= ROOM_MB, f"{grown} MB more than after {SETTLED} calls"


if __name__ == "__main__":
    main()
