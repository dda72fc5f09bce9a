"""Host time of packages: the package's own function by hand, `attention()` and stock, in turns.

Host time is that until the call returns, of several calls one after the other; no queue of a device is full
then. "attention_one_thread" runs backwards in the thread that asks for them, as users may choose. Device time
is the sum of the kernels' own times. Tensors lie as models have them, tokens outermost.

python benchmarks/package_host.py --out results.json [--only fa3] [--seconds 80] [--dry-run]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from backends import versions
from common import Run, environment, progress, save
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention, masks

BACKENDS = ("fa3", "cudnn_fe", "fa4")
"""In the order of what they compile."""
WINDOW = 128
DOCUMENTS = (1024, 300, 724, 2048, 1500, 2596)
CALLS = 10
"""Calls of one timing: few enough that the device's queue takes all of their launches."""


class Case(NamedTuple):
    """One kind of call: "causal", "window" or "documents", which are causal too."""

    kind: str
    size: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    train: bool

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{self.kind}_{self.size}_{'train' if self.train else 'forward'}"


SIZES = (("tiny", 1, 8, 128, 64), ("gpt2", 16, 12, 1024, 64))
CASES = tuple(Case("causal", *size, train) for train in (False, True) for size in SIZES)
CASES += tuple(Case("window", *SIZES[1], train) for train in (False, True))
CASES += tuple(Case("documents", "8k", 1, 16, sum(DOCUMENTS), 64, train) for train in (False, True))


class Given(NamedTuple):
    """The tensors of a case, (batch, heads, seqlen, head_dim) over memory whose tokens are outermost."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    sums: Tensor


def given(case: Case, device: str) -> Given:
    """Draw the tensors of a case."""
    dtype = torch.bfloat16
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    drawn = [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)]
    sums = torch.tensor([0, *accumulate(DOCUMENTS)], device=device, dtype=torch.int32)
    return Given(*(t.requires_grad_(case.train) for t in drawn[:3]), drawn[3], sums)


def ours(case: Case, tensors: Given, backend: str | None) -> Callable[[], Tensor]:
    """Return the forward by `attention()`."""
    settings: dict[str, Any] = {"is_causal": True, "backend": backend}
    if case.kind == "window":
        settings = {"window": (WINDOW, 0), "backend": backend}
    elif case.kind == "documents":
        settings["mask"] = masks.Documents(cu_seqlens=tensors.sums)
    query, key, value, *_ = tensors
    return lambda: attention(query, key, value, **settings)


def stock(case: Case, tensors: Given) -> Callable[[], Tensor]:
    """Return the forward by stock, with the bool tensor that a user builds once."""
    query, key, value, *_ = tensors
    if case.kind == "causal":
        return lambda: sdpa(query, key, value, is_causal=True)
    at = torch.arange(case.seqlen, device=query.device)
    behind = at[:, None] - at
    allowed = behind >= 0
    if case.kind == "window":
        allowed &= behind <= WINDOW
    else:
        ids = torch.searchsorted(tensors.sums[1:], at.int(), right=True)
        allowed &= ids[:, None] == ids
    return lambda: sdpa(query, key, value, attn_mask=allowed)


def by_hand(case: Case, tensors: Given, backend: str) -> dict[str, Callable[[], Tensor]]:
    """Return the forwards that somebody writes who knows the package, with autograd around them."""
    return {"fa3": _fa3, "fa4": _fa4, "cudnn_fe": _cudnn_fe}[backend](case, tensors)


def _tokens_first(case: Case, tensors: Given) -> tuple[Tensor, ...]:
    taken = tuple(t.transpose(1, 2) for t in tensors[:3])
    return tuple(t[0] for t in taken) if case.kind == "documents" else taken


class _Fa3(torch.autograd.Function):
    """FlashAttnFunc and FlashAttnVarlenFunc of flash_attn_interface.py, as short as they can be."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, sums, longest, window = arguments
        settings = {
            "cu_seqlens_q": sums,
            "cu_seqlens_k": sums,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "softmax_scale": query.shape[-1] ** -0.5,
            "is_causal": window is None,
            "window_size_left": -1 if window is None else window,
            "window_size_right": -1 if window is None else 0,
        }
        out, lse, *_ = torch.ops.flash_attn_3.fwd(query, key, value, **settings, num_splits=1)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        made = tuple(torch.empty_like(t) for t in (query, key, value))
        torch.ops.flash_attn_3.bwd(grads[0], query, key, value, out, lse, *made, **ctx.settings)
        return *made, None, None, None


def _fa3(case: Case, tensors: Given) -> dict[str, Callable[[], Tensor]]:
    for library in ("flash_attn_3._C", "xformers.flash_attn_3._C"):
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
    query, key, value = _tokens_first(case, tensors)
    is_ragged = case.kind == "documents"
    rest = (tensors.sums, max(DOCUMENTS)) if is_ragged else (None, None)
    window = WINDOW if case.kind == "window" else None
    return {"by_hand": lambda: _Fa3.apply(query, key, value, *rest, window)}


