"""attnroute on several GPUs beside the same by hand: layers spread by heads and by weights, rings, DTensors.

Layers are a Llama-like block that trains in turns with stock attention, from the same weights on the same
tokens: the time of a training step (forward, backward, optimizer), peak memory, losses beside those of one
GPU, and what ran on each rank. Rings and calls on DTensors are in `distributed_calls.py`. With fa3 and fa4
installed, `--backends fa3,fa4,cudnn,flash` has layers and rings of each.

NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node=2 benchmarks/distributed.py --out distributed.json
torchrun --nproc-per-node=2 benchmarks/distributed.py --cpu --out smoke.json   # tiny sizes over gloo
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import distributed_calls as calls
import torch
import torch.distributed as dist
from common import environment, progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

import attnroute

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
STYLES = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}
LEARNING_RATE = 1e-5
WARM_UP = 2
SHOWN = 12
"""Kernels that are named with their time."""
ROUNDS = 16
"""Steps of each attention that are timed; in every other one stock attention is first."""


@dataclass(frozen=True)
class Sizes:
    """Those of the model, and the batch rows of all ranks together for each rank."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    layers: int = 4
    tokens: int = 4096
    rows: int = 1


TINY = Sizes(hidden=64, heads=8, kv_heads=4, head_dim=8, inner=96, layers=2, tokens=32)


def ours(query: Tensor, key: Tensor, value: Tensor, *, backend: str | None = None) -> Tensor:
    """Return causal attention of attnroute, of a backend that is required."""
    return attnroute.attention(query, key, value, is_causal=True, backend=backend)


def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same as people write it with torch."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


