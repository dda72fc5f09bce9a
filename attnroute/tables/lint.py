"""What must hold between the rows of the tables, beyond what each row's own model checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from attnroute.errors import TableError
from attnroute.foreign import locate
from attnroute.question.host import Host
from attnroute.tables.alternatives import is_well_formed
from attnroute.tables.cards import DEFAULT, is_one_of, peak_of
from attnroute.tables.costs import costs_of
from attnroute.tables.folders import ANY, INTERCONNECT, SHARED, Tables
from attnroute.tables.links import links
from attnroute.tables.points import options_of, shared_points
from attnroute.tables.preferences import all_preferences, placed, preferences
from attnroute.tables.problem import Problem, problem_of, said_by, stating
from attnroute.tables.references import references
from attnroute.tables.rows import OptionRow, PreferenceRow, RuleRow
from attnroute.tables.siblings import siblings
from attnroute.tables.strays import strays
from attnroute.tables.windows import windows
from attnroute.vocabulary import FEATURES

if TYPE_CHECKING:
    import datetime

    from attnroute.tables.schema import BackendInfo, Rule

RESERVED = ("feature-", "versions-known", "no-table", "cpu-only", "cuda-only")
"""Beginnings of rule names that the engine gives to its own findings."""
_WORDS, _YEAR = 3, 366
"""The fewest words of a reason, and the most days until somebody looks at a fault again."""
_STOCK_FILE = f"{ANY}/stock.toml"


def lint(tables: Tables, today: datetime.date) -> list[Problem]:
    """Check the tables as a whole.

    Args:
        tables: The tables; overlays are checked together with what they lie on.
        today: The day against which `recheck_after` is held.

    Returns:
        Every problem, none for sound tables. While files cannot be read or resolved, only those problems.
    """
    basic = _basic(tables)
    if basic:
        return basic
    checks: tuple[Callable[[Tables], Iterable[Problem]], ...] = (
        _names,
        _features,
        _examples,
        _overrides,
        _needs,
        _files,
        windows,
        links,
        siblings,
        _reasons,
        _scopes,
        _empty_ranges,
        _duplicates,
        _arch_evidence,
        _peaks,
        _connections,
        _costs,
        _base_orders,
        _idle_preferences,
        _stock,
        _modules,
    )
    broken = [Problem("", "", "", sentence) for sentence in tables.problems]
    dated = (*references(tables, today), *_expired(tables, today))
    found = [*broken, *(problem for check in checks for problem in check(tables)), *dated]
    # A row of several backends is looked at once for each.
    return list(dict.fromkeys(found))


def _basic(tables: Tables) -> list[Problem]:
    try:
        problems = [*_inheritance(tables)]
        if not problems:
            _read_all(tables)
    except TableError as error:
        return [Problem("", "", "", str(error))]
    return problems


def _inheritance(tables: Tables) -> Iterator[Problem]:
    for name in tables.arch_names:
        seen = [name]
        while (parent := tables.arch(seen[-1]).inherits) in tables.arch_names and parent not in seen:
            seen.append(parent)
        if parent is not None and parent not in seen:
            sentence = f'requires an architecture that has a folder; got "{parent}".'
            yield Problem(f"{seen[-1]}/arch.toml", "", "inherits", sentence)
        elif parent is not None:
            circle = " -> ".join([*seen, parent])
            yield Problem(f"{name}/arch.toml", "", "inherits", f"requires an end; got the circle {circle}.")


def _read_all(tables: Tables) -> None:
    """Everything is read once: what cannot be, raises."""
    _ = tables.stock, tables.te_choice, tables.interconnect, tables.all_rows(), tables.all_options()
    for arch in tables.arch_names:
        preferences(tables, arch)
        for backend in tables.backends:
            tables.rules(arch, backend)
            tables.options(arch, backend)
            tables.features(arch, backend)
            costs_of(tables, arch, backend)


def _names(tables: Tables) -> Iterator[Problem]:
    for row in stating(tables):
        if said_by(row).name.startswith(RESERVED):
            sentence = f"requires a beginning that the engine does not use itself; got {said_by(row).name}."
            yield problem_of(row, "name", sentence)


def _features(tables: Tables) -> Iterator[Problem]:
    for backend in tables.backends:
        for name in sorted(set(FEATURES) - set(tables.answers(ANY, backend))):
            sentence = f'requires true, false or "unknown"; got no answer; write features.{name}.'
            yield Problem(f"{ANY}/{backend}.toml", "", f"features.{name}", sentence)


def _examples(tables: Tables) -> Iterator[Problem]:
    """Every row shows a call on each side of it; one that rejects everything has no other side."""
    for row in tables.all_rows():
        rule = row.rule
        refuses_all = rule.requires == "never" and not (rule.when or rule.versions or rule.phase)
        for field in ("refuses",) if refuses_all else ("refuses", "takes"):
            if not getattr(rule, field):
                sentence = "requires an example, a call line; got none; `attnroute explain` tries one."
                yield problem_of(row, field, sentence)


def _overrides(tables: Tables) -> Iterator[Problem]:
    """Only an architecture's own file may say otherwise what a backend needs: others are not asked."""
    for scope, stem in tables.places:
        if scope not in (ANY, SHARED) or (scope == ANY and stem not in tables.backends):
            continue
        for name in ("needs", "first_call_seconds"):
            if any(getattr(table, name) is not None for table in tables.files(scope, stem)):
                sentence = "requires the file of an architecture; write it into [backend] in any/, or there."
                yield Problem(f"{scope}/{stem}.toml", "", name, sentence)


