"""Fits what repairs take on the device: part of `fit_costs`.

A repair is the same code before every kernel, so its numbers are those that suit the calls of all backends,
one set for the forward and one for what goes back through its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnroute.vocabulary import Repair

Array = NDArray[np.float64]
START_GBS: Final = 1500.0
"""Where the rate of a repair starts."""
START_US: Final = 5.0
PULL: Final = 0.1
"""How strongly a number is drawn to its start: as one call that is off by this share of the logarithm."""
NO_BACKWARD: Final[frozenset[Repair]] = frozenset({"materialize_mask", "materialize_alibi", "cast_mask"})
"""Repairs that make what needs no gradient, or what is kept for the backward as it is."""


class Repairing(NamedTuple):
    """What repairs take in one direction.

    Attributes:
        gbs: Rates by repair, as `Kernel.repair_gbs`.
        us: What each takes besides.
    """

    gbs: dict[Repair, float]
    us: float


class Repaired(NamedTuple):
    """One direction of one call on one backend, and what is known of its time.

    Attributes:
        rest_ms: What is predicted without what repairs take.
        bytes: What each repair allocates.
        repairs: How many run something.
        ms: What was measured.
        weight: How many calls it counts for.
    """

    rest_ms: float
    bytes: dict[Repair, float]
    repairs: int
    ms: float
    weight: float


def start(names: Iterable[Repair]) -> Repairing:
    """Return where a fit begins."""
    return Repairing(dict.fromkeys(sorted(names), START_GBS), START_US)


def refitted(
    found: list[Repaired],
    before: Repairing,
    softened: Callable[[Array], Array],
    minimized: Callable[[Callable[[Array], Array], Array], Array],
) -> Repairing:
    """Return the numbers that suit the calls best, given what their kernels take."""
    names = list(before.gbs)
    rest = np.array([each.rest_ms for each in found])
    sizes = np.array([[each.bytes.get(name, 0.0) for name in names] for each in found])
    counts = np.array([float(each.repairs) for each in found])
    measured = np.log(np.array([each.ms for each in found]))
    weights = np.sqrt(np.array([each.weight for each in found]))
    first = np.log(np.array([*([START_GBS] * len(names)), START_US]))

    def residuals(vector: Array) -> Array:
        took = rest + sizes @ (1 / np.exp(vector[:-1])) / 1e6 + counts * np.exp(vector[-1]) / 1e3
        return np.concatenate([weights * softened(np.log(took) - measured), PULL * (vector - first)])

    at = np.log(np.array([*before.gbs.values(), before.us]))
    vector = minimized(residuals, at)
    told: Any = zip(names, np.exp(vector[:-1]).tolist(), strict=True)
    return Repairing(dict(told), float(np.exp(vector[-1])))
