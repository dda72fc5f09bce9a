"""Find the slips in a row that its own examples would not notice: a bound that none of them stands beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.engine.evaluate import Form
from attnroute.engine.examples import Examples, Trial
from attnroute.errors import ArgumentError
from attnroute.question import fits
from attnroute.question.line import render
from attnroute.question.normalize import normalize
from attnroute.tables.problem import Problem, problem_of
from attnroute.tables.releases import published
from attnroute.tables.slips import Slip, slips
from attnroute.tables.versions import contains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import RuleRow
    from attnroute.tables.schema import Rule

_FIELDS: Final = {
    "batch": (("batch",),),
    "num_heads_q": (("num_heads_q", "num_heads_kv"), ("num_heads_q",)),
    "num_heads_kv": (("num_heads_q", "num_heads_kv"), ("num_heads_kv",)),
    "seqlen_q": (("seqlen_q", "seqlen_kv"), ("seqlen_q",)),
    "seqlen_kv": (("seqlen_q", "seqlen_kv"), ("seqlen_kv",)),
    "head_dim_qk": (("head_dim_qk", "head_dim_v"), ("head_dim_qk",)),
    "head_dim_v": (("head_dim_qk", "head_dim_v"), ("head_dim_v",)),
    "head_dim_max": (("head_dim_qk", "head_dim_v"), ("head_dim_qk",), ("head_dim_v",)),
    "gqa_ratio": (("num_heads_q",),),
}
"""The fields of a call that make a size what a bound is about: together with its partner, or alone."""


class LooseEnd(NamedTuple):
    """A slip that no example of a row notices.

    Attributes:
        slip: The slip.
        example: A call that would, where one is found by putting a size to the bound.
    """

    slip: Slip
    example: str


def loose_ends(tables: Tables) -> Iterator[Problem]:
    """Give every slip in a row that none of its examples would notice, once for a row of several files."""
    examples, told = Examples(tables), set()
    for row in tables.all_rows():
        for slip, example in loose_ends_of(row, examples, tables):
            hint = f'; "{example}" would' if example else ""
            problem = problem_of(
                row, "takes", f"requires an example that notices {slip.said}; got none{hint}."
            )
            if problem not in told:
                told.add(problem)
                yield problem


def loose_ends_of(row: RuleRow, examples: Examples, tables: Tables) -> Iterator[LooseEnd]:
    """Give the slips in one row that all of its examples pass by."""
    trials, places = examples.trials(row), examples.places(row)
    if not trials or not all(trial.places for trial in trials):
        return
    infos = [tables.info(arch, backend) for arch, backend in places]
    releases = {
        name: [
            release
            for release in published(tables.folders[0]).get(name, ())
            if any(contains(info.known(name) or ">=0", name, release) for info in infos)
        ]
        for name in row.rule.versions
    }
    for slip in slips(row.rule, releases):
        if all(trial.agrees(slip.rule) for trial in trials):
            example = "" if slip.sizes is None else _example(slip, trials)
            # A bound that no call at it tells from its neighbour is as good as that.
            if example or slip.sizes is None or slip.sizes[0] not in _FIELDS:
                yield LooseEnd(slip, example)


def _example(slip: Slip, trials: list[Trial]) -> str:
    """Return a call that tells a row from its slip: an example with a size at the bound; "" if none does."""
    name, values = slip.sizes or ("", ())
    for trial in trials:
        for fields in _FIELDS.get(name, ()):
            for value in values:
                try:
                    call = trial.example.call.with_(**dict.fromkeys(fields, int(value)))
                    fits.check(call)
                except (ArgumentError, ValueError):
                    continue
                form = Form(normalize(call))
                if _is_refused(trial, trial.row.rule, form) is not _is_refused(trial, slip.rule, form):
                    return render(call)
    return ""


def _is_refused(trial: Trial, rule: Rule, form: Form) -> bool:
    return trial.outcome(rule, form) == "fail"
