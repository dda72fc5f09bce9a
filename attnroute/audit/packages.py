"""Published releases of packages and their wheels, through pip and whatever index it is set to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from attnroute.errors import PackageError, shortened
from attnroute.tables.versions import contains

_SECONDS: Final = 600
_LISTED: Final = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_NOT_THERE: Final = "No matching distribution found"
_NO_NETWORK: Final = re.compile(r"Retrying|connection|Could not fetch|Temporary failure|SSL", re.IGNORECASE)


def published(name: str) -> tuple[str, ...]:
    """Return the versions of a distribution that the index has for this Python, newest first.

    Args:
        name: The distribution.

    Returns:
        Its versions with betas and nightlies, without local parts; none where the index does not have it.

    Raises:
        PackageError: pip cannot say.
    """
    done = _pip("index", "versions", "--pre", name)
    found = _LISTED.search(done.stdout)
    if found is not None:
        public = {str(_version(text)) for text in found[1].split(", ")}
        return tuple(sorted(public, key=Version, reverse=True))
    if _NOT_THERE in done.stderr and not _NO_NETWORK.search(done.stderr):
        return ()
    raise _error(f"`pip index versions {name}`", "an index that answers", done)


def released(name: str, ranges: str | list[str]) -> list[str]:
    """Return the published versions of a distribution inside a range, or one of several, newest first.

    Raises:
        PackageError: There are none, or pip cannot say.
    """
    inside = [version for version in published(name) if contains(ranges, name, version)]
    if not inside:
        raise PackageError(
            f"an audit requires a release of {name} in {ranges}; pip finds none; pass --version."
        )
    return inside


def _version(text: str) -> Version:
    try:
        return Version(Version(text.strip()).public)
    except InvalidVersion as error:
        msg = f"pip requires versions as PEP 440 has them; got {shortened(text)}; update pip."
        raise PackageError(msg) from error


def wheel(name: str, version: str) -> Path:
    """Return a wheel of a release, from the user's cache or fetched into it, without what it depends on.

    Raises:
        PackageError: There is none for this Python, or pip cannot fetch it.
    """
    folder = cache() / "wheels"
    pattern = f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"
    there = next(iter(sorted(folder.glob(pattern))), None)
    if there is not None:
        return there
    with tempfile.TemporaryDirectory(dir=_made(folder)) as fresh:
        wanted = ("--no-deps", "--only-binary", ":all:", "--dest", fresh, f"{name}=={version}")
        done = _pip("download", "--quiet", *wanted)
        got = next(Path(fresh).glob("*.whl"), None)
        if done.returncode or got is None:
            raise _error(
                f"`pip download {name}=={version}`", "a wheel that this index has for this Python", done
            )
        return got.replace(folder / got.name)


def sources_of(archive: Path, folder: Path) -> Path:
    """Unpack the Python and the headers of a wheel, nothing that is compiled, and return the folder.

    Raises:
        PackageError: It is no wheel.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder, [name for name in opened.namelist() if name.endswith((".py", ".h"))])
    except (OSError, zipfile.BadZipFile) as error:
        msg = f"{archive.name} requires to be a whole wheel; got {error}; remove {archive} and try again."
        raise PackageError(msg) from error
    return folder


def requirements(archive: Path) -> dict[str, Requirement]:
    """Return what a wheel says that it needs, by distribution; extras are left out."""
    with zipfile.ZipFile(archive) as opened:
        name = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_string(opened.read(name).decode("utf-8")).get_all("Requires-Dist", [])
    needs = [Requirement(line) for line in lines]
    return {need.name: need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}


def metadata(name: str, version: str) -> list[Requirement]:
    """Return what a release says that it needs, extras left out, without fetching its wheel where pip can.

    Raises:
        PackageError: pip cannot say.
    """
    what = f"{name}=={version}"
    done = _pip("install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", what)
    if done.returncode:
        raise _error(f"`pip install --dry-run {what}`", "a release that this index has for this Python", done)
    lines = json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", [])
    needs = [Requirement(line) for line in lines]
    on_linux = {"extra": "", "platform_system": "Linux", "platform_machine": "x86_64"}
    return [need for need in needs if need.marker is None or need.marker.evaluate(on_linux)]


def cache() -> Path:
    """Return the folder of what was fetched, which may be removed at any time."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("attnroute", appauthor=False))


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        required = "a folder that can be written for wheels"
        msg = f"pip requires {required}; got {folder} ({error.strerror}); set XDG_CACHE_HOME."
        raise PackageError(msg) from error
    return folder


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the pip of this Python with the user's own settings."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    try:
        return subprocess.run(  # noqa: S603 - this Python, with names from the tables
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired as error:
        asked = " ".join(words)
        msg = f"pip {asked} requires an answer within {_SECONDS} seconds; got none; look at the network."
        raise PackageError(msg) from error


def _error(what: str, required: str, done: subprocess.CompletedProcess[str]) -> PackageError:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    said = (errors or lines or ["no word"])[-1]
    return PackageError(
        f"{what} requires {required}; got: {shortened(said, 300)}; run it by hand to see all of it."
    )
