"""The smallest single changes after which one backend would be selected: each is tried by selecting again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from attnroute.engine.advice.call_changes import families, in_words
from attnroute.engine.advice.other_versions import Range, installs, releases, with_versions
from attnroute.engine.advice.what_if import packages_of, versions_hint
from attnroute.engine.decision import Behind, Hint
from attnroute.engine.rank import behind
from attnroute.engine.select import Judgement, Selection, select
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy


class _Trial(NamedTuple):
    """One change, and the question after it."""

    hint: Hint
    call: Call
    host: Host
    policy: Policy


def puts_behind(selection: Selection, backend: str) -> Behind | None:
    """Return what puts a backend behind the selected one; None where it is that one, or may not run."""
    if backend not in selection.order[1:]:
        return None
    slow_tier = selection.tables.slow_tier
    pair = (selection.order[0], backend)
    return behind(selection.judgements, selection.preferences, selection.policy, slow_tier, pair)


def changes(selection: Selection, backend: str) -> tuple[Hint, ...]:
    """Return what would select a backend; where no single change does, what would let it run.

    Returns:
        The smallest change of each kind: settings, packages, versions, then the call. Where none does
        either, a change of the call and packages to be installed, together.
    """
    if selection.selected == backend:
        return ()
    answers = (_first(family, selection, backend) for family in _families(selection, backend))
    found = [hint for hint in answers if hint is not None]
    return tuple([h for h in found if h.allows is None] or found or _with_packages(selection, backend))


def _families(selection: Selection, backend: str) -> Iterator[Iterable[_Trial]]:
    call, host, policy = selection.call, selection.host, selection.policy
    judgement = selection.judgements[backend]
    for change, changed in _settings(policy, judgement):
        yield [_Trial(Hint(kind="policy", change=change, selects=""), call, host, changed)]
    ranges: list[tuple[Range, ...]] = list(installs(selection, judgement))
    ranges += [(r,) for older in (False, True) for r in releases(selection, judgement, older=older)]
    for found in ranges:
        yield [_Trial(versions_hint(found, host), call, with_versions(host, found), policy)]
    # Where a row rejects every call, no other call helps.
    if not judgement.rows.never_runs:
        for family in families(call):
            yield (_Trial(_call_hint(call, changed), changed, host, policy) for changed in family)


def _settings(policy: Policy, judgement: Judgement) -> Iterator[tuple[str, Policy]]:
    """Give the policies without what keeps a backend out, each with what keeps it out now."""
    backend, excluded = judgement.backend, judgement.excluded
    if excluded is None:
        if judgement.status == "eligible":
            yield f"prefer = {backend}", policy.changed(prefer=(backend,), allow=None)
        return
    lifted: dict[str, dict[str, Any]] = {
        "banned": {"ban": tuple(name for name in policy.ban if name != backend)},
        "not_allowed": {"allow": None},
        "not_required": {"require": None},
        "strict": {"strict": False},
        "unknown": {"strict": False, "allow_unknown": True},
    }
    if excluded.reason in lifted:
        yield excluded.reason, policy.changed(**lifted[excluded.reason])
    if excluded.reason in ("not_allowed", "not_required"):
        yield f"backend = {backend}", policy.changed(require=backend)


def _call_hint(before: Call, after: Call) -> Hint:
    return Hint(kind="call", change=in_words(before, after), selects="")


def _asked(trial: _Trial, selection: Selection) -> Selection | None:
    """Select again; None where the changed call is none, as lengths that no longer fit to a mask."""
    try:
        return select(trial.call, trial.host, selection.tables, trial.policy)
    except ArgumentError:
        return None


def _first(family: Iterable[_Trial], before: Selection, backend: str) -> Hint | None:
    """Return the first change that selects the backend, else the first that lets it run."""
    allowing = None
    for trial in family:
        after = _asked(trial, before)
        if after is None:
            continue
        if after.selected == backend:
            return trial.hint.model_copy(update={"selects": backend})
        if allowing is None and backend in after.order and backend not in before.order:
            allowing = trial.hint.model_copy(update={"selects": after.selected, "allows": backend})
    return allowing


def _with_packages(selection: Selection, backend: str) -> list[Hint]:
    """Return changes of the call after which nothing but packages is missing, with these."""
    found = []
    for family in families(selection.call) if selection.judgements[backend].rows.missing else ():
        for changed in family:
            trial = _Trial(_call_hint(selection.call, changed), changed, selection.host, selection.policy)
            after = _asked(trial, selection)
            if after is not None and (hint := _installed(trial, after, selection, backend)) is not None:
                found.append(hint)
                break
    return found


def _installed(trial: _Trial, after: Selection, before: Selection, backend: str) -> Hint | None:
    trials = [
        trial._replace(
            hint=trial.hint.model_copy(update={"also": packages_of(ranges)}),
            host=with_versions(trial.host, ranges),
        )
        for ranges in installs(after, after.judgements[backend])
    ]
    return _first(trials, before, backend)
