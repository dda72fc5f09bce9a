"""The models of `arch.toml`, which describes one architecture, and of `any/stock.toml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attnroute.question.host import Arch
from attnroute.tables.schema import Backend, Evidence, Name, Preference, Row, Versions

Bytes = Annotated[int, Field(ge=48 * 1024, le=1024 * 1024, multiple_of=1024)]


class Peak(Row):
    """What one card can do at most, by its vendor's pages; the costs of kernels are fractions of it.

    Attributes:
        tflops: Of dense products of 16-bit numbers, summed in float32, in 10^12 operations a second.
        bandwidth_gbs: Of its memory, in 10^9 bytes a second.
        sms: Streaming multiprocessors.
        l2_mib: Second-level cache in MiB, absent where no page says it.
    """

    tflops: Annotated[float, Field(ge=10, le=5000)]
    bandwidth_gbs: Annotated[float, Field(ge=50, le=20000)]
    sms: Annotated[int, Field(gt=0, le=1000)]
    l2_mib: Annotated[float, Field(gt=0, le=1000)] | None = None
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class ArchTable(Row):
    """One architecture's `arch.toml`; that of an overlay needs only what it says otherwise or adds.

    Attributes:
        compute_capability: (major, minor), absent for cpu.
        shared_memory_per_block: Bytes | None = None
    cards: Example products.
        costs_from: An architecture whose measured costs are scaled to the cards of this one, where neither
            this one nor one that it inherits from was measured.
        inherits: An architecture whose backend files, rules and feature answers alike, hold here where this
            one has none, and whose preferences hold behind this one's.
        inherited_by: The shipped architectures that inherit from this one.
        backends: Backends that do not depend on the architecture and have no file of their own here.
        evidence: Where the figures come from.
        peak: What cards of this architecture can do, by name; "default" is for those without a name here.
            Nothing of it is inherited.
        prefer: Which backends come first for which calls; see `tables.preferences`.
    """

    compute_capability: tuple[int, int] | None = None
    shared_memory_per_block: Bytes | None = None
    cards: Annotated[list[str], Field(default_factory=list)]
    inherits: Arch | None = None
    inherited_by: Annotated[list[Arch], Field(default_factory=list)]
    costs_from: Arch | None = None
    backends: Annotated[list[Backend], Field(default_factory=list)]
    evidence: Annotated[list[Evidence], Field(default_factory=list)]
    peak: Annotated[dict[str, Peak], Field(default_factory=dict)]
    prefer: Annotated[list[Preference], Field(default_factory=list)]


class StockOrder(Row):
    """The order in which torch's own selector tries its backends."""

    name: Name
    versions: Annotated[Versions, Field(default_factory=dict)]
    archs: list[Arch] | None = None
    order: list[Backend]
    evidence: Annotated[list[Evidence], Field(min_length=1)]


class StockTable(Row):
    """`any/stock.toml`: what stock scaled_dot_product_attention tries, first matching row wins."""

    order: Annotated[list[StockOrder], Field(min_length=1)]
