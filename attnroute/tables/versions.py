"""Version ranges with the traps of this field handled once.

Nightlies (`2.14.0a0`, `2.15.0.dev20260922`) compare by their base version; `2.8.3.post1` counts as 2.8.3;
local parts (`+cu130`) are ignored; cuDNN's fourth number is a build and is dropped.

Where that is too coarse, a term says so by its own version: against a pre-, development or post-release
(`>4.6.0.dev0`, and every term about flash-attn-4, which has published only betas), or with `===`, versions
compare exactly as published, only local parts aside.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from attnroute.errors import ECHO, argument_error, quoted
from attnroute.memory import cached

UNTESTED: Final = "<untested"
"""The end of a backend's known versions; `releases.toml` names the release of each package."""
_SAME: Final = re.compile(r"==([a-z][a-z-]*[a-z0-9])")
_CUDNN_PARTS = 3
_CUDA_LOCAL = re.compile(r"cu(\d+)(\d)")
_ORDER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
"""The plain order of versions, in which `4.6.0.post1 > 4.6.0.dev0`; PEP 440 has exceptions there."""


@cached(1024)
def specifier(text: str) -> SpecifierSet:
    """Parse one comma-joined range.

    Raises:
        ValueError: The text is not a PEP 440 specifier.
    """
    try:
        found = SpecifierSet(text, prereleases=True)
        for term in found:
            _parsed(term.version.removesuffix(".*"))
    except ValueError as error:
        msg = f'a version range requires PEP 440 terms like ">=2.9, <2.14"; got {quoted(text)}.'
        raise ValueError(msg) from error
    return found


@cached(1024)
def comparable(distribution: str, version: str) -> Version:
    """Return the version as the tables compare it.

    Raises:
        ArgumentError: The version is not PEP 440.
    """
    try:
        parsed = _parsed(version)
    except ValueError as error:
        raise argument_error(
            f"the version of {distribution}", "PEP 440", quoted(version), 'write it like "2.14.1"'
        ) from error
    release = parsed.release[:_CUDNN_PARTS] if distribution == "cudnn" else parsed.release
    return Version(".".join(str(part) for part in release))


def _parsed(text: str) -> Version:
    """Read a version; nothing is released under one that is longer than a message shows."""
    if len(text) > ECHO:
        raise InvalidVersion(text)
    return Version(text)


def is_exact(term: Specifier) -> bool:
    """Return whether a term of a range is about versions as published, nightlies and post-releases too."""
    if term.operator == "===":
        return True
    if term.version.endswith(".*"):
        return False
    bound = Version(term.version)
    return bound.is_prerelease or bound.is_postrelease


def bound_of(distribution: str, term: Specifier) -> Version:
    """Return the version that a term names, as it compares with others."""
    version = term.version.removesuffix(".*")
    compared = comparable(distribution, version)
    return _published(version) if is_exact(term) else compared


def is_newer(distribution: str, bound: Version, present: str) -> bool:
    """Return whether a bound of a range lies above the version that is there."""
    exact = bound.is_prerelease or bound.is_postrelease
    return bound > (_published(present) if exact else comparable(distribution, present))


def contains(ranges: str | list[str], distribution: str, version: str) -> bool:
    """Return whether the version lies in the range, or in one of several ranges."""
    options = [ranges] if isinstance(ranges, str) else ranges
    return any(_inside(option, distribution, version) for option in options)


@cached(4096)
def _inside(option: str, distribution: str, version: str) -> bool:
    compared, published = comparable(distribution, version), _published(version)
    return all(
        _ORDER[term.operator](published, bound_of(distribution, term))
        if is_exact(term) and term.operator in _ORDER
        else term.contains(compared, prereleases=True)
        for term in specifier(option)
    )


def _published(version: str) -> Version:
    return Version(Version(version).public)


def same_as(ranges: str | list[str]) -> str | None:
    """Return the distribution of whose version another must be, for `==transformer-engine`; else None."""
    match = _SAME.fullmatch(ranges) if isinstance(ranges, str) else None
    return match[1] if match else None


def are_one(version: str, other: str) -> bool:
    """Return whether two distributions are of one version, local parts aside."""
    return _published(version) == _published(other)


def version_of(distribution: str, versions: dict[str, str]) -> str | None:
    """Look a version up; the CUDA version may be read off torch's local part (`2.11.0+cu130` is 13.0)."""
    if distribution in versions:
        return versions[distribution]
    if distribution == "cuda" and (torch := versions.get("torch")):
        match = _CUDA_LOCAL.search(torch.partition("+")[2])
        return f"{match[1]}.{match[2]}" if match else None
    return None
