"""Backends of other distributions: find the table folders that their entry points name, and check each.

A distribution that has an entry point in the group `attnroute.backends` adds backends without a change here:
the entry point's value is the folder of its tables, written as a dotted name. What is wrong with one plug-in
leaves that one out, and is a sentence that names it; the others hold.
"""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.errors import PluginWarning, TableError, warn_user
from attnroute.foreign import is_of_the_user, locate, summarize_error
from attnroute.tables.archs import ArchTable
from attnroute.tables.read import read
from attnroute.vocabulary import FEATURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnroute.tables.folders import Tables

GROUP: Final = "attnroute.backends"
"""The entry points of plug-ins."""
_ANY, _SHARED, _ARCH = "any", "shared", "arch"


class Plugin(NamedTuple):
    """One entry point.

    Attributes:
        name: Its name.
        value: The folder of tables, as a dotted name.
        distribution: Who has it, with the version.
    """

    name: str
    value: str
    distribution: str

    def __str__(self) -> str:
        """Name it in a sentence."""
        return f"the plug-in {self.name} of {self.distribution}"

    @property
    def folder(self) -> Path | None:
        """The folder of its tables, found without importing a package; None where there is none."""
        top, *rest = self.value.split(".")
        spec = find_spec(top)
        places = () if spec is None else spec.submodule_search_locations or ()
        return next((path for place in places if (path := Path(place, *rest)).is_dir()), None)

    def backends(self) -> list[str]:
        """Return the names of the backends that it declares."""
        folder = self.folder
        names = [] if folder is None else [path.stem for path in (folder / _ANY).glob("[!.]*.toml")]
        return sorted(name for name in names if name != _ARCH)


def usable(shipped: Tables, beside: Callable[[Path], Tables]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Find the plug-ins, and check each alone.

    Args:
        shipped: The tables without plug-ins.
        beside: Returns these tables with one folder more.

    Returns:
        The folders of those that are sound, and a sentence for each of the others.

    Raises:
        TableError: Two of them have one name, or declare one backend.

    Warns:
        PluginWarning: For each that is not sound.
    """
    kept, problems = [], []
    for plugin in find():
        problem = problem_of(plugin, shipped, beside)
        if problem:
            problems.append(problem)
            warn_user(problem, PluginWarning)
        else:
            kept.append(plugin)
    _each_once([(name, plugin) for plugin in kept for name in plugin.backends()], "backend")
    return tuple(plugin.folder for plugin in kept if plugin.folder is not None), tuple(problems)


def find() -> tuple[Plugin, ...]:
    """Return every installed plug-in, by name.

    Raises:
        TableError: Two of them have one name.
    """
    first: dict[tuple[str, str], Plugin] = {}
    for distribution in metadata.distributions():
        for plugin in _plugins_of(distribution):
            # A distribution that is on the path twice is found twice; the first one is imported.
            first.setdefault((plugin.name, plugin.distribution.partition(" ")[0]), plugin)
    found = sorted(first.values())
    _each_once([(plugin.name, plugin) for plugin in found], "name")
    return tuple(found)


def _plugins_of(distribution: metadata.Distribution) -> list[Plugin]:
    """Return the plug-ins of a distribution; none where its metadata cannot be read.

    `metadata.entry_points` would raise for all distributions because of one of them.
    """
    try:
        points = distribution.entry_points.select(group=GROUP)
        name = f"{distribution.name} {distribution.version}" if points else ""
    except BaseException as error:
        if is_of_the_user(error):
            raise
        return []
    return [Plugin(point.name, point.value, name) for point in points]


def _each_once(pairs: list[tuple[str, Plugin]], what: str) -> None:
    twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
    if twice is not None:
        both = " and ".join(str(plugin) for name, plugin in pairs if name == twice)
        raise TableError(
            f"{GROUP} requires a {what} of its own for each plug-in; got {twice} in {both}; uninstall one."
        )


def problem_of(plugin: Plugin, shipped: Tables, beside: Callable[[Path], Tables]) -> str:
    """Return what is wrong with a plug-in, in one sentence, "" where nothing is; see `usable`."""
    try:
        problem = next(_problems(plugin, shipped, beside), "")
    except BaseException as error:
        if is_of_the_user(error):
            raise
        problem = str(error) if isinstance(error, TableError) else summarize_error(error)
    return f"{plugin} is left out: {problem.rstrip('.')}; correct it, or uninstall it." if problem else ""


def _problems(plugin: Plugin, shipped: Tables, beside: Callable[[Path], Tables]) -> Iterator[str]:
    folder = plugin.folder
    if folder is None:
        yield f"its entry point requires a folder of tables; got {plugin.value}, which is none"
        return
    own = plugin.backends()
    if not own:
        yield f"{plugin.value} requires {_ANY}/<backend>.toml; got no such file"
    for name in sorted(set(own) & set(shipped.backends)):
        yield f"{_ANY}/{name}.toml requires another name; attnroute has a backend {name} itself"
    for path in sorted(folder.rglob("[!.]*")):
        if path.is_file() and path.suffix != ".md":
            yield from _misplaced(path.relative_to(folder), path, own, shipped)
    together = beside(folder)
    for name in own:
        module = together.backends[name].module
        if locate(module) is None:
            yield f"{_ANY}/{name}.toml: backend.module requires a module that can be imported; got {module}"
        if missing := sorted(set(FEATURES) - set(together.answers(_ANY, name))):
            yield f"{_ANY}/{name}.toml requires an answer to every feature; missing are {', '.join(missing)}"
        for arch in together.arch_names:
            # What cannot be read raises.
            together.rules(arch, name), together.options(arch, name), together.features(arch, name)
    _ = together.providers


def _misplaced(place: Path, path: Path, own: list[str], shipped: Tables) -> Iterator[str]:
    """A plug-in speaks of its own backends only: nothing in its folder changes what others do."""
    scope, stem = place.parent.as_posix(), place.stem
    known = (_ANY, _SHARED, *shipped.arch_names)
    if path.suffix != ".toml" or scope not in known:
        yield f"{place.as_posix()} requires a .toml file in one of {', '.join(known)}"
    elif scope == _SHARED:
        if (shipped.folders[0] / place).is_file():
            yield f"{place.as_posix()} requires another name; attnroute has such a file itself"
    elif stem == _ARCH:
        table = read(path, ArchTable)
        others = sorted({name for row in table.prefer for name in row.first} - set(own))
        if table.model_fields_set - {"prefer"} or others:
            got = others[0] if others else "another section"
            yield f"{place.as_posix()} requires [[prefer]] rows that name its own backends alone; got {got}"
    elif stem not in own:
        yield f"{place.as_posix()} requires the name of one of its backends, {', '.join(own)}"
