"""Hints, computed by asking `decide` again with one thing changed; never typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attnroute.call import Call, CausalNode, DenseNode
from attnroute.engine.decision import Decision, Hint
from attnroute.host import Host

if TYPE_CHECKING:
    from attnroute.tables.load import Tables

Decide = Callable[..., Decision]
_LENGTH_MULTIPLE = 128
_BUILT_IN = frozenset({"avx2"})
"""What nobody can install."""
ANY_VERSION = "0"
"""What stands for the version of something about whose versions no row asks."""


def hints(decision: Decision, tables: Tables, decide: Decide) -> tuple[Hint, ...]:
    """Return the single changes after which another backend would be selected."""
    found: list[Hint] = []
    for hint, call, host in _changes(decision, tables):
        selected = decide(call, host, tables, decision.policy).selected
        if selected is not None and selected != decision.selected:
            found.append(hint.model_copy(update={"selects": selected}))
    return tuple(found)


def _changes(decision: Decision, tables: Tables) -> Iterator[tuple[Hint, Call, Host]]:
    call, host = decision.call, decision.host
    yield from ((h, c, host) for h, c in _call_changes(call))
    for verdict in decision.verdicts:
        for name in verdict.missing:
            version = _lowest_known(tables, verdict.backend, name)
            unbounded = name not in tables.backends[verdict.backend].versions_known
            if name not in _BUILT_IN and (version is not None or unbounded):
                hint = Hint(kind="install", change=name, version=version, selects="")
                yield hint, call, host.with_versions({name: version or ANY_VERSION})


def _call_changes(call: Call) -> Iterator[tuple[Hint, Call]]:
    if any(isinstance(n, DenseNode) and n.recognized is None for n in call.mask):
        rest = tuple(n for n in call.mask if not isinstance(n, DenseNode))
        changed = call.with_(mask=(*rest, CausalNode()))
        yield Hint(kind="mask_object", change="causal", selects=""), changed
    if call.dropout_p > 0:
        yield Hint(kind="dropout", change="dropout_p = 0", selects=""), call.with_(dropout_p=0.0)
    if call.deterministic:
        yield (
            Hint(kind="deterministic", change="deterministic = false", selects=""),
            call.with_(deterministic=False),
        )
    padded = -(-call.seqlen_kv // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    if padded != call.seqlen_kv and call.seqlen_q == call.seqlen_kv and not _has_tensor(call):
        hint = Hint(kind="pad_seqlen", change=f"seqlen = {padded}", selects="")
        yield hint, call.with_(seqlen_q=padded, seqlen_kv=padded)


def _has_tensor(call: Call) -> bool:
    return call.bias is not None or any(isinstance(n, DenseNode) for n in call.mask)


def _lowest_known(tables: Tables, backend: str, name: str) -> str | None:
    """Return the lowest version that the backend's table admits, read off its own range."""
    ranges = tables.backends[backend].versions_known.get(name)
    if not isinstance(ranges, str):
        return None
    lower = [part.strip()[2:].strip() for part in ranges.split(",") if part.strip().startswith(">=")]
    return lower[0] if lower else None
