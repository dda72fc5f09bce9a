"""The rows of one architecture, collected from the files of one or more table folders, each parsed once.

A later folder adds rows to those of an earlier one, and replaces rows of the same id.

The rows about a backend on an architecture are those of `any/`, those of the architecture's own file and
those of the files that it includes; a row of `any/several.toml` counts as one in each file that it names. An
architecture without an own file has the one it inherits. Rows of options are in the order in which they
apply, the architecture's own last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from attnroute.errors import TableError, did_you_mean
from attnroute.tables.archs import ArchTable, StockOrder, StockTable
from attnroute.tables.interconnect import InterconnectTable
from attnroute.tables.providers import Providers, providers_of
from attnroute.tables.read import read
from attnroute.tables.releases import with_tested_versions
from attnroute.tables.rows import FeatureRow, OptionRow, RuleRow, wrong_device
from attnroute.tables.schema import (
    BACKEND,
    BackendInfo,
    BackendTable,
    FeatureAnswer,
    Option,
    Row,
    Rule,
    SharedRules,
)
from attnroute.tables.te_choice import TeChoiceTable
from attnroute.vocabulary import Feature

ANY = "any"
TE_CHOICE = "te_choice"
"""The file of `any/` about what TransformerEngine's own module picks."""
INTERCONNECT = "interconnect"
"""The file of `any/` about what connects GPUs."""
SEVERAL = "several"
"""The file of `any/` whose rows hold in several files each, as if they stood there."""
NO_BACKEND = ("arch", "stock", TE_CHOICE, INTERCONNECT, SEVERAL)
"""The files of `any/` that are not about a backend."""
SHARED = "shared"
"""The folder of files that several architectures include."""

