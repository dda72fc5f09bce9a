"""The answer as data. `explain`, the exception text and the log line are renderings of `Decision`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from attnroute.engine.finding import Finding
from attnroute.engine.quadratic import tensor_bytes
from attnroute.engine.stock import Stock
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.vocabulary import Repair, Status

REST: Final = "; for the rest "
"""What stands in `Decision.why_this_order` between predicted times and preferences, where both made it."""


HintKind = Literal[
    "mask_object",
    "finite",
    "dropout",
    "deterministic",
    "pad_seqlen",
    "install",
    "upgrade",
    "downgrade",
    "call",
    "policy",
]
Behind = Literal["policy", "unknown", "quadratic", "mask", "time", "slow", "preference"]
"""What puts a backend that may run behind the selected one."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Exclusion(_Part):
    """Why policy keeps a backend out, whatever its verdict.

    Attributes:
        reason: What keeps it out; "failed" where its kernel was refused in this process, "wrong" where
            `attnroute tune` found a wrong result, "memory" where what it allocates besides the output does
            not fit into the free memory.
        origin: The setting that excludes it; of a failure or a wrong result, the error of the backend.
        needed_bytes: What it allocates, where that keeps it out.
        free_bytes: What is free then.
    """

    reason: Literal["banned", "not_allowed", "not_required", "strict", "failed", "wrong", "unknown", "memory"]
    origin: str
    needed_bytes: int = 0
    free_bytes: int = 0


class Prediction(_Part):
    """What the kernels and the repairs of a backend are predicted to take for a call.

    Attributes:
        device_ms: Time of the device in milliseconds; in training of forward and backward.
        host_ms: Time of the host, likewise.
        kind: "measured" on a card of this architecture; "tuned" for such calls on this machine; "inferred"
            from a card of another architecture: such a time is shown and puts nothing in order.
        source: The card that was measured, and the day.
    """

    device_ms: float
    host_ms: float
    kind: Literal["measured", "inferred", "tuned"]
    source: str


class Verdict(_Part):
    """A backend's sum.

    Attributes:
        backend: Its name.
        status: rejected > unknown > unavailable > eligible: the worst that applies.
        findings: Every row's finding, those that a repair lifted included.
        repairs: What must be done to the call first, in order.
        missing: What the backend needs and the host has not.
        predicted_ms: Predicted time in milliseconds: the larger of host and device, in a CUDA graph the
            device's; None where nothing was measured.
        prediction: What that is made of.
        plan_ms: What the first call of each shape takes besides, in milliseconds, to plan it; 0 where nothing
            is planned.
        plan_share_ms: What of that counts for one call, in the order: it is shared by the calls that are
            expected, and where shapes vary by those of a step.
        extra_bytes: What the repairs allocate, in bytes.
        quadratic_bytes: How many of these are a mask with an entry for every query and key that makes memory
            quadratic. Such a backend comes after every one that builds none where its time is not predicted,
            or the mask takes more memory than query, key, value and output (`engine.quadratic`).
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
    prediction: Prediction | None = None
    plan_ms: float = 0.0
    plan_share_ms: float = 0.0
    extra_bytes: int = 0
    quadratic_bytes: int = 0
    score_bytes: int = 0
    options: tuple[tuple[str, int | bool | str], ...] = ()
    option_rows: tuple[str, ...] = ()
    first_call_seconds: tuple[float, float] | None = None
    compiled_seconds: float | None = None
    excluded: Exclusion | None = None

    @property
    def measured_ms(self) -> float | None:
        """The predicted time where it puts the backend in order: not one that is inferred."""
        is_own = self.prediction is not None and self.prediction.kind != "inferred"
        return self.predicted_ms if is_own else None

    @property
    def ranked_ms(self) -> float | None:
        """That time with its share of a plan: what the order compares."""
        return None if self.measured_ms is None else self.measured_ms + self.plan_share_ms

    def counts_mask(self, call: Call) -> bool:
        """Return whether it comes after those that build no mask, for the mask that it needs built."""
        # A predicted time has the building of the mask in it, so only its memory counts then.
        return self.quadratic_bytes > (0 if self.measured_ms is None else tensor_bytes(call))

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
        kind: mask_object, finite, dropout, deterministic, pad_seqlen, install, upgrade; where
            somebody asked why not a certain backend also downgrade, call and policy.
        change: What changes, e.g. "flash-attn-4" or "causal".
        version: The lowest version that would do, for install and upgrade; None where any would.
        below: The first version above it that would not do any more, or that the tables do not know; None
            where there is none.
        also: What has to be installed together with it: distribution, version and below of each.
        selects: The backend that would then be selected.
        allows: For a change that lifts what blocks a backend and does not select it: that backend.
        now_ms: The predicted time of what is selected, where both are predicted.
        then_ms: That of what would then be selected.
    """

    kind: HintKind
    change: str
    version: str | None = None
    below: str | None = None
    also: tuple[tuple[str, str | None, str | None], ...] = ()
    selects: str
    allows: str | None = None
    now_ms: float | None = None
    then_ms: float | None = None


class Decision(_Part):
    """The call, what was found about every backend, and what was chosen.

    Attributes:
        call: The question, as given.
        host: The machine.
        policy: The settings in force.
        verdicts: Exactly one per backend of the tables.
        order: The candidates in the order in which they would run.
        selected: The first of `order`, None when nothing may run.
        why_this_order: Where the predicted times come from that made this order; of what has none, the ids
            of the preferences that placed it, and the reason of the first.
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

    def text(self, *, verbose: bool = False, width: int = 80) -> str:
        """Return the explanation.

        Args:
            verbose: With every reason of each backend and its row, every preparation and hint.
            width: Columns.
        """
        # The import runs here because report renders decisions and so imports this module.
        from attnroute.report.text import render_decision

        return render_decision(self, verbose=verbose, width=width)

    def __str__(self) -> str:
        """Return the explanation in short."""
        return self.text()

    def _repr_html_(self) -> str:
        """Return the explanation as a table for a notebook."""
        # The same holds here.
        from attnroute.report.notebook import decision_html

        return decision_html(self)


class WhyNot(_Part):
    """Why a decision did not select one backend.

    Attributes:
        backend: The backend.
        decision: The decision.
        behind: What puts it behind the selected one; None where it is that one, or may not run.
        changes: Single changes after which it would be selected; where none does that, those after which it
            could run, or packages besides a change of the call. The smallest of each kind.
    """

    backend: str
    decision: Decision
    behind: Behind | None = None
    changes: tuple[Hint, ...] = ()
