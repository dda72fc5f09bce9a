"""Which other versions would lift what keeps a backend away, read off the ranges of its own rows.

Between two bounds of these ranges nothing changes, so one version of each stretch stands for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from packaging.version import Version

from attnroute.engine.evaluate import prepared, versions_known_id, versions_outside
from attnroute.engine.select import Judgement, Selection
from attnroute.question.host import Host
from attnroute.tables.alternatives import alternatives
from attnroute.tables.points import end_of, points
from attnroute.tables.versions import contains, is_newer, version_of

_BUILT_IN: Final = frozenset({"avx2"})
"""What nobody can install."""
ANY_VERSION: Final = "0"
"""What stands for the version of something about whose versions no row asks."""


class Range(NamedTuple):
    """The versions of one distribution that would do.

    Attributes:
        name: The distribution.
        version: The lowest of them; `ANY_VERSION` where every one does.
        below: The first version after them that would not do any more, or about which the tables make no
            statement; None where there is none.
    """

    name: str
    version: str
    below: str | None = None


def with_versions(host: Host, ranges: tuple[Range, ...]) -> Host:
    """Return the host with the lowest version of each range; torch stays built for its CUDA."""
    changes: dict[str, str | None] = {}
    for name, version, _ in ranges:
        local = host.versions.get(name, "").partition("+")[2]
        changes[name] = f"{version}+{local}" if local else version
    return host.with_versions(changes)


def installs(selection: Selection, judgement: Judgement) -> Iterator[tuple[Range, ...]]:
    """Give what would have to be installed for a backend that lacks nothing else.

    Yields:
        The versions that would do, of everything that it lacks.
    """
    if judgement.status != "unavailable" or judgement.excluded is not None:
        return
    for names in product(*(alternatives(need) for need in judgement.rows.missing)):
        if not _BUILT_IN & set(names) and not selection.host.broken.keys() & set(names):
            ranges = _together(names, _Backend(selection, judgement))
            if ranges is not None:
                yield ranges


def releases(selection: Selection, judgement: Judgement, *, older: bool = False) -> Iterator[Range]:
    """Give other versions of one distribution that would lift all that blocks a backend, or makes it slow.

    Yields:
        The versions that would do: newer ones than are there, or older ones.
    """
    is_free = judgement.excluded is None or judgement.excluded.reason == "unknown"
    if is_free and not judgement.rows.missing and judgement.backend != selection.selected:
        other = _Backend(selection, judgement)
        for name in other.tied():
            found = other.stretch(name, other.versions(name, older=older), [()])
            if found is not None:
                yield found


def _together(names: tuple[str, ...], backend: _Backend) -> tuple[Range, ...] | None:
    """Return versions of several distributions that would do together.

    Each range is found with the newest of the others, which is what an installer takes, and with the lowest
    of those that were found before.
    """
    candidates = {name: backend.known(name) for name in names}
    if not all(candidates.values()):
        return None
    newest = {name: Range(name, str(versions[-1])) for name, versions in candidates.items()}
    found: dict[str, Range] = {}
    for name, versions in candidates.items():
        surroundings = [
            tuple(given[other] for other in names if other != name) for given in (newest, {**newest, **found})
        ]
        stretch = backend.stretch(name, versions, surroundings[: 1 + bool(found)])
        if stretch is None:
            return None
        found[name] = stretch
    return tuple(found.values())


class _Backend:
    """One backend, to be judged under other versions."""

    def __init__(self, selection: Selection, judgement: Judgement) -> None:
        self._form, self._policy = judgement.form, judgement.policy
        self._host, self._tables = selection.host, selection.tables
        self._backend, self._info = judgement.backend, judgement.rows.info
        self._rows = {row.id: row.rule for row in judgement.rows.rows or ()}
        self._is_able = judgement.status == "eligible"
        final = judgement.final
        self._obstacles = [row_id for row_id, *_ in final.blocking] or [row.id for row in final.slow]

    def tied(self) -> list[str]:
        """Return the distributions whose versions every obstacle is about."""
        found = [self._tied_to(row_id) for row_id in self._obstacles]
        return [name for name in found[0] if all(name in names for names in found)] if found else []

    def versions(self, name: str, *, older: bool) -> list[Version]:
        """Return the versions of a distribution at which something changes, on one side of the one there."""
        present = version_of(name, self._host.versions)
        if present is None:
            return [] if older else self.known(name)
        return [p for p in self.known(name) if is_newer(name, p, present) is not older]

    def known(self, name: str) -> list[Version]:
        """Return the versions of a distribution at which something changes, the first one included."""
        found = points(self._tables, self._host.arch, self._backend, name)
        return list(found) if name in self._info.versions_known else [Version(ANY_VERSION), *found]

    def stretch(
        self, name: str, candidates: list[Version], surroundings: list[tuple[Range, ...]]
    ) -> Range | None:
        """Return the newest stretch of versions that would do, if possible one that nothing makes slow.

        Args:
            name: The distribution.
            candidates: Its versions, ascending.
            surroundings: What else is installed with it; it has to do with each of these.
        """
        fast = self._newest(name, candidates, surroundings, may_be_slow=False)
        if fast is not None or self._is_able:
            return fast
        return self._newest(name, candidates, surroundings, may_be_slow=True)

    def _newest(
        self,
        name: str,
        candidates: list[Version],
        surroundings: list[tuple[Range, ...]],
        *,
        may_be_slow: bool,
    ) -> Range | None:
        known = self._info.known(name)
        end = None if known is None else end_of(name, known)
        lowest, below = None, None if end is None else str(end)
        for version in reversed(candidates):
            tried = Range(name, str(version))
            if self._is_lifted(tried) and all(
                self._would_do((*others, tried), may_be_slow=may_be_slow) for others in surroundings
            ):
                lowest = tried
            elif lowest is not None:
                break
            else:
                below = tried.version
        return None if lowest is None else lowest._replace(below=below)

    def _is_lifted(self, tried: Range) -> bool:
        """Return whether no obstacle stays for its versions alone, which saves asking."""
        rows = [self._rows[row_id].versions for row_id in self._obstacles if row_id in self._rows]
        return not any(
            tried.name in row and contains(row[tried.name], tried.name, tried.version) for row in rows
        )

    def _would_do(self, ranges: tuple[Range, ...], *, may_be_slow: bool) -> bool:
        host = with_versions(self._host, ranges)
        found = Judgement(prepared(self._tables, host)[self._backend], self._form, self._policy)
        return found.status == "eligible" and found.excluded is None and (may_be_slow or not found.is_slow)

    def _tied_to(self, row_id: str) -> list[str]:
        """Return the distributions another version of which may change what a row says."""
        if row_id in self._rows:
            return list(self._rows[row_id].versions)
        if row_id != versions_known_id(self._backend):
            return []
        outside = versions_outside(self._info, self._host)
        return list(outside) if len(outside) == 1 else []
