"""Check examples in table rows: a row rejects the calls that it `refuses` and passes those that it `takes`.

An example is a call line, then perhaps ` on ` and what matters of the machine: an architecture, versions.
What it leaves open is taken from the row: every architecture where the row holds, and of each distribution
that the row names the newest version that it is about.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from packaging.version import Version

from attnroute.engine.decide import judge
from attnroute.engine.evaluate import Form, Prepared, outcomes_of
from attnroute.errors import AttnRouteError
from attnroute.question import fits
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.points import options_of, shared_points
from attnroute.tables.problem import Problem, problem_of
from attnroute.tables.rows import RuleRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.question.call import Call
    from attnroute.tables.folders import Tables
    from attnroute.tables.schema import BackendInfo, Rule
    from attnroute.vocabulary import Outcome

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


class Trial(NamedTuple):
    """An example of a row, which can be held against the row and against others in its place.

    Attributes:
        row: The row.
        field: "refuses" or "takes".
        text: The example as it stands there.
        example: The example.
        form: Its call, with what was computed about it.
        places: The architectures and backends on which it counts.
        tables: The tables.
    """

    row: RuleRow
    field: Literal["refuses", "takes"]
    text: str
    example: Example
    form: Form
    places: tuple[tuple[str, str], ...]
    tables: Tables

    def problem(self) -> str:
        """Return what is wrong with the example, without the last words; "" where nothing is."""
        if not self.places:
            return f"requires an architecture where the row holds; got {self.example.arch or 'none'}"
        for place in self.places:
            outcome = self._outcome(self.row, place, self.form)
            if not self._is_right(outcome):
                required = "rejects" if self.field == "refuses" else "lets pass"
                where = f"{place[1]} on {place[0]}"
                return f"requires a call that the row {required}; got {outcome} for {where}"
        if self.field == "refuses" and self.row.rule.repair is not None and not self._is_lifted():
            return f"requires a call that {self.row.rule.repair} makes acceptable to the row; got another"
        return ""

    def agrees(self, rule: Rule) -> bool:
        """Return whether the example would be as right with another rule in the place of its own."""
        return self._is_right(self.outcome(rule, self.form))

    def outcome(self, rule: Rule, form: Form) -> Outcome:
        """Return what another rule in the place of its own says of a call on the machine of the example."""
        return self._outcome(RuleRow(self.row.id, rule, self.row.file), self.places[0], form)

    def _is_right(self, outcome: Outcome) -> bool:
        return outcome != "unknown" and (outcome == "fail") == (self.field == "refuses")

    def _outcome(self, row: RuleRow, place: tuple[str, str], form: Form) -> Outcome:
        arch, backend = place
        info = self.tables.info(arch, backend)
        host = _host(row.rule, arch, info, self.example)
        (outcome,) = outcomes_of(Prepared(backend, host, info, (row,)), form)
        return outcome

    def _is_lifted(self) -> bool:
        arch, backend = self.places[-1]
        host = _host(self.row.rule, arch, self.tables.info(arch, backend), self.example)
        verdict = judge(self.example.call, host, self.tables, backend, Policy())
        return any(f.rule == self.row.id and f.repaired_by is not None for f in verdict.findings)


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

    def places(self, row: RuleRow) -> list[tuple[str, str]]:
        """Return the architectures and backends where a row holds."""
        return self._places[row.id]

    def problems(self) -> Iterator[Problem]:
        """Give every example that is wrong, and every one that its row does not treat as it says."""
        for row in self._tables.all_rows():
            yield from self.problems_of(row)

    def problems_of(self, row: RuleRow) -> Iterator[Problem]:
        """Give what is wrong with the examples of one row."""
        for field, text in _texts(row.rule):
            try:
                sentence = self._trial(row, field, text).problem()
            except AttnRouteError as error:
                sentence = f"{str(error).rstrip('.')};"
            if sentence:
                yield problem_of(row, field, f'{sentence} in "{text}".')

    def trials(self, row: RuleRow) -> list[Trial]:
        """Return the examples of a row.

        Raises:
            ArgumentError: One cannot be read.
        """
        return [self._trial(row, field, text) for field, text in _texts(row.rule)]

    def _trial(self, row: RuleRow, field: Literal["refuses", "takes"], text: str) -> Trial:
        example = read_example(text)
        places = tuple(place for place in self.places(row) if example.arch in (None, place[0]))
        return Trial(row, field, text, example, Form(example.call), places, self._tables)


def _texts(rule: Rule) -> Iterator[tuple[Literal["refuses", "takes"], str]]:
    for text in options_of(rule.refuses or []):
        yield from (("refuses", one) for one in _spelled_out(text))
    for text in options_of(rule.takes or []):
        yield from (("takes", one) for one in _spelled_out(text))


def _spelled_out(text: str) -> Iterator[str]:
    """Give an example once for each of its versions, where it names several: `torch=2.5.1|2.9.0`."""
    line, on, machine = text.partition(_ON)
    words = [word.partition("=") for word in machine.split()]
    for chosen in product(*(value.split("|") for *_, value in words)):
        named = (f"{name}{equals}{value}" for (name, equals, _), value in zip(words, chosen, strict=True))
        yield f"{line}{on}{' '.join(named)}"


def _host(rule: Rule, arch: str, info: BackendInfo, example: Example) -> Host:
    versions = {name: _newest(name, options_of(ranges), info) for name, ranges in rule.versions.items()}
    return Host(arch=arch, versions={**versions, **example.versions})


def _newest(name: str, ranges: list[str], info: BackendInfo) -> str:
    known = options_of(info.known(name) or ">=0")
    return str(max(shared_points(name, ranges, known), default=Version("0")))
