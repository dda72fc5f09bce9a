"""Render what a call becomes on the ranks of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.question.line import render
from attnroute.report import sentences
from attnroute.report.layout import WIDTH, Line, field, item, laid_out, size
from attnroute.report.text import about, by_reason

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.engine.mesh import Part, Plan, Transfer, Way

_NAMES: Final = {
    "local": "each rank has all tokens of its batch rows and heads, and attention moves nothing between them",
    "ring": "each rank keeps its queries; keys and values pass through all ranks",
    "ulysses": "ranks exchange tokens for heads, and each computes with all tokens of some heads",
}
_MOVES: Final = {
    "passed_on": "keys and values pass through the ring{back}",
    "exchanged": "query, key, value and output are exchanged{back}",
    "summed": "gradients of key/value heads that ranks share are summed",
}
_BACK: Final = {
    "passed_on": ", in the backward again with the float32 sums of their gradients",
    "exchanged": ", and so are their gradients",
}


def render_plan(plan: Plan, width: int = WIDTH) -> str:
    """Return the call on one device, then each way with its local calls, bytes, times and what it loses.

    Args:
        plan: The plan.
        width: Columns that lines have at most, but for calls, which can be pasted back.
    """
    lines = [*about(plan.whole), field("mesh", _mesh(plan)), field("links", _links(plan))]
    lines.append(field("one GPU", _chosen(plan.whole)))
    for way in plan.ways:
        lines += [Line(""), *_way(way, plan)]
    if len(plan.ways) > 1:
        lines += [Line(""), field("fastest", _fastest(plan))]
    return laid_out(lines, width)


def _mesh(plan: Plan) -> str:
    mesh = plan.mesh
    sizes = ", ".join(f"{name}={count}" for name, count in mesh if count > 1) or "one rank"
    order = "; tp is innermost, then cp, then dp" if len(sizes.split(",")) > 1 else ""
    return f"{sizes}: {_ranks(mesh.ranks)}{order}"


def _links(plan: Plan) -> str:
    if plan.link is None:
        return "none is known between cards of this name, so no time of communication is predicted"
    title, gbs, gpus = plan.link
    inside = f"{title} at {gbs:g} GB/s each way" + (f" between {gpus} cards of a machine" if gpus > 1 else "")
    between = f", {plan.between[0]} at {plan.between[1]:g} GB/s beyond" if plan.between else ""
    return f"{inside}{between} [any/interconnect.toml]"


def _way(way: Way, plan: Plan) -> list[Line]:
    lines = [field(way.name, _NAMES[way.name])]
    if way.refused:
        return [*lines, item(f"not possible: {way.refused.removesuffix('.')}")]
    uneven = len(way.parts) > 1
    for part in way.parts:
        lines += _part(part, uneven=uneven)
    if uneven:
        lines.append(item("uneven: every rank waits for those with the most"))
    lost = [item(f"no longer {', '.join(names)}: {why}") for why, names in _lost(way, plan).items()]
    if not way.is_possible:
        return [*lines, *lost]
    if way.kv_copies > 1:
        lines.append(item(f"key/value heads are copied {way.kv_copies} times, so that each rank has one"))
    if way.kv_whole is not None:
        lines.append(item(_whole(way, way.kv_whole)))
    lines += [item(_transfer(transfer)) for transfer in way.transfers]
    lines.append(item(f"memory of tensors: {size(way.memory_bytes)} for each rank"))
    return [*lines, *lost, item(f"predicted {_total(way)}")]


def _whole(way: Way, held: int) -> str:
    then = ", and copied for each query head where those share them unevenly" if way.copies_heads else ""
    return f"key/value heads cannot be split as query heads are: all {held} are on each rank{then}"


def _part(part: Part, *, uneven: bool) -> list[Line]:
    lines = []
    for step in part.steps:
        who = _ranks(part.ranks) if uneven else "each rank"
        often = f", {step.times} times" if step.times > 1 else ""
        lines.append(Line(render(step.decision.call), f"{' ' * 11}- {who}{often}: ", wraps=False))
        lines.append(Line(_chosen(step.decision), " " * 13, " " * 13))
    return lines


def _chosen(decision: Decision) -> str:
    if decision.selected is None:
        return f"none: {sentences.why_none(decision)}"
    return sentences.selected(decision)


def _transfer(transfer: Transfer) -> str:
    parts = [f"forward {size(transfer.forward_bytes)}"] if transfer.forward_bytes else []
    parts += [f"backward {size(transfer.backward_bytes)}"] if transfer.backward_bytes else []
    back = _BACK.get(transfer.how, "") if transfer.backward_bytes else ""
    moves = _MOVES[transfer.how].format(back=back)
    took = "" if transfer.ms is None else f", {transfer.ms:.3g} ms"
    sent = f"{' and '.join(parts)}{took} ({moves})"
    return f"moved by each rank over {transfer.over}, in groups of {transfer.ranks}: {sent}"


def _lost(way: Way, plan: Plan) -> dict[str, list[str]]:
    """Return the backends that could run the whole call and no call of this way, by their reasons."""
    decisions = [step.decision for part in way.parts for step in part.steps]
    gone = [name for name in plan.whole.order if any(name not in d.order for d in decisions)]
    verdicts = [next(d.verdict(name) for d in decisions if name not in d.order) for name in gone]
    return by_reason(verdicts)


def _total(way: Way) -> str:
    if way.attention_ms is None:
        return "time: none, as attention was not measured for such calls"
    attention = f"{way.attention_ms:.3g} ms of attention"
    if way.waiting_ms is None:
        return attention
    hidden = any(transfer.how == "passed_on" for transfer in way.transfers)
    waits = "of waiting that its steps do not hide" if hidden else "of waiting"
    return f"{way.ms:.3g} ms: {attention} and {way.waiting_ms:.3g} ms {waits}" if way.transfers else attention


def _fastest(plan: Plan) -> str:
    possible = [way for way in plan.ways if way.is_possible]
    timed = [way for way in possible if way.ms is not None]
    if not possible:
        return "neither is possible"
    if len(timed) < len(possible):
        return "not known, as not all is measured"
    best = min(timed, key=lambda way: way.ms or 0.0)
    return f"{best.name}, predicted {best.ms:.3g} ms" + ("" if len(timed) > 1 else ", the only one possible")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
