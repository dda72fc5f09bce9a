"""Hints, computed by selecting again with one thing changed; never typed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from packaging.version import Version

from attnroute.engine.advice import call_changes
from attnroute.engine.advice.other_versions import (
    ANY_VERSION,
    Range,
    installs,
    releases,
    with_versions,
)
from attnroute.engine.decision import Hint, HintKind
from attnroute.engine.rank import time_ms
from attnroute.engine.select import Judgement, Selection, select
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.versions import is_newer, version_of

MOST_ASKED: Final = 40
"""Changes that are tried at most."""
LEAST_GAIN: Final = 0.1
"""The share of its time that a change must save to be worth a line, where both times are predicted."""


def hints(selection: Selection) -> tuple[Hint, ...]:
    """Return the changes after which a faster route is open: another backend, or the same with less to do.

    Where times are predicted on both sides, those alone that save a tenth; where not, those that select
    another backend, or, for upgrades, make one eligible.
    """
    found: list[Hint] = []
    for change in islice(_changes(selection), MOST_ASKED):
        after = select(change.call, change.host, selection.tables, selection.policy)
        hint = _hint(change, selection, after)
        if hint is not None and hint not in found:
            found.append(hint)
    return tuple(found)


def versions_hint(ranges: tuple[Range, ...], host: Host) -> Hint:
    """Return the hint to install or upgrade to some versions; what it would select is not said yet."""
    (name, version, below), *others = packages_of(ranges)
    present = version_of(name, host.versions)
    kind: HintKind = "install"
    if present is not None:
        kind = "upgrade" if is_newer(name, Version(ranges[0].version), present) else "downgrade"
    return Hint(kind=kind, change=name, version=version, below=below, also=tuple(others), selects="")


def packages_of(ranges: tuple[Range, ...]) -> tuple[tuple[str, str | None, str | None], ...]:
    """Return distribution, lowest version and first after it that would not do, of each range."""
    return tuple((r.name, None if r.version == ANY_VERSION else r.version, r.below) for r in ranges)


class _Change(NamedTuple):
    """A change that is worth a question; `backend` is the one that it is made for, if it is for one."""

    hint: Hint
    call: Call
    host: Host
    backend: str | None = None


def _hint(change: _Change, before: Selection, after: Selection) -> Hint | None:
    """Return what a change would bring, None where that is nothing."""
    hint, backend = change.hint, change.backend
    if after.selected is None:
        return None
    if after.selected != before.selected and backend in (None, after.selected):
        return _with_gain(hint.model_copy(update={"selects": after.selected}), before, after)
    if backend is None:
        # The same kernel without what the call needs now: a mask that is built, padding that is cleared.
        gained = _with_gain(hint.model_copy(update={"selects": after.selected}), before, after)
        return gained if gained is not None and gained.then_ms is not None else None
    is_new = backend in after.order and backend not in before.order
    if hint.kind == "upgrade" and is_new and _predicted(after, backend) is None:
        return hint.model_copy(update={"selects": after.selected, "allows": backend})
    return None


def _with_gain(hint: Hint, before: Selection, after: Selection) -> Hint | None:
    """Add both predicted times, where there are both; return None where too little is won."""
    now, then = _predicted(before, before.selected), _predicted(after, after.selected)
    if now is None or then is None:
        return hint
    if then > now * (1 - LEAST_GAIN):
        return None
    return hint.model_copy(update={"now_ms": now, "then_ms": then})


def _predicted(selection: Selection, backend: str | None) -> float | None:
    """Return the predicted time of a backend with its share of a plan, None where none puts it in order."""
    judgement: Judgement | None = selection.judgements.get(backend or "")
    cost = None if judgement is None else judgement.cost
    if judgement is None or cost is None or cost.kind == "inferred":
        return None
    return time_ms(cost, judgement.form.call) + judgement.plan_share_ms


def _changes(selection: Selection) -> Iterator[_Change]:
    call, host = selection.call, selection.host
    yield from (_Change(hint, changed, host) for hint, changed in call_changes.hinted(call))
    for backend, judgement in selection.judgements.items():
        for ranges in installs(selection, judgement):
            yield _Change(versions_hint(ranges, host), call, with_versions(host, ranges), backend)
    for backend, judgement in selection.judgements.items():
        for found in releases(selection, judgement):
            yield _Change(versions_hint((found,), host), call, with_versions(host, (found,)), backend)