def _needs(tables: Tables) -> Iterator[Problem]:
    """A need that no probe can find under its name keeps a backend away for ever."""
    for scope in (ANY, *tables.arch_names):
        for backend in tables.backends:
            for table in tables.files(scope, backend):
                needs = [*(table.backend.needs if table.backend is not None else ()), *(table.needs or ())]
                for need in (need for need in needs if not is_well_formed(need)):
                    sentence = (
                        f'requires names of distributions, apart by " | " where one is enough; got "{need}".'
                    )
                    yield Problem(f"{scope}/{backend}.toml", "", "needs", sentence)


def _files(tables: Tables) -> Iterator[Problem]:
    """Every file is about a backend, or is shared and included somewhere."""
    for folder in tables.folders:
        yield from (Problem(stray.file, "", "", stray.sentence) for stray in strays(folder, tables))


def _empty_ranges(tables: Tables) -> Iterator[Problem]:
    """A row about versions that do not exist, or that the backend makes no statement about, is never used."""
    told: set[tuple[str, str]] = set()
    for row, info in _used_rows(tables):
        for name, ranges in said_by(row).versions.items():
            known = options_of(info.known(name) or ">=0")
            for option in options_of(ranges):
                if (row.id, option) not in told and not shared_points(name, [option], known):
                    told.add((row.id, option))
                    sentence = (
                        f"requires a range with a known version in it ({', '.join(known)}); got {option}."
                    )
                    yield problem_of(row, f"versions.{name}", sentence)


def _duplicates(tables: Tables) -> Iterator[Problem]:
    """Two rows that say the same of the same versions: one is forgotten when the other changes."""
    told: set[tuple[str, str]] = set()
    for arch in tables.arch_names:
        for backend in tables.backends:
            # The engine's own row about the kind of device takes the place of all others there.
            rows = [
                row for row in tables.rules(arch, backend) or () if not row.rule.name.startswith(RESERVED)
            ]
            for one, other in combinations(rows, 2):
                pair = (one.id, other.id)
                if pair not in told and _same_statement(one.rule, other.rule):
                    told.add(pair)
                    sentence = f"requires versions apart from those of {one.id}, which says the same."
                    yield problem_of(other, "versions", sentence)


def _arch_evidence(tables: Tables) -> Iterator[Problem]:
    for arch in tables.arch_names:
        if not tables.arch(arch).evidence:
            yield Problem(
                f"{arch}/arch.toml", "", "evidence", "requires at least one for what it says; got none."
            )


