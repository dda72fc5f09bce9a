"""What the user wants, as plain data: the engine reads this, never the environment.

Settings come from the call, from `override()`, from the environment, in that precedence; `merge` puts one over
another. A ban holds against all.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

QUADRATIC_LIMIT_BYTES = 256 * 2**20
"""Scores above this size are never computed by the slow tier without a warning that names them."""


class Policy(BaseModel):
    """Wishes and limits for a decision.

    Attributes:
        require: The only backend that may run.
        prefer: Backends to try first, in this order.
        allow: If not None, the only backends that may run, in this order.
        ban: Backends that may not run, whoever asks.
        strict: No slow tier, no reroute, no unknown backend.
        allow_unknown: A backend that no row speaks about may be chosen.
        recognize: Look into dense masks.
        quadratic_limit_bytes: Above this the slow tier warns.
        tables: Overlay folder.
        transform: "double_backward" when the caller will differentiate twice, which no tensor shows.
        origin: Where each setting came from, for the explanation: `{"ban": "ATTNROUTE_BACKENDS"}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    require: str | None = None
    prefer: tuple[str, ...] = ()
    allow: tuple[str, ...] | None = None
    ban: tuple[str, ...] = ()
    strict: bool = False
    allow_unknown: bool = False
    recognize: bool = True
    quadratic_limit_bytes: int = QUADRATIC_LIMIT_BYTES
    tables: Path | None = None
    transform: str | None = None
    origin: dict[str, str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash by the settings that change a decision."""
        return hash((self.require, self.prefer, self.allow, self.ban, self.strict, self.allow_unknown, self.transform))

    def origin_of(self, setting: str) -> str:
        """Return who set something, "the default" when nobody did."""
        return self.origin.get(setting, "the default")


def merge(below: Policy, above: Policy) -> Policy:
    """Put one policy over another: what `above` states wins, bans add up."""
    stated = above.model_fields_set - {"origin", "ban"}
    changes = {name: getattr(above, name) for name in stated}
    changes["ban"] = tuple(dict.fromkeys((*below.ban, *above.ban)))
    changes["origin"] = {**below.origin, **above.origin}
    if "require" in stated and above.require is not None:
        # Who requires a backend here and now is not bound by an order given further away.
        changes.setdefault("allow", None)
        changes.setdefault("prefer", ())
    return below.model_copy(update=changes)
