"""Single calls over several GPUs beside the same thing written by hand: rings, and DTensors.

`distributed.py` runs both. Contestants take turns, all ranks begin each turn together, and a time is that of
a forward with its backward where the case trains; a turn is several calls, so that calls wait for the host
where the host is slower than the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from by_hand import KERNELS, Ring
from common import relative
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention

import attnroute
from attnroute.distributed import context_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Attend = Callable[..., Tensor]
ROUNDS = 12
WARM_UP = 3
CALLS = 10
"""Of one turn."""


@dataclass(frozen=True)
class Case:
    """Sizes of a call: batch, query heads, key/value heads, tokens of all ranks together, head dim."""

    name: str
    size: tuple[int, int, int, int, int]
    is_causal: bool = True


RINGS = (
    Case("ring causal", (1, 32, 8, 32768, 128)),
    Case("ring causal, 16,384 tokens", (1, 32, 8, 16384, 128)),
    Case("ring causal, 8,192 tokens", (1, 32, 8, 8192, 128)),
    Case("ring full", (1, 16, 16, 16384, 128), is_causal=False),
)
TINY_RINGS = (Case("ring causal", (1, 4, 4, 64, 16)), Case("ring full", (1, 4, 4, 64, 16), is_causal=False))
SPREAD = (Case("heads", (2, 32, 32, 2048, 128)), Case("heads", (2, 32, 32, 8192, 128)))
TINY_SPREAD = (Case("heads", (2, 8, 8, 16, 16)),)


def drawn(case: Case, device: str, *, tokens: int | None = None) -> list[Tensor]:
    """Return query, key, value and the output's gradient of a case, the same on each rank."""
    batch, heads, heads_kv, whole, dim = case.size
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (tokens or whole, dim)
    made = [torch.randn(batch, n, *shape, generator=generator) for n in (heads, heads_kv, heads_kv, heads)]
    return [_packed(t.to(device, dtype)) for t in made]


def step_of(attend: Attend, leaves: list[Any], grad: Any) -> Callable[[], Any]:
    """Return what runs a call, with its backward where something trains."""
    trained = [leaf for leaf in leaves if leaf.requires_grad]

    def step() -> Any:
        out = attend(*leaves)
        return (out, *torch.autograd.grad(out, trained, grad)) if trained else (out,)

    return step


