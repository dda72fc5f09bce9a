"""Recorded measurements, replayed: what the engine chooses is about as fast as the fastest that was measured.

`python -m benchmarks.replay` prints the same figures by file.
"""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

from attnroute.engine.decide import decide
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks import recorded, replay, shortfall

MEAN = {
    "everything": {"fit": 1.037, "unseen": 1.049},
    "torch alone": {"fit": 1.03, "unseen": 1.039},
}
"""Geometric means of the choice's time over the best one's, by what is installed and by part.

No fit reads the unseen part. People who changed the model have looked at its misses, but for those of the 54
calls of `h200-torch2.11-grid-fresh-after`. Only the sweep and the models hold host times of today's code; the
best of a short call in an older file is that of its day.
"""
FAR = {"everything": 75, "torch alone": 62}
"""How many choices may take more than 1.15 of the best one's time."""
SLOWER = {"everything": 78, "torch alone": 64}
"""How many may take more than 1.02 of the time of stock's kernel."""
PRINTED = 10

PACKAGES = get_args(replay.Packages)


@cache
def chosen(packages):
    return replay.choices(packages)


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
def test_few_choices_are_far_behind_the_best(packages):
    far = [choice for choice in chosen(packages) if choice.regret > shortfall.WORST]
    assert len(far) <= FAR[packages], f"{len(far)} calls\n{listed(far, lambda choice: choice.regret)}"


@pytest.mark.parametrize("packages", PACKAGES)
def test_few_choices_are_slower_than_stock_attention(packages):
    slower = [choice for choice in chosen(packages) if shortfall.is_slower(choice)]
    assert len(slower) <= SLOWER[packages], f"{len(slower)} calls\n{listed(slower, lambda c: c.stock)}"


def test_each_choice_that_breaks_a_bound_is_explained():
    assert shortfall.FILE.read_text(encoding="utf-8") == shortfall.text(), (
        "run `python -m benchmarks.shortfall`"
    )


@pytest.mark.parametrize("packages", PACKAGES)
def test_causes_are_what_their_sentences_say(packages):
    found = shortfall.shortfalls(packages)
    assert len(found) == sum(map(shortfall.breaks, chosen(packages)))
    for choice, rival, cause, _ in found:
        took, others = (choice.record.times[name].total_ms for name in (choice.selected, rival))
        if cause == "fastest":
            assert choice.regret <= replay.TOLERATED
            assert choice.stock > replay.TOLERATED
        elif cause != "noise":
            assert took > others


def test_a_choice_is_what_decide_selects():
    for choice in chosen("everything")[::20]:
        untimed = tuple(backend for backend in load().backends if backend not in choice.record.times)
        decision = decide(choice.record.call, choice.record.host, policy=Policy(ban=untimed))
        assert choice.selected == decision.selected
        assert choice.record.times[choice.best].total_ms * choice.regret == pytest.approx(
            choice.record.times[choice.selected].total_ms
        )
