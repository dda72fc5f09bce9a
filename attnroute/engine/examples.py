"""Check examples in table rows: a row rejects the calls that it `refuses` and passes those that it `takes`.

An example is a call line, then perhaps ` on ` and what matters of the machine: an architecture, versions.
What it leaves open is taken from the row: every architecture where the row holds, and of each distribution
that the row names the newest version that it is about.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.engine.decide import judge
from attnroute.engine.evaluate import Form, Prepared, outcomes_of
from attnroute.errors import AttnRouteError
from attnroute.question import fits
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.lint import Problem, problem_of
from attnroute.tables.points import options_of, shared_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.question.call import Call
    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import RuleRow
    from attnroute.tables.schema import BackendInfo, Rule

_ON: Final = " on "


class Example(NamedTuple):
    """A call, and what is known about the machine that it runs on."""

    call: Call
    arch: str | None
    versions: dict[str, str]


def read_example(text: str) -> Example:
    """Read an example, like `bf16 b2 hq8 sq512 d64 thd on sm_90 cudnn=9.15.0`, its call as decisions see it.

    Raises:
        ArgumentError: Its call line is wrong, or the parts of the call do not fit together.
    """
    line, _, machine = text.partition(_ON)
    words = [word.partition("=") for word in machine.split()]
    arch = next((name for name, equals, _ in words if not equals), None)
    call = parse(line)
    fits.check(call)
    return Example(normalize(call), arch, {name: version for name, equals, version in words if equals})


class Examples:
    """The examples of all rows, tried on every architecture and backend where their row holds."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, str]]]:
        """The architectures and backends where each row holds, by its id."""
        found = defaultdict(list)
        for arch in self._tables.arch_names:
            for backend in self._tables.backends:
                for row in self._tables.rules(arch, backend) or ():
                    found[row.id].append((arch, backend))
        return found

    def problems(self) -> Iterator[Problem]:
        """Give every example that is wrong, and every one that its row does not treat as it says."""
        for row in self._tables.all_rows():
            yield from self.problems_of(row)

    def problems_of(self, row: RuleRow) -> Iterator[Problem]:
        """Give what is wrong with the examples of one row."""
        for field, texts in (("refuses", row.rule.refuses), ("takes", row.rule.takes)):
            for text in options_of(texts or []):
                sentence = self._problem(row, text, refused=field == "refuses")
                if sentence:
                    yield problem_of(row, field, f'{sentence} in "{text}".')

    def _problem(self, row: RuleRow, text: str, *, refused: bool) -> str:
        """Return what is wrong with one example of a row, without the last words; "" where nothing is."""
        try:
            example = read_example(text)
        except AttnRouteError as error:
            return f"{str(error).rstrip('.')};"
        places = [(arch, b) for arch, b in self._places[row.id] if example.arch in (None, arch)]
        if not places:
            return f"requires an architecture where the row holds; got {example.arch or 'none'}"
        for arch, backend in places:
            info = self._tables.info(arch, backend)
            host = _host(row.rule, arch, info, example)
            (outcome,) = outcomes_of(Prepared(backend, host, info, (row,)), Form(example.call))
            if (outcome == "fail") != refused or outcome == "unknown":
                required = "rejects" if refused else "lets pass"
                return f"requires a call that the row {required}; got {outcome} for {backend} on {arch}"
        if refused and row.rule.repair is not None:
            verdict = judge(example.call, host, self._tables, backend, Policy())
            if not any(f.rule == row.id and f.repaired_by is not None for f in verdict.findings):
                return f"requires a call that {row.rule.repair} makes acceptable to the row; got another"
        return ""


def _host(rule: Rule, arch: str, info: BackendInfo, example: Example) -> Host:
    versions = {name: _newest(name, options_of(ranges), info) for name, ranges in rule.versions.items()}
    return Host(arch=arch, versions={**versions, **example.versions})


def _newest(name: str, ranges: list[str], info: BackendInfo) -> str:
    known = options_of(info.versions_known.get(name, ">=0"))
    return str(max(shared_points(name, ranges, known), default=Version("0")))
