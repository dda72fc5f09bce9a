"""What one row says about one call. Sentences are made of these in `attnroute.report`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from attnroute.vocabulary import Outcome, Repair, RuleKind


class Finding(BaseModel):
    """A row held against a call.

    Attributes:
        rule: Id of the row: `<folder>/<backend>/<name>`.
        kind: limit, wrong_result, crash, hang or slow.
        outcome: pass, fail, unknown or not_applicable.
        requires: What must hold, as the table has it.
        got: What the call or host has.
        because: Why the row exists.
        repair: The preparation that would lift the row, if one can.
        repaired_by: The preparation that did lift it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    kind: RuleKind = "limit"
    outcome: Outcome
    requires: str
    got: str
    because: str = ""
    repair: Repair | None = None
    repaired_by: Repair | None = None

    @property
    def blocks(self) -> bool:
        """Whether this finding keeps the backend from being eligible."""
        return self.outcome in ("fail", "unknown") and self.kind != "slow" and self.repaired_by is None
