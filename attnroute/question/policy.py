"""The settings of a decision as plain data; the engine reads these and never the environment.

The call overrides `override()`, which overrides the environment; `merge` puts one over another. Bans of all
three apply.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from attnroute.question.plain import Plain, Record

QUADRATIC_LIMIT_BYTES = 256 * 2**20
"""Scores above this size are never computed by the slow tier without a warning that names them."""
EXPECTED_CALLS = 1_000_000
"""How many calls share the compilation of a first one: an hour of training has as many."""
CALLS_PER_STEP = 32
"""How many calls share the plan for one shape where shapes vary: about the layers of a model."""
MOST_CALLS = 10**15
"""The most that may be expected: beyond, the share of a call is nothing."""


class Measured(Record):
    """What `attnroute tune` measured on this machine of calls like one.

    Attributes:
        file: The file that says so.
        differences: Why the file no longer holds, as clauses; there is nothing else then.
        calls: What such calls have in common (`engine.measured.key_of`).
        day: When they were measured.
        times: Backends that gave the right result, with milliseconds of the device and of the host.
        wrong: Backends that did not, each with its error.
        stays: The backend that is selected unless another one is faster by `margin`.
        margin: A share of its time.
    """

    file: Path
    differences: tuple[str, ...] = ()
    calls: str = ""
    day: str = ""
    times: tuple[tuple[str, float, float], ...] = ()
    wrong: tuple[tuple[str, str], ...] = ()
    stays: str = ""
    margin: float = 0.0


class Policy(Plain):
    """Requirements, preferences and limits for a decision.

    Attributes:
        require: The only backend that may run.
        prefer: Backends to try first, in this order.
        allow: If not None, the only backends that may run, in this order.
        ban: Backends that may not run, whoever asks.
        strict: No slow tier, no reroute, no unknown backend.
        allow_unknown: A backend that no row speaks about may be chosen.
        recognize: Look into dense masks.
        quadratic_limit_bytes: Above this the slow tier warns.
        expected_calls: How many calls of each kind are expected: the time for which a backend's first call
            compiles, or plans a shape, is divided among so many.
        calls_per_step: How many of them come in one step of a model: where shapes vary, a plan is for these.
        tables: Overlay folder; a relative path is one of the directory in which the policy was made.
        tuning: `attention()` reads what `attnroute tune` measured: from the user's data, or from this file.
        measured: What was read there about the call; `decide()` reads nothing by itself.
        context_parallel: Query, key and value are one rank's part of sequences: whose, as
            `distributed.context_parallel()` names it.
        transform: "double_backward" when the caller will differentiate twice, which no tensor shows.
        failed: Backends whose kernel was refused before its launch for calls like this one in this process,
            each with its error.
        origin: Where each setting came from, for the explanation: `{"ban": "ATTNROUTE_BACKENDS"}`.
    """

    require: str | None = None
    prefer: tuple[str, ...] = ()
    allow: tuple[str, ...] | None = None
    ban: tuple[str, ...] = ()
    strict: bool = False
    allow_unknown: bool = False
    recognize: bool = True
    quadratic_limit_bytes: int = QUADRATIC_LIMIT_BYTES
    expected_calls: Annotated[int, Field(ge=1, le=MOST_CALLS)] = EXPECTED_CALLS
    calls_per_step: Annotated[int, Field(ge=1, le=MOST_CALLS)] = CALLS_PER_STEP
    tables: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    tuning: bool | Annotated[Path, AfterValidator(Path.absolute)] = True
    measured: Measured | None = None
    context_parallel: str | None = None
    transform: str | None = None
    failed: tuple[tuple[str, str], ...] = ()
    origin: dict[str, str] = Field(default_factory=dict)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The settings that change a decision, as one hashable value made once."""
        return (
            self.require,
            self.prefer,
            self.allow,
            self.ban,
            self.strict,
            self.allow_unknown,
            self.recognize,
            self.quadratic_limit_bytes,
            self.expected_calls,
            self.calls_per_step,
            self.tables,
            self.tuning,
            self.measured,
            self.context_parallel,
            self.transform,
            self.failed,
        )

    def __hash__(self) -> int:
        """Hash by the settings that change a decision."""
        return hash(self.key)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, and without the cached `key`."""
        kept = {name: getattr(self, name) for name in Policy.model_fields}
        return self.unchecked(**{**kept, **changes})

    def origin_of(self, setting: str) -> str:
        """Return where a setting came from, "the default" where it was not set."""
        return self.origin.get(setting, "the default")


def merge(below: Policy, above: Policy) -> Policy:
    """Put one policy over another: what `above` sets wins, bans add up."""
    stated = above.model_fields_set - {"origin", "ban"}
    changes = {name: getattr(above, name) for name in stated}
    changes["ban"] = tuple(dict.fromkeys((*below.ban, *above.ban)))
    bans = dict.fromkeys(p.origin["ban"] for p in (below, above) if "ban" in p.origin)
    changes["origin"] = {**below.origin, **above.origin, **({"ban": " and ".join(bans)} if bans else {})}
    if "require" in stated and above.require is not None:
        # A backend that is required close to the call overrides an order that was set further out.
        changes.setdefault("allow", None)
        changes.setdefault("prefer", ())
    elif below.require is not None and above.allow is not None and below.require not in above.allow:
        changes["require"] = None
    # Not a copy of `below`, which would keep its cached `key`.
    kept = {name: getattr(below, name) for name in Policy.model_fields}
    return Policy.model_validate({**kept, **changes})
