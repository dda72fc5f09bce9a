"""Draws the pictures of the benchmarks page with matplotlib, readable on light and on dark pages."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.replay import mean
from benchmarks.report import data

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE, ORANGE = "#7b8088", "#3d85e0", "#d9822b"
"""Of middle lightness: they stand out on white and on black."""
STYLE = {
    "svg.hashsalt": "attnroute",
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": GREY,
    "axes.facecolor": "none",
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlesize": 10.0,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


class Picture(NamedTuple):
    """One picture: what it shows, and what draws that."""

    shown: Callable[[], Any]
    draw: Callable[[Any], Figure]

    @property
    def digest(self) -> str:
        """The hash of what is shown, which stands in the file."""
        return hashlib.sha256(json.dumps(self.shown(), sort_keys=True).encode()).hexdigest()


def write(folder: Path) -> None:
    """Draw every picture into a folder."""
    import matplotlib as mpl

    mpl.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure = picture.draw(picture.shown())
            described = {"Date": None, "Creator": None, "Description": f"data {picture.digest}"}
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata=described, bbox_inches="tight")


def is_current(folder: Path, name: str) -> bool:
    """Return whether a file shows what the results say, however a version of matplotlib draws it."""
    path = folder / f"{name}.svg"
    return path.exists() and f"data {PICTURES[name].digest}" in path.read_text(encoding="utf-8")


def _calls(calls: list[dict[str, Any]]) -> Figure:
    """Draw a bar from the best time up to stock's and to the choice's for each call, by kind."""
    from matplotlib.pyplot import close, subplots

    groups = [(kind, list(group)) for kind, group in groupby(calls, lambda call: call["kind"])]
    sizes = [len(group) for _, group in groups]
    figure, axes = subplots(
        len(groups),
        sharex=True,
        figsize=(9, 0.26 * len(calls) + 0.45 * len(groups)),
        height_ratios=sizes,
        layout="constrained",
    )
    least = min(min(call["best"], call["stock"] or math.inf) for call in calls) / 1.5
    for axis, (kind, group) in zip(axes, groups, strict=True):
        places = range(len(group))
        stock = [call["stock"] or math.nan for call in group]
        axis.barh(
            [y - 0.19 for y in places], [t - least for t in stock], 0.34, least, color=GREY, label="stock"
        )
        ours = [call["ours"] - least for call in group]
        axis.barh([y + 0.19 for y in places], ours, 0.34, least, color=BLUE, label="attnroute")
        best = [call["best"] for call in group]
        axis.plot(best, list(places), "|", color=ORANGE, ms=11, mew=2, label="best backend")
        for y, call in enumerate(group):
            far = max(call["ours"], call["stock"] or 0)
            axis.text(far * 1.06, y, call["selected"], va="center", fontsize=7.5)
        axis.set_yticks(list(places), [call["name"].replace("_", " ") for call in group])
        axis.set_ylim(len(group) - 0.4, -0.6)
        axis.set_title(kind, loc="left", fontweight="bold")
        _logarithmic(axis, "x")
    axes[-1].set_xlabel("milliseconds of an eager call; the name of what is selected stands beside it")
    axes[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    close(figure)
    return figure


def _regret(regrets: dict[str, dict[str, list[float]]]) -> Figure:
    """Draw the choices' distance from the best by share of calls."""
    from matplotlib.pyplot import close, subplots

    figure, axes = subplots(1, len(regrets), sharey=True, figsize=(9, 3.2), layout="constrained")
    for axis, (part, found) in zip(axes, regrets.items(), strict=True):
        for (when, each), color in zip(found.items(), (GREY, BLUE), strict=True):
            shares = [100 * (at + 0.5) / len(each) for at in range(len(each))]
            label = f"{'as measured' if when == 'before' else 'today'}: {mean(each):.3f}"
            axis.plot(shares, each, color=color, lw=2, label=label)
        axis.set_title(
            f"{'calls that a fit may read' if part == 'fit' else 'unseen calls'}, {len(each)}", loc="left"
        )
        axis.set_xlabel("percent of calls")
        axis.legend(title="geometric mean", loc="upper left")
        _logarithmic(axis, "y")
    axes[0].set_ylabel("time over the best backend's")
    close(figure)
    return figure


def _speed_up(kinds: dict[str, list[tuple[int, float, str]]]) -> Figure:
    """Draw how many times as fast as stock attention the choice is, by length."""
    from matplotlib.pyplot import close, subplots

    figure, axes = subplots(1, len(kinds), sharex=True, sharey=True, figsize=(11, 3.2), layout="constrained")
    for axis, (kind, points) in zip(axes, kinds.items(), strict=True):
        by_length = defaultdict(list)
        for length, ratio, _ in points:
            by_length[round(math.log2(length))].append(ratio)
        for phase, mark in (("inference", "o"), ("training", "^")):
            shown = [point for point in points if point[2] == phase]
            axis.plot(
                [length for length, _, _ in shown],
                [ratio for _, ratio, _ in shown],
                mark,
                color=BLUE,
                alpha=0.6,
                ms=4,
                mew=0,
                label="forward" if phase == "inference" else phase,
            )
        lengths = sorted(by_length)
        axis.plot(
            [2**n for n in lengths],
            [mean(by_length[n]) for n in lengths],
            color=ORANGE,
            lw=2,
            label="geometric mean",
        )
        axis.axhline(1, color=GREY, lw=1)
        axis.set_title(kind, loc="left", fontweight="bold")
        _logarithmic(axis, "y")
        axis.set_xscale("log", base=2)
        axis.set_xticks([16, 256, 4096, 65536], ["16", "256", "4k", "64k"])
        axis.minorticks_off()
    axes[0].set_ylabel("times as fast as stock")
    axes[len(axes) // 2].set_xlabel("tokens")
    axes[0].legend(loc="upper left")
    close(figure)
    return figure


def _logarithmic(axis: Axes, name: str) -> None:
    """Make the axis x or y logarithmic with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axis, f"set_{name}scale")("log")
    scale = getattr(axis, f"{name}axis")
    scale.set_major_locator(LogLocator(10, subs=(1, 3) if name == "x" else (1, 2, 5)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())
    axis.grid(axis=name)
    axis.set_axisbelow(True)


PICTURES = {
    "speed_up": Picture(data.speed_ups, _speed_up),
    "calls": Picture(data.calls, _calls),
    "regret": Picture(data.regrets, _regret),
}
"""By the name of the file."""