def _fa4(case: Case, tensors: Given) -> dict[str, Callable[[], Tensor]]:
    package = importlib.import_module("flash_attn.cute")
    query, key, value = _tokens_first(case, tensors)
    if case.kind == "documents":
        settings = {"cu_seqlens_q": tensors.sums, "cu_seqlens_k": tensors.sums}
        settings |= {"max_seqlen_q": max(DOCUMENTS), "max_seqlen_k": max(DOCUMENTS), "causal": True}
        return {"by_hand": lambda: package.flash_attn_varlen_func(query, key, value, **settings)[0]}
    settings = {"window_size": (WINDOW, 0)} if case.kind == "window" else {"causal": True}
    return {"by_hand": lambda: package.flash_attn_func(query, key, value, **settings)[0]}


def _cudnn_fe(case: Case, tensors: Given) -> dict[str, Callable[[], Tensor]]:
    importlib.import_module("cudnn.sdpa.fwd.torch_op")
    settings: dict[str, Any] = {"attn_scale": case.head_dim**-0.5, "is_causal": True}
    query, key, value = tensors[:3]
    if case.kind == "window":
        settings["window_left"] = WINDOW + 1
    if case.kind == "documents":
        query, key, value = _tokens_first(case, tensors)
        settings |= {"cu_seqlens_q": tensors.sums, "cu_seqlens_kv": tensors.sums}
        settings |= {"max_seqlen_q": max(DOCUMENTS), "max_seqlen_kv": max(DOCUMENTS)}
    fwd = torch.ops.cudnn.sdpa_fwd
    runs = {"by_hand": lambda: fwd(query, key, value, return_lse=case.train, **settings)[0]}
    if not case.train and case.kind != "documents":
        runs["prebuilt_graph"] = _prebuilt(query, key, value, settings)
    return runs


def _prebuilt(query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a graph's `execute` with one pack of pointers and one workspace: the least that this takes."""
    module = vars(importlib.import_module("cudnn.sdpa.fwd.torch_op"))
    module["_graph_cache"].clear()
    out, _ = torch.ops.cudnn.sdpa_fwd(query, key, value, return_lse=False, **settings)
    ((graph, size, uids),) = module["_graph_cache"].values()
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=query.device)
    buffers, handle = [query, key, value, out], module["_get_handle"](query.device)

    def run() -> Tensor:
        graph.execute(buffers, workspace, handle=handle, tensor_uids=uids)
        return out

    return run


def with_backward(case: Case, tensors: Given, forward: Callable[[], Tensor]) -> Run:
    """Return the step that is timed: the forward, and the gradients where the case trains."""
    if not case.train:
        return forward
    grad = tensors.grad
    grad_tokens = grad.transpose(1, 2)

    def step() -> object:
        out = forward()
        fitting = grad if out.shape == grad.shape else grad_tokens
        return torch.autograd.grad(out, tensors[:3], fitting if out.dim() == 4 else grad_tokens[0])

    return step


def in_one_thread(run: Run) -> Run:
    """Return a step whose backward runs in the thread that asks for it."""

    def step() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return run()

    return step


def host_us(run: Run, *, synchronize: Run) -> float:
    """Return microseconds of the host until one call returns."""
    synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    taken = time.perf_counter() - start
    synchronize()
    return taken / CALLS * 1e6


def device_ms(run: Run) -> float:
    """Return the time of one call's kernels in milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profile.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("attnroute::")
    ]
    return sum(event.time_range.elapsed_us() for event in kernels) / CALLS / 1e3


def forwards_of(case: Case, tensors: Given, backend: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield what is timed, by name."""
    yield from by_hand(case, tensors, backend).items()
    yield "attention", ours(case, tensors, backend)
    yield "stock", stock(case, tensors)


def measure(case: Case, backend: str, *, rounds: int) -> dict[str, Any]:
    """Time one kind of call of one backend."""
    torch.manual_seed(0)
    tensors = given(case, "cuda")
    runs = {name: with_backward(case, tensors, f) for name, f in forwards_of(case, tensors, backend)}
    if case.train:
        runs["attention_one_thread"] = in_one_thread(runs["attention"])
    for run in runs.values():
        run()
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(host_us(run, synchronize=torch.cuda.synchronize))
    return {
        "host_us": {name: round(statistics.median(each), 1) for name, each in taken.items()},
        "device_ms": {name: round(device_ms(run), 4) for name, run in runs.items()},
    }


def dry_run() -> None:
    """Time `attention()` and stock on the CPU, where no package runs: only the way of a call is tried."""
    small = (c._replace(batch=1, heads=2, head_dim=16) for c in CASES[:2] + CASES[4:])
    for case in (c if c.kind == "documents" else c._replace(seqlen=64) for c in small):
        tensors = given(case, "cpu")
        for name, forward in (("attention", ours(case, tensors, None)), ("stock", stock(case, tensors))):
            step = with_backward(case, tensors, forward)
            step()
            progress(f"{case.name} {name}: {host_us(step, synchronize=lambda: None):.0f} us")


def main() -> None:
    """Measure every backend and write the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", default=[], help="backends, fa3 for example")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no case after this long")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    start = time.monotonic()
    results: dict[str, Any] = {"environment": environment(), "packages": versions(), "backends": {}}
    for backend in options.only or BACKENDS:
        found = results["backends"].setdefault(backend, {})
        for case in CASES:
            if time.monotonic() - start > options.seconds:
                found[case.name] = "no time was left"
                continue
            try:
                found[case.name] = measure(case, backend, rounds=options.rounds)
            except Exception as error:  # noqa: BLE001 - a package that fails is a result
                found[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
            progress(f"{backend} {case.name}: {found[case.name]}")
            save(options.out, results)


if __name__ == "__main__":
    main()
