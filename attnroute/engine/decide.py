"""`decide`: what was selected for a call, described as data with every reason, and what would change it."""

from __future__ import annotations

from attnroute.engine import stock
from attnroute.engine.advice import what_if, why_not
from attnroute.engine.decision import Decision, Prediction, Verdict, WhyNot
from attnroute.engine.evaluate import Form, prepared
from attnroute.engine.finding import Finding
from attnroute.engine.rank import time_ms, why
from attnroute.engine.select import Judgement, Selection, Stages, select
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables
from attnroute.tables.load import load


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
        policy: The user's settings; none by default.
        advise: Also compute hints and what stock scaled_dot_product_attention would run.

    Returns:
        The decision; `selected` is None when nothing may run.

    Raises:
        ArgumentError: The parts of the call do not fit together, as `attention()` would say of its tensors.
        TableError: The tables are malformed or do not describe the host's architecture.
    """
    policy = policy or Policy()
    return describe(select(call, host, tables or load(policy.tables), policy), advise=advise)


def describe(selection: Selection, *, advise: bool = False) -> Decision:
    """Return a selection with every row's answer as a finding, and with advice if that is wanted."""
    costs = {name: selection.judgements[name].cost for name in selection.order}
    decision = Decision(
        call=selection.call,
        host=selection.host,
        policy=selection.policy,
        verdicts=tuple(map(_verdict, selection.judgements.values())),
        order=selection.order,
        selected=selection.selected,
        why_this_order=why(selection.preferences, selection.order, costs),
    )
    if not advise:
        return decision
    call, host, tables = selection.call, selection.host, selection.tables
    return decision.model_copy(
        update={"hints": what_if.hints(selection), "stock": stock.predict(call, host, tables)}
    )


def explain_why_not(call: Call, host: Host, tables: Tables, policy: Policy, backend: str) -> WhyNot:
    """Say why one backend is not selected for a call, and which single changes would select it.

    Raises:
        ArgumentError: The parts of the call do not fit together.
        TableError: The tables are malformed or do not describe the host's architecture.
    """
    selection = select(call, host, tables, policy)
    return WhyNot(
        backend=backend,
        decision=describe(selection),
        behind=why_not.puts_behind(selection, backend),
        changes=why_not.changes(selection, backend),
    )


def judge(call: Call, host: Host, tables: Tables, backend: str, policy: Policy) -> Verdict:
    """Return one backend's verdict on a normalised call, repairs included."""
    return _verdict(Judgement(prepared(tables, host)[backend], Form(call), policy))


def _verdict(judgement: Judgement) -> Verdict:
    info, stages = judgement.rows.info, judgement.stages
    able, cost = judgement.is_able, judgement.cost
    return Verdict(
        backend=judgement.backend,
        status=judgement.status,
        findings=_merged(stages),
        repairs=judgement.repairs,
        missing=judgement.rows.missing,
        predicted_ms=None if cost is None else time_ms(cost, judgement.form.call),
        prediction=None if cost is None else Prediction(**cost._asdict()),
        plan_ms=judgement.plan_ms,
        plan_share_ms=judgement.plan_share_ms,
        extra_bytes=stages.extra_bytes if able else 0,
        quadratic_bytes=judgement.quadratic_bytes,
        score_bytes=judgement.score_bytes,
        options=judgement.options.values,
        option_rows=judgement.options.rows,
        first_call_seconds=info.first_call_seconds if able else None,
        excluded=judgement.excluded,
    )


def _merged(stages: Stages) -> tuple[Finding, ...]:
    """Return one finding per row over the call as given and as repaired, the last stage being what runs.

    A row that blocked and no longer does was lifted; one that a repair itself broke blocks.
    """
    made, all_findings = stages.repairs, [evaluation.findings() for evaluation in stages.evaluations]
    given_rules, final = {f.rule for f in all_findings[0]}, {f.rule: f for f in all_findings[-1]}
    first: dict[str, Finding] = {}
    for finding in (f for findings in all_findings for f in findings):
        first.setdefault(finding.rule, finding)
    merged = []
    for rule, given in first.items():
        last = final.get(rule, given)
        if given.blocks and not (rule in final and last.blocks):
            lifted_by = given.repair if given.repair in made else made[-1]
            merged.append(given.model_copy(update={"repaired_by": lifted_by}))
        elif last.outcome in ("fail", "unknown"):
            merged.append(given if given.outcome == last.outcome else last)
        elif rule in given_rules:
            merged.append(last if given.outcome == "fail" else given)
    return tuple(merged)
