"""What a step of a ring and a call on DTensors take the host besides a kernel: part of `fit_costs`.

Both were measured whole, and wait for the host where they are short. How much of that is of messages and
merging, or of DTensors, is told by the one in which it is least: it is the same for all backends, also for
those that were not measured there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from benchmarks import recorded
from benchmarks.fit_hosts import rounded

SOURCE: Final = "h200x2-torch2.11-distributed"
Hosts = dict[str, dict[Any, dict[str, Any]]]
Took = tuple[str, float]
"""The phase, and the host's microseconds besides the call of a backend that was required."""


def add_rings(hosts: Hosts) -> None:
    """Add what a ring and what DTensors take to the host's times, in microseconds for one call of a kernel.

    Args:
        hosts: Times by backend and phase, which are changed. Of rings no forward was measured alone.
    """
    data = recorded.load(SOURCE)
    for trait, found in (("ring", _of_rings(data, hosts)), ("dtensor", _of_dtensors(data, hosts))):
        took = list(found)
        least = {phase: min(us for its, us in took if its == phase) for phase, _ in took}
        for phases in hosts.values():
            for phase in least.keys() & phases.keys():
                adding = {**phases[phase]["adding_us"], trait: rounded(least[phase])}
                phases[phase]["adding_us"] = dict(sorted(adding.items()))


def _of_rings(data: dict[str, Any], hosts: Hosts) -> Iterator[Took]:
    for ring in data["rings"]:
        for backend, ms in _required(ring, "attnroute "):
            yield from _besides(backend, "training", ms / data["ranks"], hosts)


def _of_dtensors(data: dict[str, Any], hosts: Hosts) -> Iterator[Took]:
    for case in data["dtensors"]:
        for backend, ms in _required(case, "DTensors "):
            yield from _besides(backend, "training" if case["trains"] else "inference", ms, hosts)


def _required(case: dict[str, Any], before: str) -> Iterator[tuple[str, float]]:
    """Yield the backends that were required, and the milliseconds of the slowest rank."""
    for name, times in case.get("worst_rank", {}).items():
        if name.startswith(before):
            yield name.removeprefix(before), times["ms"]


def _besides(backend: str, phase: str, ms: float, hosts: Hosts) -> Iterator[Took]:
    if phase in hosts.get(backend, {}):
        yield phase, 1e3 * ms - hosts[backend][phase]["call_us"]
