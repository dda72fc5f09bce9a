"""Decide once for each class of calls, and keep what a route needs of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils._python_dispatch import _disable_current_modes

from attnroute.api import failures, tuned
from attnroute.engine.classes import class_of
from attnroute.engine.decide import decide, describe
from attnroute.engine.decision import Decision
from attnroute.engine.select import Selection, repaid_after, select
from attnroute.errors import NoBackendError, QuadraticAttentionWarning, warn_user
from attnroute.masks.tracing import is_tracing
from attnroute.memory import Memory
from attnroute.probes import imports, packages
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.report.log import announce
from attnroute.report.text import render_failure, render_quadratic
from attnroute.settings import explain_mode
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.providers import libraries_of
from attnroute.vocabulary import Repair

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES_KEPT = 1024
"""Choices for calls that differ only in lengths and get the same decision."""
DECISIONS_KEPT = 32
"""Whole decisions, of some 80 kB each, for the layers of a model that is traced."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of a decision that is kept; its findings are computed again for an explanation.

    Attributes:
        call: The first call of its class.
        host: The machine.
        policy: The settings in force, with the backends that refused such calls.
        backend: What was selected.
        repairs: What must be done to the call first.
        options: Options that rows state for the kernel.
        compiles: The first call of such a kind compiles.
        needed_bytes: What it allocates besides the output, as far as it is known.
        repaid_after: After so many calls of one shape the plan of another backend is worth its time.
    """

    call: Call
    host: Host
    policy: Policy
    backend: str
    repairs: tuple[Repair, ...]
    options: tuple[tuple[str, int | bool | str], ...]
    compiles: bool
    needed_bytes: int
    repaid_after: int | None

    @classmethod
    def of(cls, selection: Selection) -> Choice:
        """Return what stays of a selection that found something."""
        judgement = selection.judgements[selection.selected or ""]
        return cls(
            selection.call,
            selection.host,
            selection.policy,
            judgement.backend,
            judgement.repairs,
            judgement.options.values,
            judgement.rows.info.first_call_seconds is not None,
            judgement.needed_bytes,
            repaid_after(selection),
        )

    def decision(self) -> Decision:
        """Decide again: the same question always gets the same answer."""
        return decide(self.call, self.host, load(self.policy.tables), self.policy)


_CLASSES: Memory[object, Choice] = Memory(
    CLASSES_KEPT,
    f"{__name__}._CLASSES",
    "when its backend fails",
)
_DECISIONS: Memory[object, tuple[Choice, Decision]] = Memory(
    DECISIONS_KEPT, f"{__name__}._DECISIONS", "when its backend fails"
)


def drop(backend: str, concerns: Callable[[Choice], bool]) -> list[Choice]:
    """Drop the choices of a backend that `concerns` picks out; return them."""
    _DECISIONS.drop(lambda made: made[0].backend == backend)
    return _CLASSES.drop(lambda choice: choice.backend == backend and concerns(choice))


def chosen(call: Call, host: Host, tables: Tables, policy: Policy) -> Choice:
    """Return what was chosen for a class of calls, decided once."""
    policy, where = _class(call, host, tables, policy)
    choice = None if where is None else _CLASSES.get(where)
    if choice is None:
        selection = _new_selection(call, host, tables, policy)
        choice = Choice.of(selection)
        if where is not None and is_shared(choice.backend, tables):
            _CLASSES.put(where, choice)
    return choice


def decided(call: Call, host: Host, tables: Tables, policy: Policy) -> tuple[Choice, Decision]:
    """Return what was chosen for a class of calls, and the whole decision."""
    policy, where = _class(call, host, tables, policy)
    made = None if where is None else _DECISIONS.get(where)
    if made is None:
        selection = _new_selection(call, host, tables, policy)
        made = (Choice.of(selection), describe(selection))
        if where is not None and is_shared(made[0].backend, tables):
            _DECISIONS.put(where, made)
    return made


def explained(
    call: Call, host: Host, tables: Tables, policy: Policy, *, advise: bool
) -> tuple[Choice | None, Decision]:
    """Return a choice and its decision made anew, of which nothing is kept; None where nothing may run."""
    selection = select(call, host, tables, _informed(call, host, policy))
    choice = None if selection.selected is None else Choice.of(selection)
    return choice, describe(selection, advise=advise)


def _class(call: Call, host: Host, tables: Tables, policy: Policy) -> tuple[Policy, object]:
    """Return the policy with what is known of such calls, and what a choice is kept under, if anything."""
    policy = _informed(call, host, policy)
    group = class_of(call, host.arch, tables)
    return policy, None if group is None else (group, host, policy.key, tables)


def _informed(call: Call, host: Host, policy: Policy) -> Policy:
    """Return the policy with what failed in this process, and what was measured on this machine."""
    return tuned.informed(call, host, failures.known(call, host, policy))


def is_shared(backend: str, tables: Tables) -> bool:
    """Return whether a choice of a backend holds for its whole class of calls.

    The slow tier says its bytes, which every length changes, so each of its calls is decided by itself.
    """
    return backend not in tables.slow_tier


def _new_selection(call: Call, host: Host, tables: Tables, policy: Policy) -> Selection:
    selection = _importable(select(call, host, tables, policy))
    _check(selection)
    if (mode := explain_mode()) != "off":
        announce(describe(selection), mode)
    return selection


def _importable(selection: Selection) -> Selection:
    """Select again for as long as what was selected cannot be imported, which only trying it shows."""
    # A tracer's modes would make fake what packages prepare while they are imported.
    tried: set[str] = set()
    with _disable_current_modes() if is_tracing() else nullcontext():
        while (selected := selection.selected) is not None and _is_broken(selected, selection):
            if selected in tried:
                # What failed is nothing that it needs by name: its executor says so, and is replaced.
                break
            tried.add(selected)
            broken = {**selection.host.broken, **packages.broken(selection.tables.providers)}
            host = selection.host.model_copy(update={"broken": broken})
            selection = select(selection.call, host, selection.tables, selection.policy)
    return selection


def _is_broken(backend: str, selection: Selection) -> bool:
    libraries = libraries_of(selection.tables, selection.host.arch, backend)
    return imports.mark_if_broken(libraries, selection.tables.providers) is not None


def _check(selection: Selection) -> None:
    """Raise when nothing may run, warn when the slow tier would compute many scores."""
    selected, limit = selection.selected, selection.policy.quadratic_limit_bytes
    if selected is None:
        decision = describe(selection)
        raise NoBackendError(render_failure(decision), decision)
    if selection.judgements[selected].score_bytes > limit:
        warn_user(render_quadratic(describe(selection)), QuadraticAttentionWarning)
