"""Predicts what a call takes on a card from a few measured numbers of each backend.

On the device a kernel takes the larger part of multiplying and reading, and less than their sum; besides it
takes its launch, its blocks' begin and end, and its repairs. Blocks run in waves over the multiprocessors, so
few of them leave some idle, unless the keys of one query tile are split over several. A call that the host
hands over more slowly than the device runs it takes the host's time (`engine.rank`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from attnroute.engine.work import Work, steps_of, work_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnroute.question.call import Call
    from attnroute.tables.archs import Peak
    from attnroute.tables.costs import Costs, HostTimes, Kernel
    from attnroute.vocabulary import Repair

_GIGA_PER_MS = 1e6
_TERA_PER_MS = 1e9
_DIM = 128
"""Head_dim of the blocks that `Kernel.block_us` is about; others have as much more to read and to write."""


class Cost(NamedTuple):
    """What a call takes.

    Attributes:
        device_ms: Time of the device, forward and backward, in milliseconds.
        host_ms: Time of the host until the call returned, in milliseconds.
        kind: "measured": on this architecture; "inferred": on another, and scaled to this card;
            "tuned": this call on this machine.
        source: Card and date.
    """

    device_ms: float
    host_ms: float
    kind: Literal["measured", "inferred", "tuned"]
    source: str


class Rates(NamedTuple):
    """The numbers of a `Kernel` that count for one call, scaled to a card.

    Each may be an array, so that `benchmarks/fit_costs.py` fits with the very formula of `device_ms`.
    """

    launch_us: float
    block_us: float
    tflops: float
    wave: float
    packing: float
    split_keys: float
    gbs: float
    idle: float
    mask_gbs: float
    repair_gbs: Mapping[Repair, float]
    repair_us: float
    ragged_us: float
    factor: float
    sms: float


def cost_of(
    given: Call, final: Call, repairs: tuple[Repair, ...], sizes: tuple[int, ...], costs: Costs, peak: Peak
) -> Cost | None:
    """Return what a call is predicted to take.

    Args:
        given: The call, normalised.
        final: The call as the kernel gets it.
        repairs: What is done to it before, in order.
        sizes: What each of them allocates, in bytes.
        costs: The costs of the backend.
        peak: What the card can do at most.

    Returns:
        None where nothing was measured that speaks about such a call.
    """
    work = work_of(given, final, repairs, sizes)
    if work is None:
        return None
    table = costs.table
    parts = [(table.forward_few if work.is_few else table.forward, work)]
    if given.phase == "training":
        # What was copied for the forward is there, and gradients go back through the copies.
        is_composed = "backward_from_chunked" in repairs
        parts.append((costs.composed if is_composed else table.backward, work))
    device = 0.0
    for kernel, its_work in parts:
        rates = None if kernel is None else rates_of(kernel, its_work, table.peak, peak)
        if rates is None:
            return None
        device += device_ms(its_work, rates)
    host = _host_us(table.host.get(given.phase), final, (*repairs, *work.traits))
    kind: Literal["measured", "inferred"] = "measured" if costs.is_own else "inferred"
    source = f"{table.measured.card}, {table.measured.date}"
    return None if host is None else Cost(device, host / 1e3, kind, source)


def rates_of(kernel: Kernel, work: Work, measured: Peak, peak: Peak) -> Rates | None:
    """Return the numbers that count for a call, scaled from the measured card to another.

    Returns:
        None where no call of such a head_dim was measured.
    """
    tflops = kernel.tflops.get(f"d{work.head_dim}")  # type: ignore[call-overload]
    if tflops is None:
        return None
    bandwidth = peak.bandwidth_gbs / measured.bandwidth_gbs
    return Rates(
        launch_us=kernel.launch_us,
        block_us=kernel.block_us,
        tflops=tflops * peak.tflops / measured.tflops,
        wave=kernel.wave,
        packing=kernel.packing,
        split_keys=kernel.split_keys,
        gbs=kernel.gbs * bandwidth,
        idle=kernel.idle,
        mask_gbs=kernel.mask_gbs * bandwidth,
        repair_gbs={repair: gbs * bandwidth for repair, gbs in kernel.repair_gbs.items()},
        repair_us=kernel.repair_us,
        ragged_us=kernel.ragged_us,
        factor=prod(kernel.factor.get(trait, 1.0) for trait in work.traits),  # type: ignore[call-overload]
        sms=peak.sms,
    )


def device_ms(work: Work, rates: Rates) -> float:
    """Return the time of one direction on the device in milliseconds; every number may be an array."""
    blocks: float = work.blocks ** (1 - rates.packing) * work.blocks_packed**rates.packing
    flops: float = work.flops ** (1 - rates.packing) * work.flops_packed**rates.packing
    parts = blocks * _larger(work.keys / rates.split_keys, 1.0)
    filled = _larger(blocks, _smaller(parts, rates.sms))
    idle = rates.sms / filled
    multiplying = flops / (rates.tflops * _TERA_PER_MS) * (1 + rates.wave * idle)
    reading = work.bytes / (rates.gbs * _GIGA_PER_MS) * (1 + rates.idle * idle)
    reading += work.mask_bytes / (rates.mask_gbs * _GIGA_PER_MS)
    kernel: float = rates.factor * (multiplying**2 + reading**2) ** 0.5
    launch = rates.launch_us + rates.ragged_us * work.is_ragged
    ends = rates.block_us * blocks / rates.sms * work.head_dim / _DIM
    overhead = (launch + ends + rates.repair_us * work.repairs) / 1e3
    return overhead + kernel + repairing_ms(work, rates.repair_gbs)


def repairing_ms(work: Work, gbs: Mapping[Repair, float]) -> float:
    """Return the time of what repairs allocate, in milliseconds: none of a repair that has no rate."""
    sizes = work.repair_bytes.items()
    return sum((size / gbs[repair] for repair, size in sizes if repair in gbs), 0.0) / _GIGA_PER_MS


def _host_us(host: HostTimes | None, final: Call, parts: tuple[str, ...]) -> float | None:
    if host is None:
        return None
    steps = host.step_us * steps_of(final) if host.step_us else 0.0
    return host.call_us + steps + sum(us for part, us in host.adding_us.items() if part in parts)


def _larger(one: float, other: float) -> float:
    """Return the larger of two numbers, or of each pair of two arrays."""
    return (one + other + abs(one - other)) / 2


def _smaller(one: float, other: float) -> float:
    return (one + other - abs(one - other)) / 2
