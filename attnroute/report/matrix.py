"""Render which backends take which calls: a table of symbols for one machine, of names for several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.errors import printable
from attnroute.report.layout import Line, laid_out
from attnroute.report.sentences import host_line

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Verdict
    from attnroute.question.host import Host


class Sign(NamedTuple):
    """What a cell can say.

    Attributes:
        word: In JSON.
        symbol: In a table.
        plain: The same where the output has ASCII letters only.
        means: In the legend.
    """

    word: str
    symbol: str
    plain: str
    means: str


SIGNS: Final = {
    sign.word: sign
    for sign in (
        Sign("selected", "●", "*", "runs this call"),
        Sign("eligible", "✓", "y", "could run it"),
        Sign("prepared", "+", "+", "could, after a copy, cast or padding"),
        Sign("slow", "~", "~", "could, holding a score for every query and key"),
        Sign("absent", "○", "o", "could, were its package installed"),
        Sign("unknown", "?", "?", "nobody knows"),
        Sign("rejected", "·", ".", "cannot"),
        Sign("fault", "!", "!", "known to give wrong results, crash or hang"),
    )
}
_GAP: Final = "  "


class Machine(NamedTuple):
    """One machine and what was decided there, by the name of each call."""

    host: Host
    decisions: Mapping[str, Decision]


def word_of(verdict: Verdict, decision: Decision) -> str:
    """Return what a cell says, as a key of `SIGNS`."""
    if verdict.backend == decision.selected:
        return "selected"
    if verdict.status == "rejected":
        return "fault" if all(f.kind != "limit" for f in verdict.blocking) else "rejected"
    if verdict.status != "eligible":
        return "absent" if verdict.status == "unavailable" else "unknown"
    if verdict.excluded is not None:
        return "rejected"
    return "slow" if verdict.score_bytes else "prepared" if verdict.repairs else "eligible"


def in_words(verdict: Verdict, decision: Decision) -> str:
    """Say a cell: its status with preparations, or the first thing that keeps the backend away."""
    status = "selected" if verdict.backend == decision.selected else verdict.status
    if verdict.repairs:
        return f"{status} + {' + '.join(verdict.repairs)}"
    if verdict.blocking:
        return f"{status}: {verdict.blocking[0].rule.rpartition('/')[2]}"
    return f"{status}: needs {verdict.missing[0]}" if verdict.missing else status


def render_machine(machine: Machine, width: int, *, plain: bool = False) -> str:
    """Return a row for each call and a column for each backend, with a legend of the symbols that occur.

    Args:
        machine: The machine.
        width: Columns; where names do not fit beside each other they stand as stairs.
        plain: ASCII letters only.
    """
    backends, words = _cells(machine)
    symbols = {name: [_symbol(word, plain=plain) for word in row] for name, row in words.items()}
    found = [sign for sign in SIGNS.values() if any(sign.word in row for row in words.values())]
    legend = [f"{_symbol(sign.word, plain=plain)} {sign.means}" for sign in found]
    table = _beside("call", [[name] for name in backends], symbols)
    if max(map(len, table)) > width:
        table = _stairs(backends, symbols)
    head = laid_out([Line(host_line(machine.host))], width)
    return "\n".join([head, "", *map(printable, table), "", *legend])


def render_machines(machines: list[Machine], width: int) -> str:
    """Return a row for each call and a column for each kind of machine, with what is selected there."""
    groups = _alike(machines)
    table: list[str] = []
    first = 0
    while first < len(groups):
        count = next(
            n for n in range(len(groups) - first, 0, -1) if n == 1 or _fits(groups[first:][:n], width)
        )
        table += [*([""] if table else []), *_selected(groups[first : first + count])]
        first += count
    return printable("\n".join(table))


def markdown_machine(machine: Machine) -> str:
    """Return the table of one machine as Markdown."""
    backends, words = _cells(machine)
    lines = [f"| call | {' | '.join(backends)} |", f"| --- |{' :-: |' * len(backends)}"]
    lines += [f"| {name} | {' | '.join(SIGNS[w].symbol for w in row)} |" for name, row in words.items()]
    return printable("\n".join(lines))


def markdown_legend() -> str:
    """Return what the symbols mean, as a paragraph of Markdown."""
    return ", ".join(f"{sign.symbol} {sign.means}" for sign in SIGNS.values())


def markdown_machines(machines: list[Machine]) -> str:
    """Return the table of several machines as Markdown."""
    groups = _alike(machines)
    heads = ["<br>".join(m.host.arch for m in group) for group in groups]
    lines = [f"| call | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for name in machines[0].decisions:
        selected = [group[0].decisions[name].selected or "none" for group in groups]
        lines.append(f"| {name} | {' | '.join(selected)} |")
    return printable("\n".join(lines))


def machine_data(machine: Machine, *, verbose: bool) -> dict[str, Any]:
    """Return a machine as data: what each call gets, and with `verbose` what each backend says of it."""
    data: dict[str, Any] = {
        "host": machine.host.model_dump(mode="json", exclude_defaults=True),
        "selected": {},
    }
    if verbose:
        data["cells"] = {}
    for name, decision in machine.decisions.items():
        data["selected"][name] = decision.selected
        if verbose:
            data["cells"][name] = {
                v.backend: {"is": word_of(v, decision), "why": in_words(v, decision)}
                for v in decision.verdicts
            }
    return data


def _cells(machine: Machine) -> tuple[list[str], dict[str, list[str]]]:
    rows = {name: [word_of(v, d) for v in d.verdicts] for name, d in machine.decisions.items()}
    return [v.backend for v in next(iter(machine.decisions.values())).verdicts], rows


def _symbol(word: str, *, plain: bool) -> str:
    return SIGNS[word].plain if plain else SIGNS[word].symbol


def _beside(corner: str, heads: list[list[str]], rows: Mapping[str, list[str]]) -> list[str]:
    """Lay a table out with heads of one or more lines."""
    first = max(map(len, [corner, *rows]))
    widths = [max(map(len, [*head, *(row[at] for row in rows.values())])) for at, head in enumerate(heads)]
    height = max(map(len, heads))
    lines = [[head[n] if n < len(head) else "" for head in heads] for n in range(height)]
    labelled = [(corner if n == height - 1 else "", line) for n, line in enumerate(lines)]

    def laid(name: str, cells: list[str]) -> str:
        # A symbol stands below the middle of its head, a name at the left.
        placed = [f"{c:^{w}}" if len(c) == 1 else f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)]
        return _GAP.join([f"{name:<{first}}", *placed]).rstrip()

    return [laid(*line) for line in (*labelled, *rows.items())]


def _stairs(heads: list[str], rows: Mapping[str, list[str]]) -> list[str]:
    """Lay a table of symbols out with each head on a line of its own, above its column."""
    first = max(map(len, rows))
    lines = []
    for at, head in enumerate(heads):
        lines.append(_GAP.join([" " * first, *("|" for _ in heads[:at]), head]))
    return [*lines, *(_GAP.join([f"{name:<{first}}", *cells]) for name, cells in rows.items())]


def _alike(machines: list[Machine]) -> list[list[Machine]]:
    """Return the machines that select the same for every call together, in the order of the first of each."""
    groups: dict[tuple[str | None, ...], list[Machine]] = {}
    for machine in machines:
        groups.setdefault(tuple(d.selected for d in machine.decisions.values()), []).append(machine)
    return list(groups.values())


def _selected(groups: list[list[Machine]]) -> list[str]:
    rows = {
        name: [group[0].decisions[name].selected or "none" for group in groups]
        for name in groups[0][0].decisions
    }
    return _beside("call", [[m.host.arch for m in group] for group in groups], rows)


def _fits(groups: list[list[Machine]], width: int) -> bool:
    return max(map(len, _selected(groups))) <= width


def details(machines: list[Machine]) -> Iterator[str]:
    """Give each cell of each machine in words, call by call."""
    for machine in machines:
        yield f"{machine.host.arch}:"
        for name, decision in machine.decisions.items():
            width = max(len(v.backend) for v in decision.verdicts)
            yield f"  {name}"
            yield from (f"    {v.backend:<{width}}  {in_words(v, decision)}" for v in decision.verdicts)
