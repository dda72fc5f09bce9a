"""What a run of `attnroute conformance` found out, as a file that a user can send in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from attnroute._version import __version__
from attnroute.conformance.points import Points
from attnroute.conformance.trials import FAILURES, Outcome, Trial
from attnroute.errors import argument_error, shortened
from attnroute.question.host import Host
from attnroute.question.plain import Plain
from attnroute.report.json import lined

Verdict = Literal[
    "holds", "argued", "too loose", "too strict", "not testable here", "not installed", "not reached"
]


class Result(Plain):
    """A trial with what came of it, and where it failed the command that runs it again."""

    trial: Trial
    outcome: Outcome
    command: str = ""

    @classmethod
    def of(cls, trial: Trial, outcome: Outcome) -> Self:
        """Return a trial with its outcome."""
        return cls(trial=trial, outcome=outcome, command=trial.command if outcome.status in FAILURES else "")


class Half(Plain):
    """One side of a row: a line of the file that an interrupted run goes on from.

    Attributes:
        key: Row, backend, side, and what was tried.
        results: What came of it.
    """

    key: str
    results: tuple[Result, ...]


class Entry(Plain):
    """One row for one backend.

    Attributes:
        rule: The id of the row.
        backend: The backend.
        verdict: What came of it; "argued" where outside is right and the row says why it refuses that.
        reason: Why, as a sentence or clause; of a row that holds, which side has no call.
        inside: Calls that the row takes.
        outside: Calls that it rejects.
    """

    rule: str
    backend: str
    verdict: Verdict
    reason: str = ""
    inside: tuple[Result, ...] = ()
    outside: tuple[Result, ...] = ()


class Drawn(Plain):
    """What came of drawn calls.

    Attributes:
        counts: Trials by status.
        right: Those that were right, by the backend that ran.
        untested: Why calls were not run, the most frequent reasons with their counts.
        failures: The simplest call of each kind of failure.
    """

    counts: dict[str, int]
    right: dict[str, int]
    untested: dict[str, int] = Field(default_factory=dict)
    failures: tuple[Result, ...] = ()


class Report(Plain):
    """The file.

    Attributes:
        format: Of the file.
        attnroute: The version that wrote it.
        date: The day.
        host: The machine.
        driver: The version of the card's driver; empty without one.
        seconds: What the run took; of one that went on from another, its own part.
        entries: One for each row and backend.
        drawn: What came of drawn calls.
    """

    format: Literal[1] = 1
    attnroute: str = __version__
    date: str
    host: Host
    driver: str = ""
    seconds: float = 0.0
    entries: tuple[Entry, ...] = Field(default=())
    drawn: Drawn | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ArgumentError: There is none, or it is something else.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            got = error.strerror or type(error).__name__
        except (ValidationError, ValueError) as error:
            got = shortened(" ".join(str(error).split()), 200)
        required = "a report as `attnroute conformance` writes it"
        raise argument_error(str(path), required, got, "name another file")

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            ArgumentError: It cannot be written.
        """
        try:
            path.write_text(
                lined(self.model_dump(mode="json", exclude_defaults=True), ("entries",)), encoding="utf-8"
            )
        except OSError as error:
            got = error.strerror or type(error).__name__
            raise argument_error(str(path), "a place to write to", got, "name another one") from error


def entry_of(points: Points, inside: Half | None, outside: Half | None) -> Entry:
    """Return what the two sides of a row say together; None is a side that was not reached."""
    verdict, reason = _verdict(points, _results(inside), _results(outside))
    if (inside is None and points.inside.trials) or (outside is None and points.outside.trials):
        verdict, reason = "not reached", "the time was over"
    return Entry(
        rule=points.row.id,
        backend=points.backend,
        verdict=verdict,
        reason=reason,
        inside=_results(inside),
        outside=_results(outside),
    )


def _results(half: Half | None) -> tuple[Result, ...]:
    """Return results; the kernels of the first stand for those of all."""
    first, *others = half.results if half is not None and half.results else (None,)
    if first is None:
        return ()
    return (first, *(r.changed(outcome=r.outcome.changed(kernels=())) for r in others))


def _verdict(points: Points, inside: tuple[Result, ...], outside: tuple[Result, ...]) -> tuple[Verdict, str]:
    if points.reason:
        return "not testable here" if points.is_here else "not installed", points.reason
    failed = next((r for r in inside if r.outcome.status in FAILURES), None)
    if failed is not None:
        return "too loose", f"inside, {failed.outcome.status}: {failed.outcome.said}; {failed.trial.command}"
    is_refused = any(r.outcome.status in FAILURES for r in outside)
    ran = next((r for r in outside if r.outcome.status == "right"), None)
    if not is_refused and ran is not None and points.row.rule.argued:
        return "argued", points.row.rule.argued
    if not is_refused and ran is not None:
        return "too strict", f"outside, it runs and is right; {ran.trial.command}"
    is_right = any(r.outcome.status == "right" for r in inside)
    for side, trials, found, is_told in (
        ("outside", points.outside, outside, is_refused),
        ("inside", points.inside, inside, is_right or not points.has_inside),
    ):
        if trials.trials and not is_told:
            said = found[0].outcome.said if found else "nothing was tried"
            return "not testable here", f"{side}: {said}"
    if not is_refused and not is_right:
        return "not testable here", points.outside.reason
    # Where other rows reject all that one rejects, or all that it takes, there is one side.
    return "holds", "" if is_refused and is_right else points.inside.reason or points.outside.reason
