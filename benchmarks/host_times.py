"""Host time of tiny calls, in microseconds: stock with the same inputs, the bare operator, attention().

All take turns in one process, in short bursts; the time of a burst ends when its last call returns, and
the device is waited for between bursts, so that its queue never fills. Stock has no argument for a sink:
it is called without one, and beside it with the sink as one more key, which means the same.

python benchmarks/host_times.py --out results.json [--device cuda] [--alone] [--only causal]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[], object]
SHAPE = (1, 4, 64 if torch.cuda.is_available() else 16, 64)
"""Batch, query heads, length, head_dim: the kernel takes less than what is before it."""
ROUNDS, BURST = 41, 40
NUMBERS = range(65, 365)
"""Of keys, in calls that have another one each."""
GROWING = {
    "one query, a new number of keys": False,
    "one query, a new number of keys, padded": True,
}
AS_A_KEY = "stock, sink as a key"
PACKAGES = "-fa2,-fa3,-fa4,-te,-cudnn_fe,-flex_fa4"


@dataclass
class Case:
    """One kind of call.

    Attributes:
        ours: Keyword arguments of attention().
        stock: Those of stock that mean the same, as far as it can say that.
        heads_kv: Key heads.
        train: Forward and backward.
        learned: What else gets a gradient.
        own: What else does where the sink is part of the call.
    """

    ours: dict[str, Any] = field(default_factory=dict)
    stock: dict[str, Any] = field(default_factory=dict)
    heads_kv: int = SHAPE[1]
    train: bool = False
    learned: tuple[torch.Tensor, ...] = ()
    own: tuple[torch.Tensor, ...] = ()


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Yield every kind of call."""
    from attnroute import masks

    batch, heads, length, _ = SHAPE
    tokens = torch.arange(length, device=device)
    flags = torch.rand(length, length, device=device) < 0.7
    flags[:, 0] = True
    counts = torch.full((batch,), length - 5, device=device)
    keys = (tokens < counts[:, None])[:, None, None, :]
    band = (tokens[:, None] - tokens).ge(0) & (tokens[:, None] - tokens).le(8)
    bias = torch.randn(1, heads, length, length, device=device, dtype=dtype)
    sink = torch.zeros(heads, device=device)
    finite = masks.KeyPadding(lengths=counts, finite=True)
    yield "plain", Case()
    yield "causal", Case({"is_causal": True}, {"is_causal": True})
    yield "bool mask", Case({"mask": flags}, {"attn_mask": flags})
    yield "key padding", Case({"mask": masks.KeyPadding(lengths=counts)}, {"attn_mask": keys})
    yield "key padding, finite", Case({"mask": finite}, {"attn_mask": keys})
    yield "window", Case({"window": (8, 0)}, {"attn_mask": band})
    yield "sink", Case({"sink": sink})
    yield "window, sink", Case({"window": (8, 0), "sink": sink}, {"attn_mask": band})
    yield "dense bias", Case({"bias": bias}, {"attn_mask": bias})
    yield "GQA", Case({}, {"enable_gqa": True}, heads_kv=2)
    yield "training", Case(train=True)
    yield "training, causal", Case({"is_causal": True}, {"is_causal": True}, train=True)
    learned = bias.clone().requires_grad_()
    yield "training, bias", Case({"bias": learned}, {"attn_mask": learned}, train=True, learned=(learned,))
    learned = sink.clone().requires_grad_()
    yield "training, sink", Case({"sink": learned}, train=True, own=(learned,))
    yield "training, bool mask", Case({"mask": flags}, {"attn_mask": flags}, train=True)