KINDS: dict[str, Attention] = {"attnroute": ours, "stock": stock}
"""Whose attention layers have; with `--backends` also that of backends which are required."""


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, sizes: Sizes, attention: Attention, dtype: torch.dtype, device: str) -> None:
        """Make the weights of one layer."""
        super().__init__()

        def linear(width: int, height: int) -> nn.Linear:
            return nn.Linear(width, height, bias=False, dtype=dtype, device=device)

        self.attention, self.head_dim = attention, sizes.head_dim
        self.norm_1 = nn.RMSNorm(sizes.hidden, dtype=dtype, device=device)
        self.norm_2 = nn.RMSNorm(sizes.hidden, dtype=dtype, device=device)
        self.q_proj = linear(sizes.hidden, sizes.heads * sizes.head_dim)
        self.k_proj = linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.v_proj = linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.o_proj = linear(sizes.heads * sizes.head_dim, sizes.hidden)
        self.gate_proj = linear(sizes.hidden, sizes.inner)
        self.up_proj = linear(sizes.hidden, sizes.inner)
        self.down_proj = linear(sizes.inner, sizes.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output; each rank has as many heads as its projections give."""
        normed = self.norm_1(hidden)
        heads = (project(normed) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in heads)
        hidden = hidden + self.o_proj(self.attention(query, key, value).transpose(1, 2).flatten(2))
        normed = self.norm_2(hidden)
        return hidden + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))


class Trainer:
    """A model with its optimizer; the same weights whatever its attention is.

    Attributes:
        losses: Those of the steps so far, of this rank's rows.
    """

    def __init__(self, sizes: Sizes, kind: str, way: str, mesh: DeviceMesh | None, device: str) -> None:
        """Make the model, and spread it over the mesh by heads or by weights."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        layers = [Layer(sizes, KINDS[kind], dtype, device) for _ in range(sizes.layers)]
        self.model: Any = nn.Sequential(*layers)
        if way == "heads":
            for layer in layers:
                parallelize_module(layer, mesh, {name: style() for name, style in STYLES.items()})
        elif way == "weights":
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(self.model, mesh=mesh)
        # Norms are no DTensors where heads are spread, and one operator takes no mixture.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=False)
        self.losses: list[float] = []
        self._loss: Tensor | None = None

    def step(self, rows: Tensor) -> None:
        """Train one step; the loss stays on the device until `note`."""
        loss = (self.model(rows).float() - rows.float().roll(1, -1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss = loss.detach()

    def note(self) -> None:
        """Remember the last loss."""
        if self._loss is not None:
            self.losses.append(self._loss.item())


def timed(trainer: Trainer, rows: Tensor, device: str) -> float:
    """Return the milliseconds of one step, which all ranks begin together."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.step(rows)
    if device == "cuda":
        torch.cuda.synchronize()
    took = (time.perf_counter() - start) * 1e3
    trainer.note()
    return took


def peak_mib(trainer: Trainer, rows: Tensor, device: str) -> float | None:
    """Return how far a step raises the allocated memory, in MiB; None on a CPU."""
    if device != "cuda":
        trainer.step(rows)
        trainer.note()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    timed(trainer, rows, device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def kernels(trainer: Trainer, rows: Tensor, device: str) -> list[str]:
    """Return the kernels of attention that one step runs, by the profiler."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        timed(trainer, rows, device)
    words = ("attention", "fmha", "flash", "sdpa", "attnroute::")
    names = {event.name[:120] for event in profile.events()}
    return sorted(name for name in names if any(word in name.lower() for word in words))


def on_device_ms(trainer: Trainer, rows: Tensor, device: str) -> dict[str, float]:
    """Return the device time of one step's longest kernels by name, and of all."""
    if device == "cpu":
        timed(trainer, rows, device)
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed(trainer, rows, device)
    times: dict[str, float] = {}
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            name = event.name[:90]
            times[name] = times.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(times, key=lambda name: -times[name])[:SHOWN]
    return {"all": round(sum(times.values()), 3)} | {name: round(times[name], 3) for name in longest}


def measured(sizes: Sizes, way: str, mesh: DeviceMesh, rows: Tensor, device: str) -> dict[str, Any]:
    """Train both in turns; return times, memory, losses and kernels of this rank."""
    trainers = {kind: Trainer(sizes, kind, way, mesh, device) for kind in KINDS}
    for trainer in trainers.values():
        for _ in range(WARM_UP):
            timed(trainer, rows, device)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for at in range(ROUNDS):
        for kind in (*KINDS,) if at % 2 else reversed(KINDS):
            times[kind].append(timed(trainers[kind], rows, device))
    found: dict[str, Any] = {"step_ms": {kind: median(its) for kind, its in times.items()}}
    found["least_ms"] = {kind: min(its) for kind, its in times.items()}
    found["peak_mib"] = {kind: peak_mib(trainer, rows, device) for kind, trainer in trainers.items()}
    with attnroute.trace() as seen:
        timed(trainers["attnroute"], rows, device)
    found["calls"] = [
        {"line": call.line, "backend": call.backend, "count": call.count} for call in seen.calls
    ]
    found["device_ms"] = {kind: on_device_ms(trainer, rows, device) for kind, trainer in trainers.items()}
    found["kernels"] = {kind: kernels(trainer, rows, device) for kind, trainer in trainers.items()}
    found["losses"] = {kind: trainer.losses for kind, trainer in trainers.items()}
    return found


def alone(sizes: Sizes, rows: Tensor, steps: int, device: str) -> list[float]:
    """Return the losses of one device that has all rows, with stock attention."""
    trainer = Trainer(sizes, "stock", "alone", None, device)
    for _ in range(steps):
        timed(trainer, rows, device)
    return trainer.losses


def summed(found: list[dict[str, Any]], expected: list[float], way: str) -> dict[str, Any]:
    """Return what all ranks say together: the slowest rank's times, and losses beside those of one device."""
    first = found[0]
    step_ms = {kind: max(rank["step_ms"][kind] for rank in found) for kind in KINDS}
    losses = {}
    for kind in KINDS:
        steps = zip(*(rank["losses"][kind] for rank in found), strict=True)
        losses[kind] = [sum(step) / len(step) for step in steps]
    worst = {
        kind: max(abs(one - other) / abs(other) for one, other in zip(its, expected, strict=False))
        for kind, its in losses.items()
    }
    least_ms = {kind: max(rank["least_ms"][kind] for rank in found) for kind in KINDS}
    return {
        "way": way,
        "step_ms": step_ms,
        "least_ms": least_ms,
        "over_stock": {kind: ms / step_ms["stock"] for kind, ms in step_ms.items() if kind != "stock"},
        "peak_mib": first["peak_mib"],
        "losses": {kind: its[: len(expected)] for kind, its in losses.items()},
        "losses_alone": expected,
        "loss_error": worst,
        "ranks": [{name: rank[name] for name in ("calls", "kernels", "device_ms")} for rank in found],
    }


PARTS = ("heads", "weights", "rings", "dtensors")


def layers(way: str, sizes: Sizes, mesh: DeviceMesh, rows: Tensor, expected: list[float]) -> dict[str, Any]:
    """Measure layers that are spread in one way."""
    ranks, device = dist.get_world_size(), mesh.device_type
    mine = rows.chunk(ranks)[dist.get_rank()] if way == "weights" else rows
    found = calls.gathered(measured(sizes, way, mesh, mine, device))
    result = summed(found, expected, way)
    told = {kind: f"{ms:.2f} ms" for kind, ms in result["step_ms"].items()}
    _tell(f"{way} over {ranks} ranks: {told}, losses off by {result['loss_error']}")
    return result


def rings(mesh: DeviceMesh, device: str, backends: list[str]) -> list[dict[str, Any]]:
    """Measure rings on each backend beside rings by hand."""
    found: list[dict[str, Any]] = [{"kind": "ring, right", "apart_from_float32": calls.right(mesh, device)}]
    for case in calls.TINY_RINGS if device == "cpu" else calls.RINGS:
        found.append(calls.ring(case, mesh, device, backends))
        _tell(f"{case.name}: {found[-1]['over_by_hand']} of by hand, left out {found[-1]['left_out']}")
    return found


def dtensors(mesh: DeviceMesh, device: str, backends: list[str]) -> list[dict[str, Any]]:
    """Measure calls on DTensors, on each backend too, beside local calls by hand."""
    found = []
    for case in calls.TINY_SPREAD if device == "cpu" else calls.SPREAD:
        for trains in (False, True):
            for replicated in (False, True):
                one = calls.spread(
                    case, mesh, device, trains=trains, replicated=replicated, backends=backends
                )
                found.append(one)
                _tell(f"DTensors {case.size}, trains {trains}: {one['over_stock']:.3f} of by hand")
    return found


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        progress(text)


def main() -> None:
    """Measure over all ranks, and write what rank 0 gathers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes over gloo")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--backends", default="", help="also required, such as fa3,fa4,cudnn,flash")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts).difference(PARTS):
        parser.error(f"--parts requires some of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    device, sizes = ("cpu", TINY) if args.cpu else ("cuda", Sizes())
    if device == "cuda":
        # Multicast over NVLink is not to be had on every machine that shares its switches.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    backends = args.backends.split(",") if args.backends else ["flash"] if args.cpu else ["cudnn", "flash"]
    KINDS.update({f"attnroute {name}": partial(ours, backend=name) for name in backends})
    data: dict[str, Any] = {"ranks": mesh.size(), "sizes": asdict(sizes)}
    ways = [way for way in ("heads", "weights") if way in parts]
    if ways:
        torch.manual_seed(1)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        rows = torch.randn(mesh.size() * sizes.rows, sizes.tokens, sizes.hidden).to(device, dtype)
        expected = alone(sizes, rows, WARM_UP + 2, device)
        data["ways"] = [layers(way, sizes, mesh, rows, expected) for way in ways]
    if "rings" in parts:
        data["rings"] = rings(mesh, device, backends)
    if "dtensors" in parts:
        data["dtensors"] = dtensors(mesh, device, backends)
    if dist.get_rank() == 0:
        where = {"card": "cpu"} if device == "cpu" else environment()
        args.out.write_text(json.dumps({"environment": where, **data}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
