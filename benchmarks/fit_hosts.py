"""Fits what the host takes for a call on each backend, and what each repair adds: part of `fit_costs`."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FEW: Final = 3
"""Calls with a repair without which nothing is said of what it takes."""
IN_A_ROW: Final = 0.8
"""Of a step's host time in training: in a row, as the grids time steps, the next one begins while another
thread hands over the backward of the last. It was chosen as that with which the grids' choices are cheapest:
this one number has seen their unseen part too."""
IN_STEPS: Final = frozenset({"chunked"})
"""Backends whose host launches a kernel for each part of the scores."""
PASSES: Final = 40
"""How often each number of the host is set in turn."""


class Sample(NamedTuple):
    """The host time of one call on one backend."""

    training: bool
    repairs: tuple[str, ...]
    scores: float
    us: float


def rounded(value: float) -> float:
    """Return three significant digits: more say nothing."""
    return float(f"{value:.3g}")


def hosts_of(samples: list[Sample], *, in_steps: bool) -> dict[str, Any]:
    """Return the host's times: what makes the sum of absolute errors least, number after number."""
    repairs = [r for r, count in Counter(r for s in samples for r in s.repairs).items() if count >= FEW]
    names = ["forward_us", "training_us", "scores_us", *sorted(repairs)]
    columns = np.array(
        [
            [not s.training, s.training, s.scores * in_steps, *(r in s.repairs for r in names[3:])]
            for s in samples
        ],
        dtype=float,
    )
    measured = np.array([s.us for s in samples])
    found = np.zeros(len(names))
    for _ in range(PASSES):
        for at, column in enumerate(columns.T):
            rest = measured - columns @ found + column * found[at]
            if (column > 0).any():
                found[at] = max(0.0, _middle(rest[column > 0] / column[column > 0], column[column > 0]))
    values = dict(zip(names, map(rounded, found.tolist()), strict=True))
    told = {name: values[name] for name in names[:3] if values[name]}
    return told | {"repair_us": {name: values[name] for name in names[3:] if values[name] >= 1}}


def _middle(values: Array, weights: Array) -> float:
    """Return the weighted median."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(sums, sums[-1] / 2))])