def turn_ms(step: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of one call in a turn of several, which all ranks begin together."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / CALLS


def peak_mib(step: Callable[[], Any], device: str) -> float | None:
    """Return how far a call raises the allocated memory, in MiB; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def in_turns(steps: dict[str, Callable[[], Any]], device: str) -> dict[str, dict[str, Any]]:
    """Return the median and the least time of each, and its peak of memory, of the slowest rank."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(ROUNDS):
        for name in (*steps,) if at % 2 else reversed(steps):
            times[name].append(turn_ms(steps[name], device))
    own = {
        name: {"ms": median(its), "least_ms": min(its), "peak_mib": peak_mib(steps[name], device)}
        for name, its in times.items()
    }
    return {name: _worst([rank[name] for rank in gathered(own)]) for name in steps}


def _worst(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: max((rank[name] for rank in ranks if rank[name] is not None), default=None) for name in ranks[0]
    }


def gathered(own: Any) -> list[Any]:
    """Return what each rank says."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def ran(step: Callable[[], Any]) -> list[str]:
    """Return the backends that the calls of a step ran on, on this rank."""
    with attnroute.trace() as seen:
        step()
    return sorted({str(call.backend) for call in seen.calls})


def ring(case: Case, mesh: DeviceMesh, device: str, backends: list[str]) -> dict[str, Any]:
    """Time a training step of a ring on each backend, and by hand; the gradient and output of all agree."""
    block = context_parallel(mesh, method="ring", load_balance=case.is_causal)
    *qkv, grad = (block.shard(t, 2) for t in drawn(case, device))
    leaves = [t.detach().requires_grad_() for t in qkv]
    steps: dict[str, Callable[[], Any]] = {}
    left_out: dict[str, str] = {}

    def ours(*tensors: Tensor, backend: str | None = None) -> Tensor:
        return attnroute.attention(*tensors, is_causal=case.is_causal, backend=backend)

    hands = [name for name in KERNELS if (name == "cpu") == (device == "cpu")]
    for name in hands:
        hand = Ring(mesh.get_group(), name, is_causal=case.is_causal, load_balance=case.is_causal)
        steps[f"by hand {name}"] = step_of(hand, leaves, grad)
    with block:
        steps["attnroute"] = step_of(ours, leaves, grad)
        for backend in backends:
            step = step_of(partial(ours, backend=backend), leaves, grad)
            said = gathered(_error_of(step))
            if any(said):
                left_out[backend] = next(one for one in said if one)
            else:
                steps[f"attnroute {backend}"] = step
        kernels = {name: ran(step) for name, step in steps.items() if name.startswith("attnroute")}
        first = steps[f"by hand {hands[0]}"]()
        apart = {
            name: max(relative(got, want) for got, want in zip(step(), first, strict=True))
            for name, step in steps.items()
        }
        times = in_turns(steps, device)
    return {
        "kind": "ring",
        "case": case.name,
        "size": case.size,
        "worst_rank": times,
        "over_by_hand": _over(times),
        "apart": apart,
        "backends": gathered(kernels),
        "left_out": left_out,
    }


def _error_of(step: Callable[[], Any]) -> str:
    """Return why a backend has no part in a ring; nothing where it has."""
    try:
        step()
    except attnroute.AttnRouteError as error:
        return str(error).splitlines()[0]
    return ""


def _over(times: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return each time over that by hand on the same kernel, else over the fastest by hand."""
    by_hand = {name.removeprefix("by hand "): its["ms"] for name, its in times.items() if name[:2] == "by"}
    best = min(by_hand.values())
    return {
        name: its["ms"] / by_hand.get(name.removeprefix("attnroute ").replace("attnroute", ""), best)
        for name, its in times.items()
        if name.startswith("attnroute")
    }


def right(mesh: DeviceMesh, device: str) -> dict[str, float]:
    """Return how far a ring is from float32 attention of one device, by output and gradients."""
    case = Case("right", (1, 8, 8, 64 if device == "cpu" else 2048, 64))
    block, whole = context_parallel(mesh, load_balance=True), drawn(case, device)
    *qkv, grad = (block.shard(t, 2) for t in whole)
    leaves = [t.detach().requires_grad_() for t in qkv]
    exact = [t.detach().float().requires_grad_() for t in whole[:3]]
    out = scaled_dot_product_attention(*exact, is_causal=True)
    want = [block.shard(t, 2) for t in (out, *torch.autograd.grad(out, exact, whole[3].float()))]
    with block:
        got = step_of(lambda *t: attnroute.attention(*t, is_causal=True), leaves, grad)()
    names = ("out", "query", "key", "value")
    own = {name: relative(one, other) for name, one, other in zip(names, got, want, strict=True)}
    return {name: max(rank[name] for rank in gathered(own)) for name in names}


def _packed(tensor: Tensor) -> Tensor:
    """Return a copy whose tokens are outermost in memory, with nothing between them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def spread(
    case: Case, mesh: DeviceMesh, device: str, *, trains: bool, replicated: bool, backends: list[str]
) -> dict[str, Any]:
    """Time a call on DTensors, on each backend too, beside local tensors and a DTensor by hand."""
    whole, ranks, rank = drawn(case, device), mesh.size(), dist.get_rank()
    heads = case.size[1] // ranks
    # A key/value head for each rank, of which each holds all.
    kv = [t[:, :ranks] if replicated else t for t in whole[1:3]]
    on_kv: list[Any] = [Replicate()] if replicated else [Shard(1)]
    of_kv: list[Any] = [Partial()] if replicated else [Shard(1)]
    own = slice(rank * heads, (rank + 1) * heads)
    # A projection's weights are split, and what it returns is memory of this process alone.
    local = [_packed(t) for t in (whole[0][:, own], *((t if replicated else t[:, own]) for t in kv))]
    leaves = [
        DTensor.from_local(t, mesh, placed, shape=full.shape, stride=full.stride()).detach()
        for t, full, placed in zip(local, (whole[0], *kv), ([Shard(1)], on_kv, on_kv), strict=True)
    ]
    leaves = [leaf.requires_grad_(trains) for leaf in leaves]
    shape, stride = whole[0].shape, whole[0].stride()
    grad = DTensor.from_local(_packed(whole[3][:, own]), mesh, [Shard(1)], shape=shape, stride=stride)

    def by_hand(attend: Attend) -> Attend:
        def run(query: Any, key: Any, value: Any) -> Any:
            parts = [query.to_local(), *(t.to_local(grad_placements=of_kv) for t in (key, value))]
            if replicated:
                parts = [parts[0], *(t.narrow(1, rank, 1) for t in parts[1:])]
            out = attend(*parts, is_causal=True, enable_gqa=replicated)
            return DTensor.from_local(out, mesh, [Shard(1)], shape=shape, stride=stride)

        return run

    def ours(*tensors: Any, backend: str | None = None) -> Any:
        return attnroute.attention(*tensors, is_causal=True, backend=backend)

    steps = {
        "DTensors": step_of(ours, leaves, grad),
        **{f"DTensors {name}": step_of(partial(ours, backend=name), leaves, grad) for name in backends},
        "by hand on stock": step_of(by_hand(scaled_dot_product_attention), leaves, grad),
        "by hand on attention()": step_of(by_hand(attnroute.attention), leaves, grad),
    }
    found = {name: step() for name, step in steps.items()}
    apart = max(
        relative(one.to_local(), other.to_local())
        for name, its in found.items()
        if name != "by hand on stock"
        for one, other in zip(its, found["by hand on stock"], strict=True)
    )
    times = in_turns(steps, device)
    return {
        "kind": "DTensors",
        "size": case.size,
        "trains": trains,
        "key_heads": "replicated" if replicated else "split",
        "worst_rank": times,
        "over_stock": times["DTensors"]["ms"] / times["by hand on stock"]["ms"],
        "apart": apart,
        "backends": gathered(ran(steps["DTensors"])),
    }