def _peaks(tables: Tables) -> Iterator[Problem]:
    """A card that is not named still has numbers, and a name is one that the architecture's cards have."""
    for arch in tables.arch_names:
        peaks, cards = tables.arch(arch).peak, tables.arch(arch).cards
        for card in (card for card in peaks if card != DEFAULT and not is_one_of(card, cards)):
            sentence = f"requires the name of one of its cards; got {card}; add it to cards, or correct it."
            yield Problem(f"{arch}/arch.toml", "", "peak", sentence)
        if peaks and DEFAULT not in peaks:
            sentence = f"requires {DEFAULT}, for cards that it does not name; got {', '.join(peaks)}."
            yield Problem(f"{arch}/arch.toml", "", "peak", sentence)


def _connections(tables: Tables) -> Iterator[Problem]:
    """The same for what connects cards."""
    for arch, named in tables.interconnect.card.items():
        cards = tables.arch(arch).cards
        strange = [card for card in named if card != DEFAULT and not is_one_of(card, cards)]
        if strange or DEFAULT not in named:
            sentence = f"requires {DEFAULT} and names of cards of {arch}; got {', '.join(named)}."
            yield Problem(f"{ANY}/{INTERCONNECT}.toml", "", f"card.{arch}", sentence)


def _costs(tables: Tables) -> Iterator[Problem]:
    for arch in tables.arch_names:
        other = tables.arch(arch).costs_from
        if other is not None and other not in tables.arch_names:
            sentence = f'requires an architecture that has a folder; got "{other}".'
            yield Problem(f"{arch}/arch.toml", "", "costs_from", sentence)
        for backend in tables.backends:
            costs = costs_of(tables, arch, backend)
            if costs is None or not costs.is_own:
                continue
            card = costs.table.measured.card
            if costs.table.peak != peak_of(tables, Host(arch=arch, device_name=card)):
                sentence = f"requires the numbers of {card} in {arch}/arch.toml; write it anew."
                yield Problem(f"{arch}/costs/{backend}.toml", "", "peak", sentence)


def _base_orders(tables: Tables) -> Iterator[Problem]:
    """Whatever a call is, every shipped backend has a place; one of an overlay may come last, by its name."""
    shipped = {name for name in tables.backends if (tables.folders[0] / ANY / f"{name}.toml").is_file()}
    missing: set[str] = set()
    for arch in tables.arch_names:
        rows = preferences(tables, arch)
        if not rows or not rows[-1].is_base:
            sentence = "requires a last row without a condition, so that one always applies; got none."
            yield Problem(f"{arch}/arch.toml", "", "prefer", sentence)
        always = {name for row in rows if row.is_base for name in row.preference.first}
        missing |= {name for name in shipped - always if tables.rules(arch, name) is not None}
    if missing:
        names = ", ".join(sorted(missing))
        sentence = f"requires each shipped backend in a row without a condition; missing are {names}."
        yield Problem(f"{ANY}/arch.toml", "", "prefer", sentence)


def _idle_preferences(tables: Tables) -> Iterator[Problem]:
    """A row that moves nothing on any architecture says what others say, or what nobody reads."""
    moving: set[str] = set()
    for arch in tables.arch_names:
        rows = preferences(tables, arch)
        described = [name for name in tables.backends if tables.rules(arch, name) is not None]
        moving.update(row.id for row in rows if row.id not in moving and _moves(row, rows, described))
    for row in all_preferences(tables):
        if row.id not in moving:
            sentence = (
                "requires backends that the rows behind it would put elsewhere; got an order that they make."
            )
            yield Problem(f"{row.file.parent.name}/arch.toml", row.preference.name, "first", sentence)


def _moves(row: PreferenceRow, rows: tuple[PreferenceRow, ...], backends: list[str]) -> bool:
    """Return whether a row changes a base order, alone or beside one weaker row that holds too."""
    condition = row.preference.condition
    always = {other.id for other in rows if other.is_base or other.preference.condition == condition}
    for beside in rows[rows.index(row) :]:
        held = [other for other in rows if other.id in always or other is beside]
        if placed(held, backends) != placed((other for other in held if other is not row), backends):
            return True
    return False


