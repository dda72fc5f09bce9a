"""The answer as data. `explain`, the exception text and the log line are renderings of `Decision`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from attnroute.engine.finding import Finding
from attnroute.engine.stock import Stock
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.vocabulary import Repair, Status


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Exclusion(_Part):
    """Why policy keeps a backend out, whatever its verdict.

    Attributes:
        reason: What keeps it out; "failed" where its kernel was refused in this process.
        origin: The setting that excludes it; of a failure, the error of the backend.
    """

    reason: Literal["banned", "not_allowed", "not_required", "strict", "failed", "unknown"]
    origin: str


class Verdict(_Part):
    """A backend's sum.

    Attributes:
        backend: Its name.
        status: rejected > unknown > unavailable > eligible: the worst that applies.
        findings: Every row's finding, those that a repair lifted included.
        repairs: What must be done to the call first, in order.
        missing: What the backend needs and the host has not.
        predicted_ms: Predicted time in milliseconds, None where nothing was measured.
        extra_bytes: What the repairs allocate, in bytes.
        quadratic_bytes: How many of these are a mask with an entry for every query and key that makes memory
            quadratic (`engine.quadratic`). Such a backend comes after every one that builds none.
        score_bytes: What a quadratic backend allocates for its scores, in bytes; 0 for the others.
        options: Tile options that rows state for the kernel on this call, by name.
        option_rows: The id of the row that each of these comes from, in the same order.
        first_call_seconds: How long the first call of each structure compiles, least and most, in seconds;
            None where nothing is compiled.
        compiled_seconds: How long this structure took to compile, in seconds, where it was compiled already.
        excluded: Why policy keeps it out.
    """

    backend: str
    status: Status
    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    missing: tuple[str, ...] = ()
    predicted_ms: float | None = None
    extra_bytes: int = 0
    quadratic_bytes: int = 0
    score_bytes: int = 0
    options: tuple[tuple[str, int | bool | str], ...] = ()
    option_rows: tuple[str, ...] = ()
    first_call_seconds: tuple[float, float] | None = None
    compiled_seconds: float | None = None
    excluded: Exclusion | None = None

    @property
    def is_slow(self) -> bool:
        """Whether a row says that the backend is slow for this call."""
        return any(f.kind == "slow" and f.outcome == "fail" for f in self.findings)

    @property
    def blocking(self) -> tuple[Finding, ...]:
        """The findings that keep this backend from being eligible."""
        return tuple(f for f in self.findings if f.blocks)


class Hint(_Part):
    """One change that would change the choice, found by asking `decide` again.

    Attributes:
        kind: mask_object, install, upgrade, dropout, deterministic, pad_seqlen.
        change: What changes, e.g. "flash-attn-4" or "causal".
        version: The lowest version that would do, for install and upgrade; None where any would.
        below: The first version above it that would not do any more, or that the tables do not know; None
            where there is none.
        also: What has to be installed together with it: distribution, version and below of each.
        selects: The backend that would then be selected.
        allows: For an upgrade that lifts what blocks a backend and does not select it: that backend.
    """

    kind: Literal["mask_object", "install", "upgrade", "dropout", "deterministic", "pad_seqlen", "repair"]
    change: str
    version: str | None = None
    below: str | None = None
    also: tuple[tuple[str, str | None, str | None], ...] = ()
    selects: str
    allows: str | None = None


class Decision(_Part):
    """The call, what was found about every backend, and what was chosen.

    Attributes:
        call: The question, as given.
        host: The machine.
        policy: The settings in force.
        verdicts: Exactly one per backend of the tables.
        order: The candidates in the order in which they would run.
        selected: The first of `order`, None when nothing may run.
        why_this_order: The ids of the preferences that made this order, and the reason of the first.
        hints: What would change the choice.
        stock: What stock scaled_dot_product_attention would run, where it was requested.
    """

    call: Call
    host: Host
    policy: Policy
    verdicts: tuple[Verdict, ...]
    order: tuple[str, ...]
    selected: str | None
    why_this_order: str
    hints: tuple[Hint, ...] = ()
    stock: Stock | None = None

    def verdict(self, backend: str) -> Verdict:
        """Return one backend's verdict.

        Raises:
            KeyError: The tables know no such backend.
        """
        for verdict in self.verdicts:
            if verdict.backend == backend:
                return verdict
        raise KeyError(backend)

    def __str__(self) -> str:
        """Return the explanation."""
        # The import runs here because report renders decisions and so imports this module.
        from attnroute.report.text import render_decision

        return render_decision(self)
