"""How long moving bytes between ranks takes: steps from rank to rank, and bytes over the slowest link.

The formulas are those by which NCCL compares its own rings: each rank sends (n - 1) / n of what is gathered,
scattered or exchanged, and twice that for a sum that all ranks get.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from attnroute.tables.cards import of_card

if TYPE_CHECKING:
    from attnroute.question.host import Host
    from attnroute.tables.folders import Tables
    from attnroute.tables.interconnect import Link

_PER_MS: Final = 1e6
"""Bytes in a millisecond at one GB/s."""


class Fabric(NamedTuple):
    """What connects the ranks of a mesh.

    Attributes:
        inside: The link between cards of one machine.
        between: The link between machines.
        start_ms: What each collective takes before its first step.
    """

    inside: Link
    between: Link
    start_ms: float

    @property
    def gpus(self) -> int:
        """How many cards a machine has."""
        return self.inside.gpus or 1


class Group(NamedTuple):
    """Ranks that communicate with each other.

    Attributes:
        fabric: What connects them.
        size: How many they are.
        near: How many of them share a machine.
    """

    fabric: Fabric
    size: int
    near: int

    @classmethod
    def of(cls, fabric: Fabric, size: int, stride: int) -> Self:
        """Return ranks that lie so far apart in the order in which machines are filled."""
        return cls(fabric, size, max(1, min(size, fabric.gpus // stride)))

    @property
    def machines(self) -> int:
        """How many machines they are spread over."""
        return -(-self.size // self.near)

    def gathered_ms(self, size: float) -> float:
        """Return the time after which every rank has all of so many bytes; scattering a sum takes as long."""
        return self._ring_ms(size, 1)

    def summed_ms(self, size: float) -> float:
        """Return the time after which every rank has the sum of so many bytes of each."""
        return self._ring_ms(size, 2)

    def exchanged_ms(self, size: float) -> float:
        """Return the time in which every rank gives each other one its part of so many bytes."""
        if self.size == 1 or not size:
            return 0.0
        near = size * (self.near - 1) / self.size / self.fabric.inside.gbs
        far = size * (self.size - self.near) / self.size / self.fabric.between.gbs
        return self.fabric.start_ms + self._slowest.step_us / 1e3 + max(near, far) / _PER_MS

    def passed_on_ms(self, size: float) -> float:
        """Return the time in which every rank gives so many bytes to the next one."""
        if self.size == 1 or not size:
            return 0.0
        link = self._slowest
        return self.fabric.start_ms + link.step_us / 1e3 + size / link.gbs / _PER_MS

    @property
    def _slowest(self) -> Link:
        return self.fabric.between if self.machines > 1 else self.fabric.inside

    def _ring_ms(self, size: float, rounds: int) -> float:
        if self.size == 1 or not size:
            return 0.0
        inside, between, start = self.fabric
        gbs = inside.gbs if self.near > 1 else inf
        far = 0
        if self.machines > 1:
            # As many rings as ranks of a machine cross to the next one, each over a port of its own.
            gbs, far = min(gbs, self.near * between.gbs), self.machines
        steps = max(0, self.size - 1 - far) * inside.step_us + far * between.step_us
        return start + rounds * (steps / 1e3 + size * (self.size - 1) / self.size / gbs / _PER_MS)


def fabric_of(tables: Tables, host: Host) -> Fabric | None:
    """Return what connects cards like a host's, None where nobody says it."""
    table = tables.interconnect
    name = of_card(table.card.get(host.arch, {}), host)
    if name is None:
        return None
    return Fabric(table.link[name], table.link[table.between], table.start.us / 1e3)
