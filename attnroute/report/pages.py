"""Write the reference pages of the tables: one per backend with an entry for each row, and one of orders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from attnroute.question.host import device_of
from attnroute.report.rules import SCOPES, box_words, options_words, versions_words
from attnroute.report.sentences import listed, words
from attnroute.tables.points import options_of
from attnroute.tables.preferences import all_preferences

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables
    from attnroute.tables.rows import OptionRow, PreferenceRow, RuleRow
    from attnroute.tables.schema import BackendInfo, Evidence, FeatureAnswer, Option, Preference, Rule

ORDERS: Final = "orders"
"""The page of preferences."""
AnyRow = TypeVar("AnyRow", "RuleRow", "OptionRow")
MARK: Final = "<!-- Written by `attnroute tables pages` from capability_tables; changes here are lost. -->"
_ISSUE: Final = re.compile(r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b")
_URL: Final = re.compile(r"https?://[^\s,;)]+(?<![.:])")


def backend_page(tables: Tables, backend: str) -> str:
    """Return the page of one backend: what it is, where it runs, what it takes, and every row."""
    info = tables.backends[backend]
    lines = [f"# `{backend}`: {info.title}", "", MARK, "", *_facts(info), ""]
    lines += ["## Where it runs", "", *_architectures(tables, backend), ""]
    lines += ["## What it takes", "", *_features(tables, backend), ""]
    rows, options = _rules(tables, backend), _options(tables, backend)
    lines += ["## Limits and known faults", "", *_groups(rows, tables, backend)]
    if options:
        lines += ["## Options of its kernel", ""]
        lines += [line for row, archs in options for line in _option(row, archs, tables)]
    return "\n".join(lines).rstrip() + "\n"


def orders_page(tables: Tables) -> str:
    """Return the page of preferences: which backends come first for which calls."""
    lines = ["# Which backends come first", "", MARK, ""]
    lines += ["Predicted times put in order what was measured on an architecture; these rows put the others,"]
    lines += [
        "see [the order](../reading-explain.md#the-order). The first row that names a backend counts.",
        "",
    ]
    folder = ""
    for row in all_preferences(tables):
        scope = row.id.partition("/")[0]
        if scope != folder:
            folder = scope
            lines += [f"## {'Every architecture' if scope == 'any' else scope}", ""]
        lines += _preference(row)
    return "\n".join(lines).rstrip() + "\n"


def index_page(tables: Tables) -> str:
    """Return the page that leads to the others: rows, faults and evidence of each backend."""
    lines = ["# Reference", "", MARK, ""]
    lines += [
        "What the capability tables say, row by row; `attnroute rule ID` prints a row and names its entry."
    ]
    lines += [
        "",
        "| backend | | rows | known faults | rows with a measurement |",
        "| --- | --- | --: | --: | --: |",
    ]
    for backend, info in tables.backends.items():
        rows = [row for row, _ in _rules(tables, backend)]
        faults = sum(row.rule.kind != "limit" for row in rows)
        measured = sum(any(e.kind == "measured" for e in row.rule.evidence) for row in rows)
        lines.append(f"| [`{backend}`]({backend}.md) | {info.title} | {len(rows)} | {faults} | {measured} |")
    lines += [
        "",
        f"Also: [which backends come first]({ORDERS}.md), [what each architecture gets](matrix.md).",
    ]
    days = Counter(row.rule.recheck_after for row in tables.all_rows() if row.rule.recheck_after is not None)
    told = [f"{count} after {day}" for day, count in sorted(days.items())]
    lines += ["", f"Known faults that are due to be looked at again: {listed(told)}."]
    return "\n".join(lines) + "\n"


def places(tables: Tables) -> dict[str, str]:
    """Return the entry of every row, as the page below the folder of pages with its anchor, by id."""
    found = {row.id: f"{ORDERS}.md#{anchor(row.id)}" for row in all_preferences(tables)}
    for backend in tables.backends:
        ids = [row.id for row, _ in _rules(tables, backend)]
        for row_id in (*ids, *(row.id for row, _ in _options(tables, backend))):
            found.setdefault(row_id, f"{backend}.md#{anchor(row_id)}")
        for arch in tables.arch_names:
            if (device := tables.device_row(arch, backend)) is not None:
                found[device.id] = f"{backend}.md#where-it-runs"
            for feature in tables.features(arch, backend).values():
                found[feature.id] = f"{backend}.md#what-it-takes"
        found[f"any/{backend}/versions-known"] = f"{backend}.md"
    return found


def anchor(row_id: str) -> str:
    """Return what a renderer makes of a heading that is an id."""
    return row_id.replace("/", "")


def _rules(tables: Tables, backend: str) -> list[tuple[RuleRow, list[str]]]:
    """Return every rule about a backend with the architectures on which it holds."""
    return _held((a, row) for a in tables.arch_names for row in tables.rules(a, backend) or ())


def _options(tables: Tables, backend: str) -> list[tuple[OptionRow, list[str]]]:
    return _held((a, row) for a in tables.arch_names for row in tables.options(a, backend))


def _held(found: Iterable[tuple[str, AnyRow]]) -> list[tuple[AnyRow, list[str]]]:
    """Collect the architectures of each row, by its id."""
    rows: dict[str, tuple[AnyRow, list[str]]] = {}
    for arch, row in found:
        rows.setdefault(row.id, (row, []))[1].append(arch)
    return list(rows.values())


def _facts(info: BackendInfo) -> Iterator[str]:
    yield f"* needs {', '.join(f'`{need}`' for need in info.needs)}"
    yield f"* known versions: {versions_words(info.versions_known)}"
    if info.operators:
        yield f"* runs as {', '.join(f'`{name}`' for name in info.operators)}"
    yield f"* memory {info.memory} in the sequence length"
    if info.first_call_seconds is not None:
        least, most = info.first_call_seconds
        yield f"* the first call of each structure compiles, {least:g} to {most:g} s"


def _architectures(tables: Tables, backend: str) -> Iterator[str]:
    """Give a table whose lines are the architectures of which the same is to be said."""
    said: dict[str, list[str]] = {}
    for arch in tables.arch_names:
        said.setdefault(_said_of(tables, arch, backend), []).append(arch)
    yield from ("| architecture | rows | known faults | |", "| --- | --: | --: | --- |")
    for cells, archs in said.items():
        yield f"| {', '.join(archs)} | {cells} |"


def _said_of(tables: Tables, arch: str, backend: str) -> str:
    rows = tables.rules(arch, backend)
    if rows is None:
        return "| | unknown: no file speaks about it"
    if not _is_described(tables, arch, backend):
        return "| | no kernel for this kind of device"
    never = [row for row in rows if row.rule.is_absolute]
    note = f"rejected: {_cell(never[0].rule.because)}, {_link(never[0].id)}" if never else ""
    return f"{len(rows)} | {sum(row.rule.kind != 'limit' for row in rows)} | {note}"


def _features(tables: Tables, backend: str) -> Iterator[str]:
    yield from ("| feature | answer | otherwise on | evidence |", "| --- | --- | --- | --- |")
    archs = [a for a in tables.arch_names if _is_described(tables, a, backend)]
    for name, usual in tables.answers("any", backend).items():
        others: dict[str, list[str]] = {}
        for arch in archs:
            answer = tables.features(arch, backend)[name].answer
            if answer != usual:
                others.setdefault(_answer(answer), []).append(arch)
        told = "; ".join(f"{', '.join(names)}: {answer}" for answer, names in others.items())
        evidence = _cell("; ".join(map(_evidence, usual.evidence)))
        yield f"| `{name}` | {_answer(usual)} | {told} | {evidence} |"


def _is_described(tables: Tables, arch: str, backend: str) -> bool:
    return tables.rules(arch, backend) is not None and tables.device_row(arch, backend) is None


def _answer(answer: FeatureAnswer) -> str:
    said = {True: "yes", False: "no", "unknown": "unknown"}[answer.value]
    return f"{said}, but for `{answer.repair}`" if answer.repair else said


def _groups(rows: list[tuple[RuleRow, list[str]]], tables: Tables, backend: str) -> Iterator[str]:
    """Give the entries by where rows hold, those that hold everywhere first."""
    described = [a for a in tables.arch_names if _is_described(tables, a, backend)]
    groups: dict[str, list[RuleRow]] = {}
    for row, archs in rows:
        here = [arch for arch in archs if arch in described]
        if here:
            groups.setdefault(_where(here, described), []).append(row)
    for where, found in sorted(
        groups.items(), key=lambda item: (not item[0].startswith("On every"), item[0])
    ):
        yield from (f"### {where}", "")
        for row in found:
            yield from _rule(row)


def _where(archs: list[str], described: list[str]) -> str:
    if archs == described:
        return "On every architecture that has rows" if len(described) > 1 else f"On {archs[0]}"
    if archs == [arch for arch in described if device_of(arch) == "cuda"]:
        return "On every GPU that has rows"
    return f"On {listed(archs)}"


def _rule(row: RuleRow) -> Iterator[str]:
    rule = row.rule
    yield from (f"#### {row.id}", "")
    yield f"{_head(rule)}{_sentence(rule, _requirement(rule))}{_remarks(rule)}"
    yield ""
    refused, taken = (options_of(part or []) for part in (rule.refuses, rule.takes))
    examples = [f"refuses {_codes(refused)}"] * bool(refused) + [f"takes {_codes(taken)}"] * bool(taken)
    if examples:
        yield f"* {'; '.join(examples)}"
    if rule.argued is not None:
        yield f"* what it refuses was run and is right; it stays: {_text(rule.argued)}"
    yield from _evidence_lines(rule.evidence)
    yield from (f"* not for `{backend}`: {_linked(reason)}" for backend, reason in rule.not_for.items())
    if rule.recheck_after is not None:
        yield f"* looked at again after {rule.recheck_after}"
    yield ""


def _head(rule: Rule) -> str:
    return "" if rule.kind == "limit" else f"**{words(rule.kind).capitalize()}**: "


def _sentence(row: Rule | Option | Preference, says: str) -> str:
    """Say where a row applies, what it says, and why."""
    parts = [f"with {_code(versions_words(row.versions))}"] if row.versions else []
    parts += [f"in {row.phase}"] if row.phase else []
    parts += [f"where {_code(box_words(row.when))}"] if row.when else []
    said = f"{' '.join(parts)}, {says}" if parts else says
    return f"{said[:1].upper()}{said[1:]}, because {_text(row.because)}."


def _requirement(rule: Rule) -> str:
    if isinstance(rule.requires, str):
        return "no call is taken"
    return f"requires {_code(box_words(rule.requires))}"


def _remarks(rule: Rule) -> str:
    parts = [f"`{rule.repair}` lifts it."] if rule.repair else []
    parts += [f"Binds {SCOPES[rule.scope]}."] if rule.scope != "call" else []
    return "".join(f" {part}" for part in parts)


def _option(row: OptionRow, archs: list[str], tables: Tables) -> Iterator[str]:
    option = row.option
    yield from (f"#### {row.id}", "")
    yield _sentence(option, f"sets {_code(options_words(option))}")
    yield from ("", f"* on {listed(archs) if archs != list(tables.arch_names) else 'every architecture'}")
    yield from (*_evidence_lines(option.evidence), "")


def _preference(row: PreferenceRow) -> Iterator[str]:
    preference = row.preference
    yield from (f"### {row.id}", "")
    first = listed([f"`{name}`" for name in preference.first])
    yield _sentence(preference, f"first {first}")
    yield from ("", *_evidence_lines(preference.evidence), "")


def _evidence_lines(evidence: Iterable[Evidence]) -> Iterator[str]:
    for item in evidence:
        yield f"* {_evidence(item)}"


def _evidence(item: Evidence) -> str:
    ref = f"`benchmarks/results/{item.ref}.json`" if item.kind == "measured" else _linked(item.ref)
    version = item.version and f"version {item.version}"
    day = item.date and item.date.isoformat()
    details = [ref, version, day, item.note and _linked(item.note)]
    return f"{item.kind}: {', '.join(d for d in details if d)}"


def _linked(text: str) -> str:
    """Make links of addresses and of issues on GitHub."""
    pieces, end = [], 0
    for found in re.finditer(f"{_URL.pattern}|{_ISSUE.pattern}", text):
        pieces.append(_text(text[end : found.start()]))
        issue = _ISSUE.fullmatch(found[0])
        address = f"https://github.com/{issue[1]}/issues/{issue[2]}" if issue else found[0]
        pieces.append(f"[{_text(found[0])}]({address})")
        end = found.end()
    return "".join([*pieces, _text(text[end:])])


def _link(row_id: str) -> str:
    return f"[{row_id}](#{anchor(row_id)})"


def _codes(lines: list[str]) -> str:
    return listed([_code(line) for line in lines])


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    """Escape what Markdown would act on."""
    return re.sub(r"([*<\[\]`]|(?<!\w)_|_(?!\w))", r"\\\1", text)
