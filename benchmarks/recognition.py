"""What a look into a dense mask costs, beside what it saves: a causal mask as a tensor and as an object.

python benchmarks/recognition.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch
from common import Run, environment, progress

from attnroute import attention, masks, override
from attnroute.masks.lowered.form import Extent
from attnroute.masks.recognition import summary

SIZES = (
    (64, 64),
    (128, 128),
    (256, 256),
    (512, 512),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
    (1, 4096),
    (1, 65536),
    (16, 4096),
)
"""Query and key lengths."""
CUDA_SIZES = ((8192, 8192), (16384, 16384))
BATCH, HEADS, HEAD_DIM = 2, 8, 64
ROUNDS = 15


def milliseconds(run: Run, device: str) -> float:
    """Return the median time of a run as the caller waits for it, the device's end included."""
    times = []
    for _ in range(ROUNDS + 3):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(sorted(times[3:])[ROUNDS // 2] * 1e3, 4)


def tensors(seqlen_q: int, seqlen_kv: int, device: str) -> dict[str, torch.Tensor]:
    """Return one mask tensor of each kind; what is not recognised is read to its end as well."""
    causal = masks.Causal("bottom_right")
    kinds = {
        "causal": causal,
        "window": masks.Window(seqlen_kv // 8, 0, "bottom_right"),
        "causal_padding": causal & masks.KeyPadding(left=[seqlen_kv // 4, 0]),
        "padding": masks.KeyPadding(lengths=[seqlen_kv // 2, seqlen_kv]),
    }
    if seqlen_q == seqlen_kv:
        kinds["causal_documents"] = causal & masks.Documents(lengths=(seqlen_kv // 4,) * 4)
    shown = {
        kind: mask.materialize(seqlen_q, seqlen_kv, batch=BATCH, device=device).contiguous()
        for kind, mask in kinds.items()
    }
    return {**shown, "random": torch.rand(1, 1, seqlen_q, seqlen_kv, device=device) < 0.5}


def measure(seqlen_q: int, seqlen_kv: int, device: str) -> dict[str, float]:
    """Return milliseconds of a look into each kind, and of attention with a causal tensor and object."""
    shown = tensors(seqlen_q, seqlen_kv, device)
    extent = Extent(BATCH, HEADS, seqlen_q, seqlen_kv)

    def looked(mask: torch.Tensor) -> Run:
        return lambda: summary._inspect(mask, extent)  # noqa: SLF001 - the reading itself, nothing being kept

    found = {f"look {kind}": milliseconds(looked(mask), device) for kind, mask in shown.items()}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(BATCH, HEADS, seqlen_q, HEAD_DIM, device=device, dtype=dtype)
    key, value = torch.randn(2, BATCH, HEADS, seqlen_kv, HEAD_DIM, device=device, dtype=dtype)
    said = masks.Causal("bottom_right")
    with override(recognize=False):
        found["tensor"] = milliseconds(lambda: attention(query, key, value, shown["causal"]), device)
        found["object"] = milliseconds(lambda: attention(query, key, value, said), device)
    return found


def main() -> None:
    """Measure every size, print a line for each, and write one file where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    present = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=present)
    options = parser.parse_args()
    found = {}
    for seqlen_q, seqlen_kv in SIZES + (CUDA_SIZES if options.device == "cuda" else ()):
        torch.manual_seed(0)
        name = f"{seqlen_q}x{seqlen_kv}"
        found[name] = measure(seqlen_q, seqlen_kv, options.device)
        progress(f"{name}: {', '.join(f'{kind} {ms} ms' for kind, ms in found[name].items())}")
    if options.out is not None:
        text = json.dumps({"environment": _where(options.device), "ms": found}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


def _where(device: str) -> dict[str, str]:
    if device == "cuda":
        return environment()
    return {
        "processor": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "date": date.today().isoformat(),  # noqa: DTZ011 - a day, wherever the machine stands
    }


if __name__ == "__main__":
    main()
