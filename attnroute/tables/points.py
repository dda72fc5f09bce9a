"""The versions at which ranges begin and end: between two of them nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

from attnroute.memory import TABLES, cached
from attnroute.tables.versions import bound_of, contains, same_as, specifier

if TYPE_CHECKING:
    from packaging.specifiers import Specifier

    from attnroute.tables.folders import Tables
    from attnroute.tables.schema import Ranges


def options_of(ranges: Ranges) -> list[str]:
    """Return the ranges of which one is enough."""
    return [ranges] if isinstance(ranges, str) else ranges


def shared_points(distribution: str, *ranges: list[str]) -> tuple[Version, ...]:
    """Return versions that lie in each of several ranges: on, below and above every bound is enough."""
    return _shared(distribution, tuple(tuple(options) for options in ranges))


@cached(4096)
def _shared(distribution: str, ranges: tuple[tuple[str, ...], ...]) -> tuple[Version, ...]:
    specs = {spec for options in ranges for option in options for spec in specifier(option)}
    bounds = {bound_of(distribution, spec) for spec in specs}
    near = [point for bound in bounds for point in around(bound)]
    return tuple(p for p in near if all(contains(list(o), distribution, str(p)) for o in ranges))


@cached(512, TABLES)
def points(tables: Tables, arch: str, backend: str, distribution: str) -> tuple[Version, ...]:
    """Return the first version of each stretch of versions in which a backend's rows say the same.

    Args:
        tables: The tables.
        arch: The architecture.
        backend: The backend.
        distribution: Whose versions.

    Returns:
        Ascending, none below the first bound; only known versions, where the backend says which are known.
        Empty where no row asks.
    """
    info = tables.info(arch, backend)
    other = same_as(info.versions_known.get(distribution, ""))
    if other is not None:
        return points(tables, arch, backend, other)
    known = info.versions_known.get(distribution)
    rows = tables.rules(arch, backend) or ()
    named = [row.rule.versions[distribution] for row in rows if distribution in row.rule.versions]
    texts = [text for ranges in [*named, *([] if known is None else [known])] for text in options_of(ranges)]
    found = {point for text in texts for spec in specifier(text) for point in _starts(distribution, spec)}
    return tuple(sorted(p for p in found if known is None or contains(known, distribution, str(p))))


def _starts(distribution: str, spec: Specifier) -> list[Version]:
    """Return the versions from which on one term says something else."""
    bound = bound_of(distribution, spec)
    at, after = [bound], [around(bound)[1]]
    both = at + after
    return {">": after, "<=": after, "==": both, "===": both, "!=": both}.get(spec.operator, at)


def end_of(distribution: str, ranges: Ranges) -> Version | None:
    """Return the first version after all of the ranges, None where one of them has no end."""
    ends = [_end(distribution, option) for option in options_of(ranges)]
    return None if None in ends else max(end for end in ends if end is not None)


def _end(distribution: str, option: str) -> Version | None:
    upper = [spec for spec in specifier(option) if spec.operator in ("<", "<=", "==", "===")]
    return min((_starts(distribution, spec)[-1] for spec in upper), default=None)


def around(version: Version) -> list[Version]:
    """Return the version with its neighbours: the next one, and the last one before it."""
    if version.pre is not None:
        letter, number = version.pre
        base = version.base_version
        return [version, *(Version(f"{base}{letter}{max(0, number + step)}") for step in (1, -1))]
    if version.dev is not None:
        # What is published after a development release is, as a rule, the release itself.
        final = Version(version.base_version)
        return [version, final, around(final)[2]]
    parts = [*version.release, 0, 0][:3]
    after = [*parts[:2], parts[2] + 1]
    below = next(i for i in (2, 1, 0) if parts[i] or i == 0)
    before = [*parts[:below], max(0, parts[below] - 1), *([99] * (2 - below))]
    return [version, Version(".".join(map(str, after))), Version(".".join(map(str, before)))]
