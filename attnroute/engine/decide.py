"""`decide`: the only place where a backend is chosen."""

from __future__ import annotations

from typing import NamedTuple

from attnroute.engine import repairs, stock
from attnroute.engine.advice import what_if
from attnroute.engine.decision import Decision, Exclusion, Verdict
from attnroute.engine.evaluate import evaluate, missing_needs
from attnroute.engine.finding import Finding
from attnroute.engine.options import Options, options_for
from attnroute.engine.quadratic import holds_quadratic, may_grow
from attnroute.engine.rank import preferred, ranked, why
from attnroute.question import fits
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.load import Tables, load
from attnroute.vocabulary import BUILD_MASKS, SLOW_TIER, Repair, Status


def decide(
    call: Call,
    host: Host,
    tables: Tables | None = None,
    policy: Policy | None = None,
    *,
    advise: bool = False,
) -> Decision:
    """Choose a backend for one call on one machine.

    Args:
        call: The question.
        host: The machine.
        tables: The capability tables; the shipped ones by default.
        policy: The user's wishes; none by default.
        advise: Also compute hints and what stock scaled_dot_product_attention would run.

    Returns:
        The decision; `selected` is None when nothing may run.

    Raises:
        ArgumentError: The parts of the call do not fit together, as `attention()` would say of its tensors.
        TableError: The tables are malformed or do not describe the host's architecture.
    """
    fits.check(call)
    wishes = policy or Policy()
    tables = tables or load(wishes.tables)
    if wishes.transform is not None and call.context.transform is None:
        context = call.context.model_copy(update={"transform": wishes.transform})
        call = call.with_(context=context)
    simple = normalize(call)
    verdicts = {b: judge(simple, host, tables, b, wishes) for b in tables.backends}
    rows = preferred(simple, host, tables)
    order = ranked(verdicts, rows, wishes)
    decision = Decision(
        call=call,
        host=host,
        policy=wishes,
        verdicts=tuple(verdicts.values()),
        order=order,
        selected=order[0] if order else None,
        why_this_order=why(rows, order),
    )
    if not advise:
        return decision
    advice = {
        "hints": what_if.hints(decision, tables, decide, judge),
        "stock": stock.predict(call, host, tables),
    }
    return decision.model_copy(update=advice)


def judge(call: Call, host: Host, tables: Tables, backend: str, policy: Policy) -> Verdict:
    """Return one backend's verdict on a normalised call, repairs included."""
    info = tables.info(host.arch, backend)
    found = _repaired(call, host, tables, backend)
    missing = missing_needs(host, info)
    status = _status(found.findings, missing)
    able = status != "rejected"
    options = options_for(found.call, host, tables, backend) if able else Options()
    return Verdict(
        backend=backend,
        status=status,
        findings=found.findings,
        repairs=found.repairs if able else (),
        missing=missing,
        extra_bytes=found.extra_bytes if able else 0,
        quadratic_bytes=found.quadratic_bytes if able else 0,
        score_bytes=stock.score_bytes(call) if info.memory == "quadratic" else 0,
        options=options.values,
        option_rows=options.rows,
        first_call_seconds=info.first_call_seconds if able else None,
        excluded=_exclusion(backend, status, policy),
    )


class _Repaired(NamedTuple):
    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...]
    extra_bytes: int
    quadratic_bytes: int
    call: Call


def _repaired(call: Call, host: Host, tables: Tables, backend: str) -> _Repaired:
    """Take recognised masks as what they say, unless that would only have to become a tensor again."""
    seen = repairs.apply("recognize_mask", call)
    if seen is None:
        return _repair_loop(call, host, tables, backend, [], [])
    given = evaluate(call, host, tables, backend)
    said = _repair_loop(seen[0], host, tables, backend, [given], ["recognize_mask"])
    if _is_able(said) and "materialize_mask" not in said.repairs:
        return said
    as_given = _repair_loop(call, host, tables, backend, [], [])
    return said if _is_able(said) and not _is_able(as_given) else as_given


def _is_able(found: _Repaired) -> bool:
    return not any(f.blocks for f in found.findings)


def _repair_loop(
    call: Call, host: Host, tables: Tables, backend: str, stages: list[list[Finding]], made: list[Repair]
) -> _Repaired:
    """Apply named repairs to the call, one at a time, until nothing that is left can be lifted."""
    counts = may_grow(call)
    extra = quadratic = 0
    while True:
        stages.append(evaluate(call, host, tables, backend))
        change = _next_repair(call, stages[-1], made)
        if change is None:
            return _Repaired(_told(stages, tuple(made)), tuple(made), extra, quadratic, call)
        repair, call, size = change
        made.append(repair)
        extra += size
        if counts and repair in BUILD_MASKS and holds_quadratic(call):
            quadratic += size


def _next_repair(call: Call, found: list[Finding], made: list[Repair]) -> tuple[Repair, Call, int] | None:
    """Return the first repair in order that a blocking finding names and that can be made."""
    wanted = {f.repair for f in found if f.blocks} - set(made)
    for repair in repairs.ORDER:
        if repair in wanted and (change := repairs.apply(repair, call)) is not None:
            return repair, *change
    return None


def _told(stages: list[list[Finding]], made: tuple[Repair, ...]) -> tuple[Finding, ...]:
    """Sum up one finding per row over the call as given and as repaired, the last stage being what runs.

    A row that blocked and no longer does was lifted; one that a repair itself broke blocks.
    """
    asked, final = {f.rule for f in stages[0]}, {f.rule: f for f in stages[-1]}
    first: dict[str, Finding] = {}
    for finding in (f for stage in stages for f in stage):
        first.setdefault(finding.rule, finding)
    told = []
    for rule, given in first.items():
        last = final.get(rule, given)
        if given.blocks and not (rule in final and last.blocks):
            lifted_by = given.repair if given.repair in made else made[-1]
            told.append(given.model_copy(update={"repaired_by": lifted_by}))
        elif last.outcome in ("fail", "unknown"):
            told.append(given if given.outcome == last.outcome else last)
        elif rule in asked:
            told.append(last if given.outcome == "fail" else given)
    return tuple(told)


def _status(found: tuple[Finding, ...], missing: tuple[str, ...]) -> Status:
    blocking = [f for f in found if f.blocks]
    if any(f.outcome == "fail" for f in blocking):
        return "rejected"
    if blocking:
        return "unknown"
    return "unavailable" if missing else "eligible"


def _exclusion(backend: str, status: Status, policy: Policy) -> Exclusion | None:
    if backend in policy.ban:
        return Exclusion(reason="banned", origin=policy.origin_of("ban"))
    if policy.require is not None and backend != policy.require:
        return Exclusion(reason="not_required", origin=policy.origin_of("require"))
    if policy.require is None and policy.allow is not None and backend not in policy.allow:
        return Exclusion(reason="not_allowed", origin=policy.origin_of("allow"))
    if policy.strict and backend in SLOW_TIER:
        return Exclusion(reason="strict", origin=policy.origin_of("strict"))
    if (said := dict(policy.failed).get(backend)) is not None:
        return Exclusion(reason="failed", origin=said)
    if status == "unknown" and (policy.strict or not policy.allow_unknown):
        setting = "strict" if policy.strict else "allow_unknown"
        return Exclusion(reason="unknown", origin=policy.origin_of(setting))
    return None
