"""Published releases beside those that the tables know: which ones nobody looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.audit import packages
from attnroute.tables.points import options_of
from attnroute.tables.read import read
from attnroute.tables.releases import FILE, ReleaseTable
from attnroute.tables.versions import comparable, contains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.tables.folders import Tables

DISTRIBUTIONS: Final = {"cudnn": ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")}
"""The distributions of what has another name in the tables; CUDA itself comes with none."""
_WITHOUT: Final = ("cuda",)


class State(NamedTuple):
    """What is published of one package.

    Attributes:
        package: Its name in the tables.
        published: How many of its releases the tables could know; 0 where the index has none.
        newest: The newest of them, "" where there is none.
        inside: Releases inside the window of the tables that nobody looked at, ascending.
        beyond: Releases beyond that window, where backends are unknown, ascending.
    """

    package: str
    published: int
    newest: str
    inside: tuple[str, ...]
    beyond: tuple[str, ...]

    @property
    def is_stale(self) -> bool:
        """Whether somebody should look at a release."""
        return bool(self.inside or self.beyond)


def states(tables: Tables) -> Iterator[State]:
    """Give what is published of each package that `releases.toml` knows releases of.

    Raises:
        PackageError: pip cannot say.
    """
    table = read(tables.folders[0] / FILE, ReleaseTable)
    for package, known in table.known.items():
        if package not in _WITHOUT:
            names = DISTRIBUTIONS.get(package, (package,))
            found = {version for name in names for version in packages.published(name)}
            windows = [
                option
                for info in tables.backends.values()
                for option in options_of(info.versions_known.get(package, []))
            ]
            yield state(package, found, known, table.untested[package], windows)


def state(
    package: str, published: set[str], known: list[str], untested: str, windows: list[str] | None = None
) -> State:
    """Compare what is published of a package with what is known.

    Pre-releases count only of a package of which nothing else is known; what belongs to one release alone,
    a post-release or a build number, is that release.

    Args:
        package: Its name in the tables.
        published: Versions of its distributions.
        known: Releases that somebody looked at.
        untested: Where the windows of the tables end.
        windows: Those of backends; without one, everything from the oldest known release on is inside.
    """
    betas = all(Version(version).is_prerelease for version in known)

    def key(version: str) -> Version:
        return Version(version) if betas else comparable(package, version)

    looked_at = {key(version) for version in known}
    counted = {key(v) for v in published if betas or not Version(v).is_prerelease}
    counted = {version for version in counted if version >= min(looked_at)}
    new = sorted(counted - looked_at)
    before = [str(version) for version in new if version < key(untested)]
    inside = tuple(text for text in before if not windows or contains(windows, package, text))
    beyond = tuple(str(version) for version in new if version >= key(untested))
    return State(package, len(counted), str(max(counted)) if counted else "", inside, beyond)
