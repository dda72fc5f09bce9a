"""Measure `chunked` beside EFFICIENT and stock scaled_dot_product_attention: causal training, large heads.

EFFICIENT does not share key heads, so its time includes repeating them. Errors are against float64 on all
rows of the first key head. `graph` is the time of a replayed CUDA graph: what is left without the host.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, peak_extra_bytes, progress, relative, save, side_by_side
from shapes import LARGE_HEADS, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from attnroute.executors.chunked.run import attend
from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import LoweredMask

CAUSAL = LoweredMask(band_hi=0)
REFERENCE_ROWS = 2048
PARTS = ("out", "dq", "dk", "dv")


def chunked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run what is measured."""
    return attend(Inputs(query, key, value, CAUSAL))[0]


def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run what a user writes."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def efficient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run the fused kernel that takes large heads."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


RUNS = {"chunked": chunked, "efficient": efficient, "stock": stock}


def measure(shape: Shape) -> dict[str, Any]:
    """Return times in milliseconds, peak memory above the inputs in MiB and relative errors of one shape."""
    inputs = shape.tensors()
    grad = torch.randn(*inputs[0].shape[:3], shape.head_dim_v, device="cuda", dtype=torch.bfloat16)

    def forward(name: str) -> Tensor:
        with torch.no_grad():
            return RUNS[name](*inputs)

    def train(name: str) -> tuple[Tensor, ...]:
        out = RUNS[name](*inputs)
        return out, *torch.autograd.grad(out, inputs, grad)

    trainings = {name: lambda name=name: train(name) for name in RUNS}
    forwards = {name: lambda name=name: forward(name) for name in RUNS}
    result: dict[str, Any] = {
        "train_ms": side_by_side(trainings, rounds=3, rep=60),
        "forward_ms": side_by_side(forwards, rounds=3, rep=30),
        "peak_MiB": {name: peak_extra_bytes(run) // 2**20 for name, run in trainings.items()},
        "graph_train_ms": graph_time(trainings["chunked"]),
    }
    want = first_head(*inputs, grad)
    for name in ("chunked", "efficient"):
        result[f"error_{name}"] = errors(train(name), want)
    torch.cuda.empty_cache()
    return result


def graph_time(run: Any) -> float:
    """Return the time of one replay of a run captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=25, rep=60, return_mode="median"))


def first_head(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients in float64 for the first key head and the query heads that share it."""
    group = query.shape[1] // key.shape[1]
    query, grad = query[0, :group].detach().double(), grad[0, :group].double()
    key, value = key[0, 0].detach().double(), value[0, 0].detach().double()
    out, grad_query = torch.empty_like(grad), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    scale = query.shape[-1] ** -0.5
    for head in range(group):
        for start in range(0, query.shape[1], REFERENCE_ROWS):
            rows = slice(start, start + REFERENCE_ROWS)
            scores = query[head, rows] @ key.T * scale
            ahead = torch.ones_like(scores, dtype=torch.bool).triu_(start + 1)
            probs = scores.masked_fill_(ahead, float("-inf")).softmax(-1)
            out[head, rows] = probs @ value
            delta = (grad[head, rows] * out[head, rows]).sum(-1, keepdim=True)
            grad_scores = (grad[head, rows] @ value.T - delta).mul_(probs).mul_(scale)
            grad_query[head, rows] = grad_scores @ key
            grad_key += grad_scores.T @ query[head, rows]
            grad_value += probs.T @ grad[head, rows]
    return out, grad_query, grad_key, grad_value


def errors(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the relative errors of the first key head."""
    heads = want[0].shape[0]
    parts = (got[0][0, :heads], got[1][0, :heads], got[2][0, 0], got[3][0, 0])
    return {name: relative(a.detach(), b) for name, a, b in zip(PARTS, parts, want, strict=True)}


def line(name: str, result: dict[str, Any]) -> str:
    """Return one row of the table."""
    train, peak = result["train_ms"], result["peak_MiB"]
    times = " | ".join(f"{train[run]:8.2f}" for run in RUNS)
    ratios = f"{train['chunked'] / train['efficient']:.2f} | {train['chunked'] / train['stock']:.2f}"
    memory = " / ".join(str(peak[run]) for run in RUNS)
    worst = max(result["error_chunked"].values())
    return f"| {name} | {times} | {ratios} | {result['graph_train_ms']:.2f} | {memory} | {worst:.4f} |"


def main() -> None:
    """Measure every shape, print a table and save the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of shapes that contain this")
    arguments = parser.parse_args()
    progress(str(environment()))
    results = {}
    rows = []
    for shape in LARGE_HEADS:
        if arguments.only in shape.name:
            results[shape.name] = measure(shape)
            rows.append(line(shape.name, results[shape.name]))
            progress(rows[-1])
    save(arguments.out, {"shapes": results})
    titles = "shape | chunked | efficient | stock | /efficient | /stock | graph | peak MiB | error"
    print(f"| {titles} |", *rows, sep="\n")


if __name__ == "__main__":
    main()
