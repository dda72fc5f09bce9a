"""What torch's own checks were recorded to accept, beside the tables.

A recording asked the CUDA build of a release, without a GPU, about every backend of its selector, on made-up
cards of every architecture and with several versions of cuDNN. Faults and repairs are
set aside: torch knows neither.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.audit import recordings
from attnroute.audit.compare import Comparison, Opinion
from attnroute.engine.evaluate import STOCK_SCOPES, Form, Prepared, outcomes_of
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.read import shipped_folder
from attnroute.tables.versions import contains

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import RuleRow


BACKENDS: Final = ("flash", "cudnn", "efficient")
"""Whose answers a recording has, in the order of its letters."""
_FILES: Final = ("torch_acceptance.jsonl.gz", "torch_acceptance_calls.json")


class Record(NamedTuple):
    """What one release accepts on one architecture with one cuDNN.

    Attributes:
        torch: The release, with its local part.
        cudnn: The version of cuDNN.
        arch: The architecture.
        cases: By the name of a call, a letter for each backend: y where it is accepted, n where not.
    """

    torch: str
    cudnn: str
    arch: str
    cases: dict[str, str]


class Answer(NamedTuple):
    """One recorded answer beside that of the tables.

    Attributes:
        case: The name of the call.
        backend: The backend.
        accepted: Whether torch accepts the call.
        rows: The rows and answers about features that refuse it.
    """

    case: str
    backend: str
    accepted: bool
    rows: tuple[str, ...]


def recorded(folder: Path) -> tuple[list[Record], dict[str, Call]]:
    """Read a recording: what was answered, and the calls by their names.

    Raises:
        ArgumentError: It is not there.
    """
    lines = recordings.read(folder / _FILES[0]).splitlines()
    calls = json.loads((folder / _FILES[1]).read_text(encoding="utf-8"))
    named = {name: Call.model_validate(case["call"]) for name, case in calls.items()}
    return [Record(**json.loads(line)) for line in lines], named


def write(folder: Path, records: Iterable[Record]) -> None:
    """Write what was answered, beside the calls that stand there."""
    text = "".join(json.dumps(record._asdict()) + "\n" for record in records)
    recordings.write(folder / _FILES[0], text)


def recording() -> Path:
    """Return the folder of the recording, which a checkout has."""
    return shipped_folder().parent / "tests" / "tables" / "data"


class Judge:
    """Says what limits and features refuse; a call under one set of rows is judged once."""

    def __init__(self, tables: Tables, calls: dict[str, Call]) -> None:
        """Take the calls by their names."""
        self._tables = tables
        self._forms = {name: Form(call) for name, call in calls.items()}
        self._known: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def answers(self, record: Record) -> Iterator[Answer]:
        """Give every answer of a record beside that of the tables."""
        host = Host(arch=record.arch, versions={"torch": record.torch, "cudnn": record.cudnn})
        for place, backend in enumerate(BACKENDS):
            rows = tuple(self._active(host, backend))
            ids = tuple(row.id for row in rows)
            prepared = Prepared(backend, host, self._tables.backends[backend], rows)
            for case, letters in record.cases.items():
                if (case, ids) not in self._known:
                    outcomes = outcomes_of(prepared, self._forms[case])
                    refusing = {"fail", "unknown"}
                    pairs = zip(ids, outcomes, strict=True)
                    self._known[case, ids] = tuple(row for row, outcome in pairs if outcome in refusing)
                refused = (*self._known[case, ids], *self._lacking(record.arch, backend, case))
                yield Answer(case, backend, letters[place] == "y", refused)

    def _active(self, host: Host, backend: str) -> Iterator[RuleRow]:
        """Give the limits of torch's selector that hold for these versions."""
        for row in self._tables.rules(host.arch, backend) or ():
            rule = row.rule
            held = (contains(text, name, host.versions[name]) for name, text in rule.versions.items())
            if rule.kind == "limit" and rule.scope in STOCK_SCOPES and all(held):
                yield row

    def _lacking(self, arch: str, backend: str, case: str) -> Iterable[str]:
        answers = self._tables.features(arch, backend)
        return (
            answers[name].id for name in self._forms[case].features if answers[name].answer.value is not True
        )


class Audit:
    """The tables beside the recordings in the tests of a checkout."""

    package = "torch"

    def __init__(self, tables: Tables) -> None:
        """Read them when they are asked for."""
        self._tables = tables

    @cached_property
    def _recording(self) -> tuple[dict[str, list[Record]], dict[str, Call]]:
        records, calls = recorded(recording())
        by_release = defaultdict(list)
        for record in records:
            by_release[record.torch].append(record)
        return by_release, calls

    def versions(self) -> list[str]:
        """Return the releases that were recorded, the newest first."""
        return sorted(self._recording[0], key=Version, reverse=True)

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            ArgumentError: It was not recorded.
        """
        by_release, calls = self._recording
        if version not in by_release:
            known = ", ".join(by_release)
            raise ArgumentError(f"--version requires a release that was recorded ({known}); got {version}.")
        judge, comparison = Judge(self._tables, calls), Comparison()
        for record in by_release[version]:
            for case, backend, accepted, rows in judge.answers(record):
                said = "" if accepted else f"{backend} refuses {case} with cuDNN {record.cudnn}"
                comparison.add(record.arch, Opinion(rows, calls[case]), said)
        return comparison
