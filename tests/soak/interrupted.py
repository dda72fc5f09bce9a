"""25 processes that are interrupted at a random moment of their first calls: none of them is left broken."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PROCESSES = 25
CHILD = """
import signal, sys
import torch
reference = torch.nn.functional.scaled_dot_product_attention
query = torch.randn(1, 2, 16, 8)
mask = torch.ones(16, 16, dtype=torch.bool).tril()

def calls(prefer):
    import attnroute
    from attnroute import masks
    want = reference(query, query, query, mask)
    for given in (masks.Causal(), mask, ~~masks.Dense(mask), masks.Documents(lengths=[16]) & masks.Causal()):
        got = attnroute.attention(query, query, query, given, prefer=prefer)
        # torch.testing imports much, and an interrupt may break that instead.
        assert torch.allclose(got, want, atol=1e-5)
    train = query.clone().requires_grad_()
    attnroute.attention(train, train, train, masks.Causal(), backend="chunked").sum().backward()
    str(attnroute.explain(query, query, query, mask))

print("ready", flush=True)
interrupted = 0
while True:
    try:
        calls(sys.argv[1] or None)
        print("warm", flush=True)
        calls(None)
        break
    except KeyboardInterrupt:
        interrupted += 1
        print("interrupted", flush=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("done", interrupted, flush=True)
"""


def one(seed):
    """Interrupt one process, and return whether that met it before it was through."""
    rng = random.Random(seed)
    # A few compile, where an interrupt may break the compiler itself: another backend must run then.
    prefer = "flex" if seed % 5 == 0 else ""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, prefer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    for _ in range(1 + seed % 3):
        time.sleep(rng.uniform(0.0, 6.0 if prefer else 1.5))
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    said, errors = child.communicate(timeout=300)
    # One that comes while another one is handled ends the process, as it ends every program.
    if child.returncode == -signal.SIGINT:
        return "interrupted" in said, "ended by the interrupt"
    last = said.strip().splitlines()[-1]
    assert last.startswith("done"), f"process {seed}: {errors}"
    return int(last.split()[1]) > 0, ""


def main():
    """Interrupt all of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(PROCESSES)))
    met = sum(is_met for is_met, _ in found)
    ended = sum(bool(said) for _, said in found)
    print(json.dumps({"processes": PROCESSES, "interrupted": met, "ended_by_it": ended, "broken": 0}))
    assert met >= PROCESSES // 5, "the interrupts came too early or too late to mean anything"


if __name__ == "__main__":
    main()
