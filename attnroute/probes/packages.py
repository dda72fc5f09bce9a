"""Versions of installed distributions from their metadata, and what is wrong with them. Nothing is imported.

Metadata can lie: flash-attn and flash-attn-4 write into one folder, builds leave their kernels out, another
copy comes first on the path. So the tables name the modules without which a provider is of no use, and these
are looked for where an import would find them.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from attnroute.foreign import is_of_the_user, locate, summarize_error
from attnroute.memory import INSTALLED, Memory, cached

if TYPE_CHECKING:
    from attnroute.tables.providers import Part, Provider, Providers


class Survey(NamedTuple):
    """What is installed.

    Attributes:
        versions: Distribution to version, of those that nothing is known to be wrong with.
        broken: Distribution to what is wrong with it, in one clause.
    """

    versions: dict[str, str]
    broken: dict[str, str]


class Found(NamedTuple):
    """One provider: its version, None where it is not installed, and what is wrong with it."""

    version: str | None = None
    problem: str = ""


_MARKED: Memory[str, str] = Memory(256, f"{__name__}._MARKED", INSTALLED)
"""What was found to be wrong with a provider later, by importing it."""


def mark(provider: str, problem: str) -> None:
    """Remember for this process that a provider cannot be used, whatever its files look like."""
    _MARKED.put(provider, problem)


def broken(providers: Providers) -> dict[str, str]:
    """Return distribution name to what is wrong with it, for every provider that cannot be used."""
    return {**survey(providers).broken, **_MARKED.items()}


def installed(providers: Providers) -> dict[str, str]:
    """Return distribution name to version for every provider that can be used, as far as files tell."""
    return survey(providers).versions


@cached(8, INSTALLED)
def survey(providers: Providers) -> Survey:
    """Look at every provider once.

    Args:
        providers: What the tables say of distributions.
    """
    found: dict[str, Found] = {}
    # A build from source that holds another distribution is looked at before that one.
    for name, provider in sorted(providers.by_name.items(), key=lambda item: item[1].within is not None):
        try:
            found[name] = _looked_at(name, provider, found)
        except BaseException as error:
            # Metadata in another encoding, a finder of another package that fails: one must not break all.
            if is_of_the_user(error):
                raise
            problem = f"its metadata and files cannot be read ({summarize_error(error)}); install it again"
            found[name] = Found(problem=problem)
    versions = {n: f.version for n, f in found.items() if f.version is not None and not f.problem}
    return Survey(versions, {name: f.problem for name, f in found.items() if f.problem})


def _looked_at(name: str, provider: Provider, before: dict[str, Found]) -> Found:
    lost = next((part.absent for part in provider.parts if not _is_there(part)), "")
    try:
        version = _version_in(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        is_whole = bool(provider.parts) and not lost
        return _without_metadata(provider, before) if is_whole else Found()
    if version is None or not _is_version(version):
        named = "none" if version is None else f'"{version}"'
        return Found(
            problem=f"its metadata must name a version as PEP 440 has them; got {named}; install it again"
        )
    return Found(version, f"{version} is installed, but {lost}" if lost else "")


def _without_metadata(provider: Provider, before: dict[str, Found]) -> Found:
    """Say what modules without a distribution are: part of another one, or a build that nobody can name."""
    if provider.within is not None:
        return before.get(provider.within, Found())
    module = provider.parts[0].modules[0]
    return Found(
        problem=f"{module} can be imported, but no metadata says which release it is; install it with pip"
    )


def _version_in(distribution: metadata.Distribution) -> str | None:
    """Return what the metadata says, None where it says nothing, as after an interrupted uninstall."""
    try:
        fields = distribution.metadata
    except FileNotFoundError:
        return None
    return fields["Version"] if fields is not None and "Version" in fields else None


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except ValueError:
        # InvalidVersion, or more digits than Python reads.
        return False
    return True


def _is_there(part: Part) -> bool:
    specs = [spec for module in part.modules if (spec := locate(module)) is not None]
    return any(not part.text or _says(spec.origin, part.text.encode()) for spec in specs)


def _says(origin: str | None, text: bytes) -> bool:
    """Return whether a source file holds a text; one that cannot be read is not held against anybody."""
    try:
        return text in Path(origin or "").read_bytes()
    except OSError:
        return True
