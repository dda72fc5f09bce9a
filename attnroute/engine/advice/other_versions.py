"""Which other versions would lift what keeps a backend away, read off the ranges of its own rows.

Between two bounds of these ranges nothing changes, so one version of each stretch stands for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.engine.decision import Decision, Verdict
from attnroute.engine.evaluate import versions_known_id, versions_outside
from attnroute.question.host import Host
from attnroute.question.normalize import normalize
from attnroute.tables.alternatives import alternatives
from attnroute.tables.points import end_of, points
from attnroute.tables.versions import comparable, contains, version_of

if TYPE_CHECKING:
    from attnroute.engine.finding import Finding
    from attnroute.tables.load import Tables

Judge = Callable[..., Verdict]
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


def installs(decision: Decision, tables: Tables, judge: Judge) -> Iterator[tuple[Verdict, tuple[Range, ...]]]:
    """Give what would have to be installed for each backend that lacks nothing else.

    Args:
        decision: What was decided.
        tables: The tables that decided it.
        judge: How one backend is judged.

    Yields:
        The backend's verdict, and the versions that would do, of everything that it lacks.
    """
    for verdict in decision.verdicts:
        if verdict.status != "unavailable" or verdict.excluded is not None:
            continue
        for names in product(*(alternatives(need) for need in verdict.missing)):
            if not _BUILT_IN & set(names) and not decision.host.broken.keys() & set(names):
                ranges = _together(names, _Asked(decision, tables, judge, verdict))
                if ranges is not None:
                    yield verdict, ranges


def upgrades(decision: Decision, tables: Tables, judge: Judge) -> Iterator[tuple[Verdict, Range]]:
    """Give newer versions of one distribution that would lift all that blocks a backend, or makes it slow.

    Args:
        decision: What was decided.
        tables: The tables that decided it.
        judge: How one backend is judged.

    Yields:
        The backend's verdict, and the versions that would do.
    """
    for verdict in decision.verdicts:
        wanted = verdict.excluded is None or verdict.excluded.reason == "unknown"
        if wanted and not verdict.missing and verdict.backend != decision.selected:
            asked = _Asked(decision, tables, judge, verdict)
            for name in asked.tied():
                found = asked.stretch(name, asked.newer(name), [()])
                if found is not None:
                    yield verdict, found


def _together(names: tuple[str, ...], asked: _Asked) -> tuple[Range, ...] | None:
    """Return versions of several distributions that would do together.

    Each range is found with the newest of the others, which is what an installer takes, and with the lowest
    of those that were found before.
    """
    candidates = {name: asked.known(name) for name in names}
    if not all(candidates.values()):
        return None
    newest = {name: Range(name, str(versions[-1])) for name, versions in candidates.items()}
    found: dict[str, Range] = {}
    for name, versions in candidates.items():
        surroundings = [
            tuple(given[other] for other in names if other != name) for given in (newest, {**newest, **found})
        ]
        stretch = asked.stretch(name, versions, surroundings[: 1 + bool(found)])
        if stretch is None:
            return None
        found[name] = stretch
    return tuple(found.values())


class _Asked:
    """One backend, to be judged under other versions."""

    def __init__(self, decision: Decision, tables: Tables, judge: Judge, verdict: Verdict) -> None:
        self._call = normalize(decision.call)
        self._host, self._policy = decision.host, decision.policy
        self._tables, self._judge, self._backend = tables, judge, verdict.backend
        self._info = tables.info(self._host.arch, self._backend)
        self._rows = {row.id: row.rule for row in tables.rules(self._host.arch, self._backend) or ()}
        self._is_able = verdict.status == "eligible"
        self._obstacles = verdict.blocking or _slow(verdict)

    def tied(self) -> list[str]:
        """Return the distributions whose versions every obstacle is about."""
        said = [self._tied_to(finding) for finding in self._obstacles]
        return [name for name in said[0] if all(name in names for names in said)] if said else []

    def newer(self, name: str) -> list[Version]:
        """Return the versions of a distribution at which something changes, above the one that is there."""
        present = version_of(name, self._host.versions)
        return [p for p in self.known(name) if present is None or p > comparable(name, present)]

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
        known = self._info.versions_known.get(name)
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
        rows = [self._rows[found.rule].versions for found in self._obstacles if found.rule in self._rows]
        return not any(
            tried.name in row and contains(row[tried.name], tried.name, tried.version) for row in rows
        )

    def _would_do(self, ranges: tuple[Range, ...], *, may_be_slow: bool) -> bool:
        host = with_versions(self._host, ranges)
        found = self._judge(self._call, host, self._tables, self._backend, self._policy)
        return found.status == "eligible" and found.excluded is None and (may_be_slow or not _slow(found))

    def _tied_to(self, finding: Finding) -> list[str]:
        """Return the distributions another version of which may change what a finding says."""
        if finding.rule in self._rows:
            return list(self._rows[finding.rule].versions)
        if finding.rule != versions_known_id(self._backend):
            return []
        outside = versions_outside(self._info, self._host)
        return list(outside) if len(outside) == 1 else []


def _slow(verdict: Verdict) -> tuple[Finding, ...]:
    """Return the findings for which a backend that may run is put behind the others."""
    return tuple(f for f in verdict.findings if f.kind == "slow" and f.outcome == "fail")
