"""Releases of packages: those that nobody tested yet, and what wheels of torch bring along (`releases.toml`).

What a wheel brings along only fills in what a question about another machine left out; no row reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from attnroute.errors import TableError
from attnroute.tables.read import read
from attnroute.tables.schema import BackendInfo, Evidence, Ranges
from attnroute.tables.versions import UNTESTED, comparable

FILE = "releases.toml"


class Release(BaseModel):
    """Some releases of torch whose default Linux wheels have the same companions.

    Attributes:
        torch: The releases.
        cuda: CUDA's version, major and minor.
        cudnn: cuDNN's version, three numbers.
        triton: Triton's version, which wheels for other versions of CUDA bring along too.
        evidence: Where that was read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    torch: Annotated[list[str], Field(min_length=1)]
    cuda: str
    cudnn: str
    triton: str
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class ReleaseTable(BaseModel):
    """The whole file.

    Attributes:
        untested: By package, the first release that nobody looked at: where `<untested` of a backend's
            `versions_known` ends.
        known: By package, the published releases before that one.
        release: What wheels of torch bring along.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    untested: dict[str, str]
    known: dict[str, list[str]]
    release: Annotated[list[Release], Field(min_length=1)]


class Companions(NamedTuple):
    """A torch release and what its default wheel brings along."""

    torch: str
    cuda: str
    cudnn: str
    triton: str


def with_tested_versions(info: BackendInfo, folder: Path) -> BackendInfo:
    """Return a backend whose known versions end where `releases.toml` says that they are untested.

    Args:
        info: The backend, as its table declares it.
        folder: The folder of the shipped tables.

    Raises:
        TableError: The file says nothing about a package whose versions it should end.
    """
    open_ended = [name for name, ranges in info.versions_known.items() if UNTESTED in str(ranges)]
    if not open_ended:
        return info
    ends = read(folder / FILE, ReleaseTable).untested
    for name in open_ended:
        if name not in ends:
            msg = (
                f"{FILE}: untested requires the first release of {name} that nobody tested; got none; add it."
            )
            raise TableError(msg)

    def ended(ranges: Ranges, end: str) -> Ranges:
        if isinstance(ranges, str):
            return ranges.replace(UNTESTED, f"<{end}")
        return [text.replace(UNTESTED, f"<{end}") for text in ranges]

    known = {name: ended(ranges, ends.get(name, "")) for name, ranges in info.versions_known.items()}
    return info.model_copy(update={"versions_known": known})


def published(folder: Path) -> dict[str, list[str]]:
    """Return the releases of each distribution that rows and evidence may name, ascending.

    Args:
        folder: The folder of the shipped tables.

    Raises:
        TableError: The file is missing or malformed.
    """
    table: ReleaseTable = read(folder / FILE, ReleaseTable)
    return table.known


def known(folder: Path) -> tuple[Companions, ...]:
    """Return every known release of torch, oldest first.

    Args:
        folder: The folder of the shipped tables.

    Raises:
        TableError: The file is missing or malformed.
    """
    table = read(folder / FILE, ReleaseTable)
    found = [Companions(t, row.cuda, row.cudnn, row.triton) for row in table.release for t in row.torch]
    return tuple(sorted(found, key=lambda c: comparable("torch", c.torch)))


def companions_of(torch: str, folder: Path) -> Companions | None:
    """Return what the default wheel of a torch version brings along, None where none is listed."""
    wanted = comparable("torch", torch)
    return next((c for c in known(folder) if comparable("torch", c.torch) == wanted), None)
