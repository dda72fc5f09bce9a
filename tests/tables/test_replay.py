"""Recorded measurements, replayed: what the engine chooses is about as fast as the fastest that was measured.

`python -m benchmarks.replay` prints the same figures by file.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from attnroute.engine.decide import decide
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks import recorded, replay

MEAN = {
    "everything": {"fit": 1.03, "unseen": 1.036},
    "torch alone": {"fit": 1.024, "unseen": 1.034},
}
"""Geometric means of the choice's time over the best one's, by what is installed and by part."""
WORST = 1.15
"""What one choice may take of the best one's time: the same call differs by a tenth between runs."""
WORST_OF = {
    "h100-torch2.11-backends": 2.0,
    "h100-torch2.11-backends-2": 1.4,
    "h100-torch2.11-fa4b36": 1.7,
    "h100-torch2.11-flex-crossover": 1.6,
    "h100-torch2.11-ragged": 1.3,
    "h100-torch2.11-small-calls": 1.3,
    "h200-torch2.11-grid": 1.8,
    "h200-torch2.11-grid-tokens": 1.7,
    "h200-torch2.11-models": 1.6,
    "h200-torch2.11-sweep": 4.2,
}
"""The same for files with calls whose times are predicted too far from what they take."""
SLOWER = {"everything": 58, "torch alone": 52}
"""How many calls may take more than 1.02 of stock attention's time."""
PRINTED = 10

PACKAGES = get_args(replay.Packages)
EXCEPTIONS = tomllib.loads((Path(__file__).parent / "data" / "replay_exceptions.toml").read_text("utf-8"))
EXCEPT = {
    bound: {
        call: e["because"]
        for e in EXCEPTIONS.get("exception", ())
        if e["bound"] == bound
        for call in e["calls"]
    }
    for bound in ("worst", "stock")
}


@cache
def chosen(packages):
    return replay.choices(packages)


def is_far(choice):
    return choice.regret > WORST_OF.get(choice.record.source, WORST)


def is_slower(choice):
    return choice.stock is not None and choice.stock > replay.TOLERATED


def listed(choices, key):
    return "\n".join(choice.text for choice in sorted(choices, key=key, reverse=True)[:PRINTED])


@pytest.mark.parametrize("packages", PACKAGES)
@pytest.mark.parametrize("part", get_args(recorded.Part))
def test_choices_are_about_as_fast_as_the_best_on_average(packages, part):
    choices = [choice for choice in chosen(packages) if choice.record.part == part]
    assert len(choices) > 150
    mean = replay.summary(choices).mean
    assert mean <= MEAN[packages][part], f"{mean:.4f}\n{listed(choices, lambda choice: choice.regret)}"


@pytest.mark.parametrize("packages", PACKAGES)
def test_no_choice_is_far_behind_the_best(packages):
    far = [c for c in chosen(packages) if is_far(c) and c.record.id not in EXCEPT["worst"]]
    assert not far, f"{len(far)} calls\n{listed(far, lambda choice: choice.regret)}"


@pytest.mark.parametrize("packages", PACKAGES)
def test_few_choices_are_slower_than_stock_attention(packages):
    slower = [c for c in chosen(packages) if is_slower(c) and c.record.id not in EXCEPT["stock"]]
    assert len(slower) <= SLOWER[packages], f"{len(slower)} calls\n{listed(slower, lambda c: c.stock)}"


@pytest.mark.parametrize(("bound", "breaks"), [("worst", is_far), ("stock", is_slower)])
def test_an_exception_is_still_one(bound, breaks):
    broken = {choice.record.id for packages in PACKAGES for choice in chosen(packages) if breaks(choice)}
    assert not EXCEPT[bound].keys() - broken, "these keep the bound: remove them from replay_exceptions.toml"


def test_a_choice_is_what_decide_selects():
    for choice in chosen("everything")[::20]:
        untimed = tuple(backend for backend in load().backends if backend not in choice.record.times)
        decision = decide(choice.record.call, choice.record.host, policy=Policy(ban=untimed))
        assert choice.selected == decision.selected
        assert choice.record.times[choice.best].total_ms * choice.regret == pytest.approx(
            choice.record.times[choice.selected].total_ms
        )