def _stock(tables: Tables) -> Iterator[Problem]:
    if not tables.stock or tables.stock[-1].versions or tables.stock[-1].archs is not None:
        sentence = "requires a last order without a condition, so that one always applies; got none."
        yield Problem(_STOCK_FILE, "", "order", sentence)
    for order in tables.stock:
        if tables.slow_tier.isdisjoint(order.order):
            slow = " or ".join(sorted(tables.slow_tier))
            sentence = f"requires backends of the tables and {slow}; got {', '.join(order.order)}."
            yield Problem(_STOCK_FILE, order.name, "order", sentence)
        for arch in sorted(set(order.archs or ()) - set(tables.arch_names)):
            sentence = f"requires architectures of the tables; got {arch}."
            yield Problem(_STOCK_FILE, order.name, "archs", sentence)


def _modules(tables: Tables) -> Iterator[Problem]:
    """Every backend names a module that can be found. What the module offers, its first import shows."""
    for name, info in tables.backends.items():
        if locate(info.module) is None:
            sentence = f"requires a module that can be imported; got {info.module}, which is not found."
            yield Problem(f"{ANY}/{name}.toml", "", "backend.module", sentence)


def _reasons(tables: Tables) -> Iterator[Problem]:
    """A reason is a clause, as explanations go on behind it; an argument is a sentence."""
    for row in stating(tables):
        denials = row.rule.not_for if isinstance(row, RuleRow) else {}
        for field, reason in (("because", said_by(row).because), *(("not_for", r) for r in denials.values())):
            if len(reason.split()) < _WORDS or reason != reason.strip(" ."):
                yield problem_of(row, field, f'requires a clause that says why; got "{reason}".')
    for row in tables.all_rows():
        said = row.rule.argued
        if said is not None and (len(said.split()) < _WORDS or not said[:1].isupper() or said[-1:] != "."):
            yield problem_of(row, "argued", f'requires a sentence that says why; got "{said}".')


def _scopes(tables: Tables) -> Iterator[Problem]:
    """Only a backend that torch's own selector knows has rows about one of its two ways."""
    torchs = {name for order in tables.stock for name in order.order}
    for arch in tables.arch_names:
        for backend in tables.backends:
            for row in tables.rules(arch, backend) or ():
                if row.rule.scope != "call" and backend not in torchs:
                    sentence = f"requires call, as torch does not select {backend}; got {row.rule.scope}."
                    yield problem_of(row, "scope", sentence)


def _expired(tables: Tables, today: datetime.date) -> Iterator[Problem]:
    for row in tables.all_rows():
        day = row.rule.recheck_after
        if day is not None and day < today:
            sentence = f"has passed on {day}; measure again, then narrow the row or move the day."
            yield problem_of(row, "recheck_after", sentence)
        elif day is not None and (day - today).days > _YEAR:
            yield problem_of(row, "recheck_after", f"requires a day within a year; got {day}.")
        elif day is not None and row.rule.kind == "limit":
            sentence = (
                "requires a fault, which gets fixed; got the kind limit; say the kind, or drop the day."
            )
            yield problem_of(row, "recheck_after", sentence)


def _used_rows(tables: Tables) -> Iterator[tuple[RuleRow | OptionRow, BackendInfo]]:
    for arch in tables.arch_names:
        for backend, info in tables.backends.items():
            yield from ((row, info) for row in tables.rules(arch, backend) or ())
            yield from ((row, info) for row in tables.options(arch, backend))


def _same_statement(one: Rule, other: Rule) -> bool:
    if (one.kind, one.when, one.requires) != (other.kind, other.when, other.requires):
        return False
    if one.phase != other.phase and None not in (one.phase, other.phase):
        return False
    if one.scope != other.scope and "call" not in (one.scope, other.scope):
        return False
    shared = set(one.versions) & set(other.versions)
    if one.requires == "never" and set(one.versions) != set(other.versions):
        # What never runs is told apart by nothing but the versions that each row names.
        return False
    return all(
        shared_points(name, options_of(one.versions[name]), options_of(other.versions[name]))
        for name in shared
    )
