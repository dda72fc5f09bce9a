"""What a step of a ring takes the host besides its kernel: part of `fit_costs`.

Results of rings hold whole training steps, whose times are of the host where they are short. How much of them
is of messages and merging is told by the ring in which that is least: it is the same for all backends.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks import recorded
from benchmarks.fit_hosts import rounded

SOURCE: Final = "h200x2-torch2.11-distributed"
_OURS: Final = "attnroute "
"""What stands before a backend where it was required."""


def add_rings(hosts: dict[str, dict[Any, dict[str, Any]]]) -> None:
    """Add what a ring takes to the host's times of training, in microseconds for one step of the ring.

    Args:
        hosts: Times by backend and phase, which are changed. Forwards alone were not measured.
    """
    data = recorded.load(SOURCE)
    took = [
        1e3 * times["ms"] / data["ranks"] - hosts[backend]["training"]["call_us"]
        for ring in data["rings"]
        if "worst_rank" in ring
        for name, times in ring["worst_rank"].items()
        if (backend := name.removeprefix(_OURS)) != name and "training" in hosts.get(backend, {})
    ]
    for backend, phases in hosts.items():
        if "training" in phases and any(
            f"{_OURS}{backend}" in ring.get("worst_rank", {}) for ring in data["rings"]
        ):
            adding = phases["training"]["adding_us"]
            phases["training"]["adding_us"] = dict(sorted({**adding, "ring": rounded(min(took))}.items()))
