"""Version ranges with the traps of this field handled once.

Nightlies (`2.14.0a0`, `2.15.0.dev20260922`) compare by their base version; `2.8.3.post1` counts as 2.8.3;
local parts (`+cu130`) are ignored; cuDNN's fourth number is a build and is dropped; flash-attn-4 has
published only betas, so its pre-releases compare as they are.
"""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from attnroute.errors import argument_error

PRE_RELEASES_COUNT = frozenset({"flash-attn-3", "flash-attn-4"})
_CUDNN_PARTS = 3
_CUDA_LOCAL = re.compile(r"cu(\d+)(\d)")


@lru_cache(maxsize=1024)
def specifier(text: str) -> SpecifierSet:
    """Parse one comma-joined range.

    Raises:
        ValueError: The text is not a PEP 440 specifier.
    """
    try:
        return SpecifierSet(text, prereleases=True)
    except InvalidSpecifier as error:
        msg = f'a version range requires PEP 440 terms like ">=2.9, <2.14"; got "{text}".'
        raise ValueError(msg) from error


@lru_cache(maxsize=1024)
def comparable(distribution: str, version: str) -> Version:
    """Return the version as the tables compare it.

    Raises:
        ArgumentError: The version is not PEP 440.
    """
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise argument_error(
            f"the version of {distribution}", "PEP 440", f'"{version}"', 'write it like "2.14.1"'
        ) from error
    if distribution in PRE_RELEASES_COUNT:
        return Version(parsed.public)
    release = parsed.release[:_CUDNN_PARTS] if distribution == "cudnn" else parsed.release
    return Version(".".join(str(part) for part in release))


def contains(ranges: str | list[str], distribution: str, version: str) -> bool:
    """Return whether the version lies in the range, or in one of several ranges."""
    options = [ranges] if isinstance(ranges, str) else ranges
    return any(_inside(option, distribution, version) for option in options)


@lru_cache(maxsize=4096)
def _inside(option: str, distribution: str, version: str) -> bool:
    return comparable(distribution, version) in specifier(option)


def version_of(distribution: str, versions: dict[str, str]) -> str | None:
    """Look a version up; the CUDA version may be read off torch's local part (`2.11.0+cu130` is 13.0)."""
    if distribution in versions:
        return versions[distribution]
    if distribution == "cuda" and (torch := versions.get("torch")):
        match = _CUDA_LOCAL.search(torch.partition("+")[2])
        return f"{match[1]}.{match[2]}" if match else None
    return None
