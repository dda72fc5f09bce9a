"""What rows of the capability tables may ask about a call: `FACTS` lists it, `Facts(call)` computes it."""

from __future__ import annotations

from typing import Final, cast

# Imported for the facts that they register, in this order.
from attnroute.question.facts import masks as masks
from attnroute.question.facts import scores as scores
from attnroute.question.facts import sizes as sizes
from attnroute.question.facts.empty import empty_rows_of
from attnroute.question.facts.registry import FACTS, UNKNOWN, Fact, Facts, Unknown, Value, Varies, facts_of
from attnroute.vocabulary import Feature

__all__ = ["BATCH_FACTS", "FACTS", "LENGTH_FACTS", "UNKNOWN", "Fact", "Facts", "Unknown", "Value", "Varies"]
__all__ += ["empty_rows_of", "facts_of", "needed_features"]

LENGTH_FACTS: Final = frozenset(name for name, fact in FACTS.items() if fact.reads_length)
"""The facts whose value changes with every length: calls are sorted by what rows ask about them."""
BATCH_FACTS: Final = frozenset({"batch", "batch_heads_q", "batch_heads_kv"})
"""The other facts that a batch size takes part in."""
_FLAGS: Final = tuple((name, fact.feature) for name, fact in FACTS.items() if fact.feature is not None)
_TRANSFORMS: Final = ("double_backward", "forward_ad", "vmap")
_DISTRIBUTED: Final = ("context_parallel", "ring")
"""Of DTensors a kernel gets plain tensors, and needs nothing for them."""


def needed_features(facts: Facts) -> tuple[Feature, ...]:
    """Return the features of the closed list that a kernel must have for a call."""
    needed: list[Feature] = [feature for name, feature in _FLAGS if facts[name] is True]
    if facts["alignment"] in ("bottom_right", "mixed"):
        needed.append("bottom_right")
    call = facts.call
    others: tuple[tuple[Feature, bool], ...] = (
        ("bias_grad", facts["bias_requires_grad"] is True),
        ("softcap", call.softcap > 0),
        ("dropout", call.dropout_p > 0),
        ("gqa", call.num_heads_q != call.num_heads_kv),
        ("deterministic", call.deterministic and call.phase == "training"),
        ("varlen", call.layout == "thd"),
        ("fp8", call.dtype.startswith("float8")),
    )
    needed += [feature for feature, is_needed in others if is_needed]
    if facts["transform"] in _TRANSFORMS:
        needed.append(cast("Feature", facts["transform"]))
    if facts["distributed"] in _DISTRIBUTED:
        needed.append(cast("Feature", facts["distributed"]))
    return tuple(needed)
