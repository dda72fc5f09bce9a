"""The distributions that backends need: how each is found, and what is imported of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from pydantic import BaseModel, Field, StringConstraints

from attnroute.errors import TableError
from attnroute.tables.alternatives import alternatives, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnroute.tables.folders import Tables

Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
_ANY: Final = "any"
MEASURED: Final = frozenset({"torch", "cuda", "cudnn", "c++", "avx2"})
"""What backends may need that is no distribution to look for: a host has its version from elsewhere."""
_INTEGRATED: Final = ("transformers",)
"""Distributions that `attnroute.integrations` rests on: a host has their versions too."""


class Part(BaseModel, frozen=True, extra="forbid"):
    """A module without which a distribution is of no use, e.g. its compiled kernels.

    Attributes:
        modules: Its dotted names in the layouts that releases have, any of which will do.
        absent: What is wrong where an import would not find it, or would find another one, as a clause.
        text: Words in its source that modules of the same name from elsewhere do not have.
    """

    modules: Annotated[list[Module], Field(min_length=1)]
    absent: str
    text: str = ""


class Provider(BaseModel, frozen=True, extra="forbid"):
    """`[provider.<distribution>]`: how a distribution that backends need is found and imported.

    One that no table describes is taken at the word of its metadata, and never imported.

    Attributes:
        module: What is imported when a backend that needs it is first selected, to see that it works.
        operator: An operator of torch that the module registers, where a second library with the same one
            would end the process: if it is registered already, nothing is imported.
        environment: Variables that it reads while it is imported, set unless the user set them.
        parts: Modules that must be there. They are looked for without being imported.
        within: A distribution whose builds from source hold these parts without metadata of their own.
    """

    module: Module | None = None
    operator: str | None = None
    environment: Annotated[dict[str, str], Field(default_factory=dict)]
    parts: Annotated[list[Part], Field(default_factory=list)]
    within: str | None = None


UNDESCRIBED: Final = Provider(environment={}, parts=[])
"""What holds for a distribution that no table describes."""


class Library(NamedTuple):
    """What is imported of a distribution; the fields are those of `Provider`.

    Attributes:
        provider: The name of the distribution.
        module: The module whose import loads everything.
        operator: An operator of torch that shows that the module is loaded.
        environment: Variables that it reads while it is imported.
    """

    provider: str
    module: str
    operator: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Providers:
    """Every distribution to look for, by name; two objects are equal only if they are one."""

    by_name: dict[str, Provider]


def providers_of(tables: Tables) -> Providers:
    """Collect what the tables need and describe.

    Raises:
        TableError: Two backends describe one distribution, and not alike.
    """
    found: dict[str, Provider] = {}
    for backend in tables.backends:
        for name, provider in _described(tables, backend):
            if found.setdefault(name, provider) != provider:
                sentence = f"provider.{name} requires what another file says of it; keep one of the two"
                raise TableError(f"{_ANY}/{backend}.toml: {sentence}.")
    infos = (tables.info(arch, backend) for arch in (_ANY, *tables.arch_names) for backend in tables.backends)
    names = (*names_in(need for info in infos for need in info.needs), *_INTEGRATED)
    return Providers({**{name: UNDESCRIBED for name in names if name not in MEASURED}, **found})


def _described(tables: Tables, backend: str) -> Iterator[tuple[str, Provider]]:
    """Give the sections of one backend; of two folders the later one says how a distribution is found."""
    sections: dict[str, Provider] = {}
    for table in tables.files(_ANY, backend):
        sections.update(table.provider)
    yield from sections.items()


def libraries_of(tables: Tables, arch: str, backend: str) -> tuple[tuple[Library, ...], ...]:
    """Return what a backend imports on an architecture: of each tuple one library is enough."""
    needs = tables.info(arch, backend).needs
    found = (tuple(_libraries(tables.providers, alternatives(need))) for need in needs)
    return tuple(libraries for libraries in found if libraries)


def _libraries(providers: Providers, names: tuple[str, ...]) -> Iterator[Library]:
    for name in names:
        provider = providers.by_name.get(name, UNDESCRIBED)
        if provider.module is not None:
            yield Library(name, provider.module, provider.operator, tuple(provider.environment.items()))