_Rules = list[tuple[Path, Rule]]
_Options = list[tuple[Path, Option]]
_Model = TypeVar("_Model", bound=Row)


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one or more folders, later folders over earlier ones.

    Two objects are equal only if they are one, so that what is remembered about tables is not taken for
    true of the same folders read again.

    Attributes:
        folders: The shipped one, those of plug-ins, an overlay.
        problems: What is wrong with the plug-ins that are left out, a sentence for each.
    """

    folders: tuple[Path, ...]
    problems: tuple[str, ...] = ()
    _archs: dict[str, ArchTable] = field(default_factory=dict, compare=False)
    _rows: dict[tuple[str, str], tuple[RuleRow, ...] | None] = field(default_factory=dict, compare=False)
    _features: dict[tuple[str, str], dict[str, FeatureRow]] = field(default_factory=dict, compare=False)
    _options: dict[tuple[str, str], tuple[OptionRow, ...]] = field(default_factory=dict, compare=False)
    _infos: dict[tuple[str, str], BackendInfo] = field(default_factory=dict, compare=False)
    _bound: dict[Path, dict[tuple[str, str], _Rules]] = field(default_factory=dict, compare=False)
    _paths: dict[tuple[Path, str, str], Path | None] = field(default_factory=dict, compare=False)

    @cached_property
    def backends(self) -> dict[str, BackendInfo]:
        """Every backend that the tables know, by name."""
        found = {name: self._info(name) for name in self._names(ANY) if name not in NO_BACKEND}
        for name in found:
            if not re.fullmatch(BACKEND, name):
                sentence = "requires a name of small letters, digits and underscores for a backend"
                raise TableError(f"{ANY}/{name}.toml: {sentence}; got {name}; rename the file.")
        missing = sorted(name for name, info in found.items() if info is None)
        if missing:
            near = did_you_mean(missing[0], set(found) - set(missing)) or "."
            msg = f"any/{missing[0]}.toml requires a [backend] section, as every new backend; got none{near}"
            raise TableError(msg)
        return {name: info for name, info in found.items() if info is not None}

    @cached_property
    def slow_tier(self) -> frozenset[str]:
        """The backends whose memory grows with seqlen_q * seqlen_kv: they come last, and never silently."""
        return frozenset(name for name, info in self.backends.items() if info.memory == "quadratic")

    @cached_property
    def providers(self) -> Providers:
        """Every distribution that backends need, and how it is found."""
        return providers_of(self)

    @cached_property
    def arch_names(self) -> tuple[str, ...]:
        """Every architecture that has an arch.toml."""
        names = {p.parent.name for folder in self.folders for p in folder.glob("[!.]*/arch.toml")} - {ANY}
        return tuple(sorted(names, key=lambda n: (n == "cpu", len(n), n)))

    @cached_property
    def stock(self) -> tuple[StockOrder, ...]:
        """The orders of torch's own selector."""
        orders: list[StockOrder] = []
        for folder in self.folders:
            path = self._file(folder, ANY, "stock")
            if path is not None:
                found = read(path, StockTable).order
                for row in found:
                    self.check_known(f"{ANY}/stock.toml: order {row.name}", row.order)
                orders = [*found, *orders]
        return tuple(orders)

    @cached_property
    def te_choice(self) -> TeChoiceTable:
        """How TransformerEngine's own module picks a kernel; the file of the last folder that has one."""
        table = self._last(TE_CHOICE, TeChoiceTable)
        for path in table.path:
            self.check_known(f"{ANY}/{TE_CHOICE}.toml: path {path.name}", path.runs)
        return table

    @cached_property
    def interconnect(self) -> InterconnectTable:
        """What connects GPUs; the file of the last folder that has one."""
        return self._last(INTERCONNECT, InterconnectTable)

    def _last(self, name: str, model: type[_Model]) -> _Model:
        """Return a file of `any/` of the last folder that has it."""
        paths = [p for folder in self.folders if (p := self._file(folder, ANY, name))]
        if not paths:
            raise TableError(f"the tables require {ANY}/{name}.toml; got none; reinstall them.")
        found: _Model = read(paths[-1], model)
        return found

    def arch(self, name: str) -> ArchTable:
        """Return one architecture, or what holds on those that no folder describes.

        Raises:
            TableError: Neither is there.
        """
        if name not in self._archs:
            tables = self._arch_files(name) or self._arch_files(ANY)
            if not tables:
                msg = f"arch requires {name}/arch.toml or {ANY}/arch.toml; got neither; reinstall the tables."
                raise TableError(msg)
            self.check_known(f"{name}/arch.toml: backends", [b for t in tables for b in t.backends])
            parts = {part: getattr(table, part) for table in tables for part in table.model_fields_set}
            parts["peak"] = {card: peak for table in tables for card, peak in table.peak.items()}
            self._archs[name] = tables[0].model_copy(update=parts)
        return self._archs[name]

    def check_known(self, where: str, names: Iterable[str]) -> None:
        """Refuse a backend that no file declares: nothing would ever run it."""
        for name in names:
            if name not in self.backends:
                near = did_you_mean(name, self.backends) or "."
                known = ", ".join(self.backends)
                raise TableError(f"{where} requires backends of the tables ({known}); got {name}{near}")

    def _arch_files(self, name: str) -> list[ArchTable]:
        return [read(p, ArchTable) for f in self.folders if (p := self._file(f, name, "arch"))]

    def info(self, arch: str, backend: str) -> BackendInfo:
        """Return what holds for a backend on an architecture: that of `any/`, or what a nearer file says."""
        key = (arch, backend)
        if key not in self._infos:
            nearer = [t for s in reversed(self._lineage(arch, backend)) for t in self.files(s, backend)]
            parts = [t.model_dump(include={"needs", "first_call_seconds"}, exclude_none=True) for t in nearer]
            changes = {name: value for part in parts for name, value in part.items()}
            self._infos[key] = self.backends[backend].model_copy(update=changes)
        return self._infos[key]

    def features(self, arch: str, backend: str) -> dict[str, FeatureRow]:
        """Return a backend's answers by feature, the architecture's own answers over those of `any/`."""
        key = (arch, backend)
        if key not in self._features:
            self._features[key] = {
                name: FeatureRow(f"{scope}/{backend}/feature-{name.replace('_', '-')}", answer)
                for scope in (ANY, *reversed(self._lineage(arch, backend)))
                for name, answer in self.answers(scope, backend).items()
            }
        return self._features[key]

    def rules(self, arch: str, backend: str) -> tuple[RuleRow, ...] | None:
        """Return every row about a backend on an architecture, or None if nothing was written for it."""
        key = (arch, backend)
        if key not in self._rows:
            scopes = self._lineage(arch, backend)
            known = bool(scopes) or backend in self._listed(arch)
            rows = {r.id: r for scope in (ANY, *scopes) for r in self._with_included(scope, backend)}
            if (row := self.device_row(arch, backend)) is not None:
                known, rows[row.id] = True, row
            self._rows[key] = tuple(rows.values()) if known else None
        return self._rows[key]

    def device_row(self, arch: str, backend: str) -> RuleRow | None:
        """Return the row that rejects everything where a backend has no kernel for this kind of device."""
        return wrong_device(arch, backend, self.backends[backend], self.folders[0] / ANY / f"{backend}.toml")

    def options(self, arch: str, backend: str) -> tuple[OptionRow, ...]:
        """Return every row of options for a backend on an architecture, in the order in which they apply."""
        key = (arch, backend)
        if key not in self._options:
            scopes = (ANY, *reversed(self._lineage(arch, backend)))
            places = (place for scope in scopes for place in self._places(scope, backend))
            self._options[key] = tuple({r.id: r for p in places for r in self._merged_options(*p)}.values())
        return self._options[key]

    @cached_property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Folder and name of every file that holds rows about backends, hidden ones aside."""
        found = {(p.parent.name, p.stem) for folder in self.folders for p in folder.glob("*/*.toml")}
        found.update(place for folder in self.folders for place in self._several(folder))
        others = {(scope, "arch") for scope, _ in found} | {(ANY, name) for name in NO_BACKEND}
        return tuple(sorted(p for p in found - others if "." not in (p[0][0], p[1][0])))

    def all_rows(self) -> list[RuleRow]:
        """Return every row of every file once."""
        return [row for place in self.places for row in self._merged(*place)]

    def all_options(self) -> list[OptionRow]:
        """Return every row of options of every file once."""
        return [row for place in self.places for row in self._merged_options(*place)]

    def _lineage(self, arch: str, backend: str) -> tuple[str, ...]:
        """Return the folders whose file speaks about a backend here, the nearest first.

        A file replaces the inherited one only in the folder that introduces the architecture or the backend:
        the file of an overlay adds to what is inherited, as a user who adds a row must not lose the others.
        """
        found = []
        for name in self.ancestors(arch):
            if any(self._is_about(folder, name, backend) for folder in self.folders):
                found.append(name)
            homes = (self._first(name, "arch"), self._first(ANY, backend))
            if any(home is not None and self._is_about(home, name, backend) for home in homes):
                break
        return tuple(found)

    def _is_about(self, folder: Path, scope: str, backend: str) -> bool:
        is_there = self._file(folder, scope, backend) is not None
        return is_there or (scope, backend) in self._several(folder)

    def _first(self, scope: str, stem: str) -> Path | None:
        return next((folder for folder in self.folders if self._file(folder, scope, stem)), None)

    def _file(self, folder: Path, scope: str, stem: str) -> Path | None:
        """Return a file of one folder, None where it has none; each is looked for once."""
        key = (folder, scope, stem)
        if key not in self._paths:
            path = folder / scope / f"{stem}.toml"
            self._paths[key] = path if path.is_file() else None
        return self._paths[key]

    def _listed(self, arch: str) -> frozenset[str]:
        return frozenset(backend for name in self.ancestors(arch) for backend in self.arch(name).backends)

    def ancestors(self, arch: str) -> Iterator[str]:
        """Give the architecture and what it inherits, the nearest first."""
        names: list[str] = []
        following: str | None = arch
        while following is not None:
            if following in names:
                circle = " -> ".join([*names, following])
                raise TableError(f"{names[-1]}/arch.toml: inherits requires an end; got the circle {circle}.")
            names.append(following)
            parent = self.arch(following).inherits
            if parent is not None and parent not in self.arch_names:
                sentence = f'inherits requires an architecture that has a folder; got "{parent}"'
                raise TableError(f"{following}/arch.toml: {sentence}; add {parent}/arch.toml to describe it.")
            yield following
            following = parent

    def _with_included(self, scope: str, stem: str) -> tuple[RuleRow, ...]:
        return tuple(row for place in self._places(scope, stem) for row in self._merged(*place))

    def _places(self, scope: str, stem: str) -> tuple[tuple[str, str], ...]:
        """Return the files whose rows hold where one file's do, each once: what it includes, then itself."""
        found: dict[tuple[str, str], None] = {}
        above = {(scope, stem): self._included(scope, stem)}
        while above:
            here = next(reversed(above))
            following = next(above[here], None)
            if following is None:
                del above[here]
                found[here] = None
            elif following in above:
                name, other = "/".join(following), "/".join(here)
                sentence = f"include requires files that do not include it; got {other}."
                raise TableError(f"{name}.toml: {sentence}")
            elif following not in found:
                above[following] = self._included(*following)
        return tuple(found)

    def _included(self, scope: str, stem: str) -> Iterator[tuple[str, str]]:
        for name in dict.fromkeys(name for table in self.files(scope, stem) for name in table.include):
            folder, _, file = name.partition("/")
            if not self.files(folder, file):
                raise TableError(f"{scope}/{stem}.toml: include requires an existing file; got {name}.")
            yield folder, file

    def files(self, scope: str, stem: str) -> list[BackendTable]:
        """Return one file of every folder that has it."""
        paths = (self._file(folder, scope, stem) for folder in self.folders)
        return [read(path, BackendTable) for path in paths if path is not None]

    def answers(self, scope: str, backend: str) -> dict[Feature, FeatureAnswer]:
        """Return the feature answers that stand in one folder."""
        return {name: a for table in self.files(scope, backend) for name, a in table.features.items()}

    def _merged(self, scope: str, backend: str) -> tuple[RuleRow, ...]:
        found = [(path, rule) for rules, _ in self._checked(scope, backend) for path, rule in rules]
        rows = [RuleRow(f"{scope}/{backend}/{rule.name}", rule, path) for path, rule in found]
        return tuple({row.id: row for row in rows}.values())

    def _merged_options(self, scope: str, backend: str) -> tuple[OptionRow, ...]:
        found = [(path, option) for _, options in self._checked(scope, backend) for path, option in options]
        rows = [OptionRow(f"{scope}/{backend}/{option.name}", option, path) for path, option in found]
        return tuple({row.id: row for row in rows}.values())

    def _checked(self, scope: str, backend: str) -> Iterator[tuple[_Rules, _Options]]:
        """Give the rows of every folder, each with its file, once their names are known to be unique."""
        for folder in self.folders:
            path = self._file(folder, scope, backend)
            rules = list(self._several(folder).get((scope, backend), ()))
            options: _Options = []
            if path is not None:
                table = read(path, BackendTable)
                rules += [(path, rule) for rule in table.rule]
                options += [(path, option) for option in table.option]
            counts = Counter([*(rule.name for _, rule in rules), *(option.name for _, option in options)])
            twice = next((name for name, count in counts.items() if count > 1), None)
            if twice is not None:
                where = folder / scope / f"{backend}.toml"
                raise TableError(f"{where}: rule {twice}: name requires a unique value; it stands twice.")
            yield rules, options

    def _several(self, folder: Path) -> dict[tuple[str, str], _Rules]:
        """Return the rows of a folder that hold in several files, by scope and name of each."""
        path = self._file(folder, ANY, SEVERAL)
        if path is None:
            return {}
        if path not in self._bound:
            found: dict[tuple[str, str], _Rules] = {}
            for row in read(path, SharedRules).rule:
                for name in row.files:
                    scope, _, stem = name.partition("/")
                    self._check_file(f"{ANY}/{SEVERAL}.toml: rule {row.name}", scope, stem)
                    found.setdefault((scope, stem), []).append((path, row.rule_of(name)))
            self._bound[path] = found
        return self._bound[path]

    def _check_file(self, where: str, scope: str, stem: str) -> None:
        """Refuse the name of a file that nothing would read."""
        home = stem if scope == SHARED else "arch"
        if scope != ANY and not any(self._file(folder, scope, home) for folder in self.folders):
            sentence = "files requires existing ones, or an architecture's"
            raise TableError(f"{where}: {sentence}; got {scope}/{stem}.")
        if scope != SHARED:
            self.check_known(f"{where}: files", [stem])

    def _info(self, backend: str) -> BackendInfo | None:
        found = [table.backend for table in self.files(ANY, backend) if table.backend is not None]
        return with_tested_versions(found[-1], self.folders[0]) if found else None

    def _names(self, scope: str) -> list[str]:
        found = {p.stem for folder in self.folders for p in (folder / scope).glob("*.toml")}
        return sorted(name for name in found if not name.startswith("."))