def tensors(case: Case, layout: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value, contiguous or with the tokens outermost in memory."""
    batch, heads, length, width = SHAPE
    made = []
    for number in (heads, case.heads_kv, case.heads_kv):
        sizes = (batch, number, length, width) if layout == "bhsd" else (batch, length, number, width)
        whole = torch.randn(sizes, device=device, dtype=dtype)
        made.append((whole if layout == "bhsd" else whole.transpose(1, 2)).requires_grad_(case.train))
    return made


def operator(case: Case, inputs: list[torch.Tensor], selected: str | None) -> Run | None:
    """Return a call of torch's operator of the kernel, with a mask that is not learned as it takes it."""
    if case.learned:
        return None
    query, key, value = inputs
    attn = case.stock.get("attn_mask")
    causal = case.stock.get("is_causal", False)
    if attn is not None and attn.dtype == torch.bool:
        attn = torch.zeros(attn.shape, dtype=query.dtype, device=query.device).masked_fill_(~attn, -torch.inf)
    if attn is not None:
        attn = attn.reshape((1,) * (4 - attn.dim()) + tuple(attn.shape))
    if query.device.type == "cpu":
        flash = torch._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the operator itself
        return lambda: flash(query, key, value, 0.0, causal, attn_mask=attn)
    if selected == "flash" and attn is None:
        flash = torch._scaled_dot_product_flash_attention  # noqa: SLF001 - the operator itself
        return lambda: flash(query, key, value, 0.0, causal, False)
    if selected == "cudnn":
        cudnn = torch._scaled_dot_product_cudnn_attention  # noqa: SLF001 - the operator itself
        return lambda: cudnn(query, key, value, attn, case.train, 0.0, causal, False)
    return None


def sink_as_a_key(case: Case, inputs: list[torch.Tensor]) -> Run | None:
    """Return what says a sink to stock: one more key, zero in key and value, with the sink as its bias.

    What no step changes is made once: the zeros, and the bias where the sink does not train.
    """
    sink: torch.Tensor | None = case.ours.get("sink")
    if sink is None:
        return None
    query, key, value = inputs
    heads, shared = query.shape[1], query.shape[1] != key.shape[1]
    no_key, no_value = (t.new_zeros(*t.shape[:2], 1, t.shape[3]) for t in (key, value))
    scores = query.new_zeros(1, heads, query.shape[2], key.shape[2])
    allowed = case.stock.get("attn_mask")
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)

    def padded() -> torch.Tensor:
        last = sink.to(query.dtype).reshape(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, last), -1)

    made = None if sink.requires_grad else padded()

    def run() -> object:
        keys, values = torch.cat((key, no_key), 2), torch.cat((value, no_value), 2)
        bias = padded() if made is None else made
        if shared:
            return scaled_dot_product_attention(query, keys, values, bias, enable_gqa=True)
        return scaled_dot_product_attention(query, keys, values, bias)

    return run


def with_gradients(run: Run, inputs: list[torch.Tensor]) -> Run:
    """Return a training step; the gradient lies in memory as the output does."""
    shown: Any = run()
    grad = torch.randn_like(shown if isinstance(shown, torch.Tensor) else shown[0])

    def step() -> object:
        out: Any = run()
        return torch.autograd.grad(out if isinstance(out, torch.Tensor) else out[0], inputs, grad)

    return step


