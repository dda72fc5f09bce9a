"""The model of `any/te_choice.toml`: how TransformerEngine's own module picks a kernel."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from attnroute.question.host import Arch
from attnroute.tables import conditions
from attnroute.tables.conditions import Compiled, compiled
from attnroute.tables.schema import AnyOf, Backend, Box, Evidence, Name, Row, Versions, boxes_of
from attnroute.vocabulary import Phase


class Path(Row):
    """One of the kernels that the module can run.

    Attributes:
        name: Unique.
        title: The name that the module gives it.
        runs: Our backends that run the same kernels.
        needs: Every distribution that must be there beside TransformerEngine.
        archs: Where it runs; absent where it runs on every CUDA device.
    """

    name: Name
    title: str
    runs: list[Backend]
    needs: Annotated[list[str], Field(default_factory=list)]
    archs: list[Arch] | None = None


class PathOrder(Row):
    """The order of paths on some architectures; of those without `archs` the last holds everywhere else."""

    name: Name
    archs: list[Arch] | None = None
    order: list[Name]


class Switch(Row):
    """An environment variable that keeps paths out when it is 0."""

    name: Annotated[str, Field(pattern=r"^NVTE_[A-Z0-9_]+$")]
    paths: list[Name]


class Filter(Row):
    """One necessary condition of some paths: where everything else holds, `requires` must.

    Attributes:
        name: Unique.
        paths: Which paths it is about.
        archs: Where it holds; absent where everywhere.
        beside: Holds only where this path is installed and not switched off.
        because: Why, as a clause for people.
    """

    name: Name
    paths: Annotated[list[Name], Field(min_length=1)]
    archs: list[Arch] | None = None
    versions: Annotated[Versions, Field(default_factory=dict)]
    phase: Phase | None = None
    beside: Name | None = None
    when: Annotated[Box, Field(default_factory=dict)]
    requires: Box | AnyOf | Literal["never"]
    because: str

    @model_validator(mode="after")
    def _known_fields(self) -> Self:
        for box in (self.when, *boxes_of(self.requires)):
            for field, spec in box.items():
                conditions.check(field, spec)
        return self

    @cached_property
    def guard(self) -> Compiled:
        """`when`, compiled."""
        return compiled([self.when])

    @cached_property
    def requirement(self) -> Compiled:
        """`requires`, compiled; "never" holds for no call."""
        return compiled(boxes_of(self.requires))


class TeChoiceTable(Row):
    """`any/te_choice.toml`.

    Attributes:
        version: The release of TransformerEngine whose order and filters these are.
        evidence: Where they come from, all of them.
        path: What it can run.
        order: Which of them comes first; the first row that holds counts.
        switch: What keeps paths out, the variables of several paths first.
        filter: What they take.
    """

    version: str
    evidence: Annotated[list[Evidence], Field(min_length=1)]
    path: Annotated[list[Path], Field(min_length=1)]
    order: Annotated[list[PathOrder], Field(min_length=1)]
    switch: list[Switch]
    filter: list[Filter]

    @model_validator(mode="after")
    def _known_paths(self) -> Self:
        known = {path.name for path in self.path}
        named = [
            name
            for paths in (*(s.paths for s in self.switch), *(f.paths for f in self.filter))
            for name in paths
        ]
        named += [row.beside for row in self.filter if row.beside is not None]
        strange = sorted(set(named) - known)
        if strange:
            raise ValueError(f"requires paths among {', '.join(sorted(known))}; got {strange[0]}.")
        for order in self.order:
            if set(order.order) != known:
                raise ValueError(f"order {order.name} requires every path once.")
        if self.order[-1].archs is not None:
            raise ValueError("the last order requires no archs, so that one always applies.")
        return self
