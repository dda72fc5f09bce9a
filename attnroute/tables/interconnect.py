"""The model of `any/interconnect.toml`: what connects GPUs, for predicted times of communication."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from attnroute.question.host import Arch
from attnroute.tables.schema import Evidence, Name, Row

Gbs = Annotated[float, Field(gt=0, le=10000)]
Microseconds = Annotated[float, Field(ge=0, le=1000)]


class Link(Row):
    """One kind of connection.

    Attributes:
        title: The name people know it by.
        peak_gbs: What its vendor states, in 10^9 bytes a second in each direction for one GPU.
        gbs: What large messages reach of that.
        step_us: What each step from one GPU to another adds, in microseconds.
        gpus: How many GPUs it joins; absent where it joins any number, as a network does.
    """

    title: str
    peak_gbs: Gbs
    gbs: Gbs
    step_us: Microseconds
    gpus: Annotated[int, Field(ge=2, le=1024)] | None = None
    evidence: Annotated[list[Evidence], Field(min_length=1)]

    @model_validator(mode="after")
    def _reaches_no_more(self) -> Self:
        if self.gbs > self.peak_gbs:
            raise ValueError(f"requires gbs of at most peak_gbs = {self.peak_gbs}; got {self.gbs}.")
        return self


class Start(Row):
    """What each collective takes before its first step."""

    us: Microseconds
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class InterconnectTable(Row):
    """`any/interconnect.toml`.

    Attributes:
        start: What each collective takes before its first step.
        between: The link between machines.
        link: Every kind of connection.
        card: By architecture and name of a card, as in `peak` of `arch.toml`, the link between cards of one
            machine.
    """

    start: Start
    between: Name
    link: dict[Name, Link]
    card: dict[Arch, dict[str, Name]]

    @model_validator(mode="after")
    def _known_links(self) -> Self:
        named = [self.between, *(name for cards in self.card.values() for name in cards.values())]
        strange = [name for name in named if name not in self.link]
        if strange:
            raise ValueError(f"requires links among {', '.join(self.link)}; got {strange[0]}.")
        if self.link[self.between].gpus is not None:
            raise ValueError(f"between requires a link without gpus; got {self.between}.")
        return self
