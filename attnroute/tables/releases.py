"""Which CUDA, cuDNN and Triton a default wheel of torch brings along: `capability_tables/releases.toml`.

Rows about backends never read this: it only fills in what a question about another machine left out.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from attnroute.tables.load import shipped_folder
from attnroute.tables.read import read
from attnroute.tables.schema import Evidence
from attnroute.tables.versions import comparable

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
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: Annotated[list[Release], Field(min_length=1)]


class Companions(NamedTuple):
    """A torch release and what its default wheel brings along."""

    torch: str
    cuda: str
    cudnn: str
    triton: str


def known() -> tuple[Companions, ...]:
    """Return every known release, oldest first.

    Raises:
        TableError: The file is missing or malformed.
    """
    table = read(shipped_folder() / FILE, ReleaseTable)
    found = [Companions(t, row.cuda, row.cudnn, row.triton) for row in table.release for t in row.torch]
    return tuple(sorted(found, key=lambda c: comparable("torch", c.torch)))


def companions_of(torch: str) -> Companions | None:
    """Return what the default wheel of a torch version brings along, None where none is listed."""
    wanted = comparable("torch", torch)
    return next((c for c in known() if comparable("torch", c.torch) == wanted), None)
