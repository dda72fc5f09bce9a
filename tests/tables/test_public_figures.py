"""What others measured, replayed: on cards that nobody here has, choices are about as fast as the best.

`python -m benchmarks.public_figures` prints the same by source. A host has the packages that its source
compares, and a backend without a figure is banned. The `[[prefer]]` rows of these architectures were written
from the same figures, so this keeps them true and says nothing about other calls.
"""

from __future__ import annotations

from attnroute.engine.decide import decide
from benchmarks import recorded, replay
from benchmarks.public_figures import figures

MEAN = 1.01
"""Geometric mean of the choice's time over the best one's, over all figures."""
MEAN_OF_ARCH = 1.05
"""The same for one architecture."""
WORST = 1.15
"""The same for one figure."""
CANNOT_RUN = {
    ("b200-2025", "bf16 b1 hq128 hkv8 sq131072 d128 causal train"): {"flash", "fa2"},
    ("gb300-2025", "bf16 b1 hq128 hkv8 sq131072 d128 causal train"): {"flash", "fa2"},
}
"""Backends with a figure that the tables reject: their gradients are wrong where offsets pass 32 bits."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
FOUND = recorded.load("public-figures")
FIGURES = figures()
CHOICES = replay.choices("everything", FIGURES)


def listed(choices):
    return "\n".join(choice.text for choice in sorted(choices, key=lambda choice: -choice.regret)[:10])


def test_choices_are_about_as_fast_as_the_best_on_average():
    assert replay.summary(CHOICES).mean <= MEAN, listed(CHOICES)


def test_no_architecture_is_far_behind_on_average():
    by_arch = {arch: [c for c in CHOICES if c.record.host.arch == arch] for arch in ARCHITECTURES}
    means = {arch: replay.summary(found).mean for arch, found in by_arch.items()}
    assert all(mean <= MEAN_OF_ARCH for mean in means.values()), means


def test_no_choice_is_far_behind_the_best():
    far = [choice for choice in CHOICES if choice.regret > WORST]
    assert not far, listed(far)


def test_backends_with_a_figure_may_run_the_call_as_it_is_described():
    """What is not the call that was timed, or not its machine, would reject some of them."""
    rejected = {}
    for figure, record in zip(FOUND["figures"], FIGURES, strict=True):
        timed = figure.get("ms") or figure["relative"]
        decision = decide(record.call, record.host)
        names = {name for name in timed if decision.verdict(name).status != "eligible"}
        if names:
            rejected[record.source, record.name] = names
    assert rejected == CANNOT_RUN
    assert len(CHOICES) == len(FIGURES) - len(CANNOT_RUN) > 300


def test_each_source_says_where_it_stands_and_what_is_unknown():
    assert {figure["source"] for figure in FOUND["figures"]} == FOUND["sources"].keys()
    for name, source in FOUND["sources"].items():
        assert source["ref"], name
        assert source["date"], name
        assert source["unknown"], name
        assert not source["said"].keys() & source["assumed"].keys(), name
    assert len({record.id for record in FIGURES}) == len(FIGURES)