def in_turns(runs: dict[str, Run], device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and the least host time of each run in microseconds per call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(5):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            for _ in range(BURST):
                run()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
    wait()
    return {n: {"median": round(median(t), 2), "least": round(min(t), 2)} for n, t in times.items()}


def runs_of(case: Case, inputs: list[torch.Tensor], selected: str | None) -> dict[str, Run]:
    """Return what is timed for one kind of call."""
    from attnroute import attention

    runs: dict[str, Run | None] = {
        "stock": lambda: scaled_dot_product_attention(*inputs, **case.stock),
        "attention": lambda: attention(*inputs, **case.ours),
        "operator": operator(case, inputs, selected),
        AS_A_KEY: sink_as_a_key(case, inputs),
    }
    found = {name: run for name, run in runs.items() if run is not None}
    if not case.train:
        return found
    learned = [*inputs, *case.learned]
    asked = {name: [*learned, *case.own] if name in {"attention", AS_A_KEY} else learned for name in found}
    return {name: with_gradients(run, asked[name]) for name, run in found.items()}


def measure(case: Case, layout: str, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Time one kind of call in one layout."""
    from attnroute import explain

    inputs = tensors(case, layout, device, dtype)
    selected = explain(*inputs, **case.ours).selected
    return {"selected": selected, **in_turns(runs_of(case, inputs, selected), device, rounds)}


def growing(device: str, dtype: torch.dtype, *, padded: bool) -> dict[str, Any]:
    """Time one query at a new number of keys in each call, as the first layer of a step of decoding has it.

    Stock is first at each number, so that it alone waits where its kernel makes a plan for that.
    """
    from attnroute import attention, explain, masks

    batch, heads, _, width = SHAPE
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {"stock": [], "attention": []}
    query = torch.randn(batch, heads, 1, width, device=device, dtype=dtype)
    for keys in NUMBERS:
        key, value = (torch.randn(batch, heads, keys, width, device=device, dtype=dtype) for _ in range(2))
        keep = torch.arange(keys, device=device).expand(batch, keys) >= 3
        for name, run in (("stock", scaled_dot_product_attention), ("attention", attention)):
            mask: Any = None
            if padded:
                mask = keep[:, None, None] if name == "stock" else masks.KeyPadding(keep=keep, finite=True)
            wait()
            start = time.perf_counter()
            run(query, key, value, mask)
            times[name].append((time.perf_counter() - start) * 1e6)
    found = {n: {"median": round(median(t), 2), "least": round(min(t), 2)} for n, t in times.items()}
    return {"selected": explain(query, key, value, mask).selected, **found}


def where(device: str) -> dict[str, str]:
    """Return card, driver, versions and date."""
    if device == "cuda":
        from common import environment

        return environment()
    card = platform.processor() or platform.machine()
    return {"card": card, "torch": torch.__version__, "date": date.today().isoformat()}  # noqa: DTZ011


def show(name: str, row: dict[str, Any]) -> None:
    """Print the times of one kind of call."""
    stock, ours, bare = row["stock"], row["attention"], row.get("operator", {"median": float("nan")})
    print(
        f"{name:40}{row['selected']!s:>10}{stock['median']:9.1f}{bare['median']:9.1f}"
        f"{ours['median']:9.1f}{ours['median'] - stock['median']:12.1f}"
        f"  ({ours['least'] - stock['least']:.1f})",
        flush=True,
    )
    if AS_A_KEY in row:
        same = row[AS_A_KEY]
        print(
            f"{'  ' + AS_A_KEY:40}{'':>10}{same['median']:9.1f}{'':>18}"
            f"{ours['median'] - same['median']:12.1f}  ({ours['least'] - same['least']:.1f})",
            flush=True,
        )


def main() -> None:
    """Measure every kind of call, print and write the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--alone", action="store_true", help="torch's own kernels alone")
    parser.add_argument("--only", action="append", default=[], help="kinds whose name contains this")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.alone:
        # Not override(), inside of which a call also looks up what is noted of it.
        os.environ["ATTNROUTE_BACKENDS"] = PACKAGES
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    results: dict[str, Any] = {"environment": where(options.device), "alone": options.alone, "us": {}}
    print(f"{'':40}{'selected':>10}{'stock':>9}{'operator':>9}{'ours':>9}{'over stock':>12}  (least)")
    for name, case in cases(options.device, dtype):
        if options.only and not any(part in name for part in options.only):
            continue
        for layout in ("bhsd", "tokens outermost"):
            row = measure(case, layout, options.device, dtype, options.rounds)
            results["us"][f"{name}, {layout}"] = row
            show(f"{name}, {layout}", row)
    for name, padded in GROWING.items():
        if not options.only or any(part in name for part in options.only):
            results["us"][name] = growing(options.device, dtype, padded=padded)
            show(name, results["us"][name])
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
