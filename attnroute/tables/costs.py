"""What kernels were measured to take: the numbers of `costs/<backend>.toml`, from which times are predicted.

`benchmarks/fit_costs.py` writes the files from measurements; `attnroute.engine.costs` says what each number
means for the time of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from attnroute.memory import TABLES, cached
from attnroute.tables.archs import Peak
from attnroute.tables.read import read
from attnroute.tables.schema import Evidence
from attnroute.vocabulary import Phase, Repair

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

FOLDER = "costs"
"""In the folder of an architecture: a file for each backend that was measured there."""

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
HeadDim = Literal["d32", "d64", "d96", "d128", "d192", "d256", "d320", "d512", "d576"]
Trait = Literal[
    "alibi",
    "bias_grad",
    "causal",
    "composed_backward",
    "dense_bias",
    "dense_mask",
    "documents",
    "dtensor",
    "few_queries",
    "function",
    "key_padding",
    "prefix",
    "ring",
    "rows_few",
    "sink",
    "softcap",
    "training",
    "unequal_head_dims",
    "varlen",
    "window",
]
"""What a call has that makes a kernel faster or slower than its work says."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Kernel(_Part):
    """One direction of a backend's kernel on the measured card, for many queries or for few.

    Attributes:
        launch_us: What a call takes that has no work, in microseconds.
        block_us: Begin and end of one block of 128 queries of head_dim 128, in microseconds.
        tflops: Rate of the matrix products by the larger head_dim, rounded up, in 10^12 operations a second.
        wave: How much of a block's time is added for blocks that end after the others.
        packing: 1 where the query heads of one key head share blocks, 0 where each has its own.
        split_keys: Keys from which on several blocks share the keys of one query block.
        gbs: Rate at which query, key, value and output are read and written, in 10^9 bytes a second.
        idle: How much of that rate is lost where blocks are fewer than multiprocessors.
        mask_gbs: The same rate for mask and bias tensors.
        repair_gbs: The same for what each repair allocates; one that is not named takes nothing.
        repair_us: What each repair takes besides, in microseconds.
        ragged_us: What a ragged batch adds to `launch_us`.
        factor: How many times longer the work takes for calls with a trait.
    """

    launch_us: Positive
    block_us: NotNegative
    tflops: dict[HeadDim, Positive]
    wave: NotNegative
    packing: Annotated[float, Field(ge=0, le=1)]
    split_keys: Positive
    gbs: Positive
    idle: NotNegative
    mask_gbs: Positive
    repair_gbs: dict[Repair, Positive]
    repair_us: NotNegative
    ragged_us: NotNegative
    factor: dict[Trait, Positive]


class HostTimes(_Part):
    """What the host takes for an eager call, in microseconds.

    Attributes:
        call_us: A call as it is.
        plan_ms: What the first call of each shape takes besides, in milliseconds, of a backend that plans it.
        step_us: What each step adds, of a backend that computes the scores in parts (`engine.work.steps_of`).
        adding_us: What repairs and traits add.
    """

    call_us: Positive
    plan_ms: NotNegative = 0.0
    step_us: NotNegative = 0.0
    adding_us: dict[Repair | Trait, NotNegative] = {}


class Measured(_Part):
    """Where the numbers come from.

    Attributes:
        card: The card that was measured; rates are fractions of what it can do at most.
        date: The day.
        versions: Of torch, cuDNN and packages.
        calls: How many calls were fitted.
        error: Median of the relative error on calls that no fit saw.
    """

    card: str
    date: str
    versions: dict[str, str]
    calls: Annotated[int, Field(ge=1)]
    error: NotNegative


class CostTable(_Part):
    """`costs/<backend>.toml`.

    Attributes:
        measured: Where the numbers come from.
        evidence: The results that they were fitted to.
        peak: What the measured card can do at most.
        forward: The kernel for more than 16 queries.
        forward_few: The kernel for 16 queries and fewer; absent where nobody measured it.
        backward: The backward; absent where the backend has none or nobody measured it.
        host: What the host takes by phase, forward and backward together in training.
    """

    measured: Measured
    evidence: Annotated[list[Evidence], Field(min_length=1)]
    peak: Peak
    forward: Kernel
    forward_few: Kernel | None = None
    backward: Kernel | None = None
    host: dict[Phase, HostTimes]


class Costs(NamedTuple):
    """The costs of a backend on an architecture.

    Attributes:
        table: The numbers.
        is_own: They were measured on this architecture, not on one that it inherits from.
        composed: The backward that the repair `backward_from_chunked` gives; None where nobody measured it.
    """

    table: CostTable
    is_own: bool
    composed: Kernel | None = None


@cached(256, TABLES)
def costs_of(tables: Tables, arch: str, backend: str) -> Costs | None:
    """Return the costs of a backend: the architecture's own, else those of the nearest that it takes after.

    Raises:
        TableError: A file is malformed.
    """
    names = list(tables.ancestors(arch))
    others = [other for name in names if (other := tables.arch(name).costs_from) is not None]
    for name in dict.fromkeys((*names, *others)):
        for folder in reversed(tables.folders):
            path = folder / name / FOLDER / f"{backend}.toml"
            if path.is_file():
                chunked = None if backend == "chunked" else costs_of(tables, arch, "chunked")
                composed = None if chunked is None else chunked.table.backward
                return Costs(read(path, CostTable), name == arch, composed)
    return None
