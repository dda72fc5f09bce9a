"""Write one sentence or clause for each part of a decision, all of it from the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.engine.decision import REST
from attnroute.question.nodes import CausalNode, DenseNode, DocumentsNode, KeyPaddingNode, WindowNode
from attnroute.report.layout import size
from attnroute.tables.alternatives import alternatives

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision, Exclusion, Hint, Verdict
    from attnroute.engine.finding import Finding
    from attnroute.engine.stock import Stock
    from attnroute.question.call import Call
    from attnroute.question.host import Host
    from attnroute.question.nodes import RecognizedNode
    from attnroute.question.policy import Policy

_FIRST_VERSIONS: Final[tuple[str, ...]] = ("torch", "cuda", "cudnn")
_MASK_FORMS: Final = {
    "none": "",
    "is_causal": ", given is_causal",
    "dense_mask": ", given the mask as one bool tensor",
    "dense_bias": ", given mask and bias as one float tensor",
}
_NOT_DISTRIBUTIONS: Final = {"c++": "a C++ compiler", "avx2": "AVX2"}
_EXCLUSIONS: Final = {
    "banned": "banned by {origin}",
    "not_allowed": "not among those that {origin} allows",
    "not_required": "not the one that {origin} requires",
    "strict": "kept out by strict, set by {origin}",
    "failed": "kept out because it failed in this process: {origin}",
    "wrong": "kept out because attnroute tune found here that {origin}",
    "unknown": "not chosen without allow_unknown ({origin})",
    "memory": "kept out because it allocates {needed} and {free} are free",
}
_VERBS: Final = {"install": "installing", "upgrade": "upgrading to", "downgrade": "going back to"}
_BARRIERS: Final = {
    "banned": "the ban by {origin}",
    "not_allowed": "the list of {origin}",
    "not_required": "the requirement of {origin}",
    "strict": "strict, set by {origin}",
    "unknown": "the limit to known backends ({origin})",
}


def words(text: str) -> str:
    """Say a word of the closed lists as prose: "wrong_result" is "wrong result"."""
    return text.replace("_", " ")


def listed(items: list[str] | tuple[str, ...], last: str = "and") -> str:
    """Join words as a sentence does: "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def finding(found: Finding) -> str:
    """Say a finding: "requires X; got Y (because ...) [rule id]"."""
    unsure = ["unknown"] if found.outcome == "unknown" else []
    fault = [words(found.kind)] if found.kind != "limit" else []
    prefix = f"{', '.join(unsure + fault)}: " if unsure or fault else ""
    because = f" (because {found.because})" if found.because else ""
    lifted = f", lifted by {found.repaired_by}" if found.repaired_by else ""
    return f"{prefix}requires {found.requires}; got {found.got}{because} [{found.rule}]{lifted}"


def reason(found: Finding) -> str:
    """Say a finding without its row: what it is about is told apart from other calls by its reason."""
    fault = f"{words(found.kind)}: " if found.kind != "limit" else ""
    # That a backend has no softcap is no reason for requiring none.
    told = "" if "/feature-" in found.rule or not found.because else f" (because {found.because})"
    return f"{fault}requires {found.requires}; got {found.got}{told}"


def findings(verdict: Verdict) -> list[Finding]:
    """Return the findings worth saying: what failed or is not known, blocking ones first."""
    found = [f for f in verdict.findings if f.outcome in ("fail", "unknown")]
    return sorted(found, key=lambda f: not f.blocks)


def status(verdict: Verdict, decision: Decision) -> str:
    """Say a verdict in one clause: status, preparations, sizes, what is missing, who keeps it out."""
    selected = verdict.backend == decision.selected
    return ", ".join(["selected" if selected else verdict.status, *_details(verdict, decision)])


def selected(decision: Decision) -> str:
    """Say what was selected: its name, preparations, sizes, time."""
    verdict = decision.verdict(decision.selected or "")
    return ", ".join([verdict.backend, *_details(verdict, decision)])


def _details(verdict: Verdict, decision: Decision) -> list[str]:
    parts = []
    if verdict.backend == decision.selected and verdict.status != "eligible":
        parts.append(f"{verdict.status}, allowed by {decision.policy.origin_of('allow_unknown')}")
    if verdict.repairs:
        more = f" ({size(verdict.extra_bytes)} more)" if verdict.extra_bytes else ""
        parts.append(f"after {listed(verdict.repairs)}{more}")
    if verdict.score_bytes and verdict.status != "rejected":
        parts.append(f"{size(verdict.score_bytes)} of scores")
    parts += _time(verdict, decision)
    parts += [missing(need, decision.host) for need in verdict.missing]
    if verdict.excluded is not None:
        parts.append(exclusion(verdict.excluded))
    return parts


def _time(verdict: Verdict, decision: Decision) -> list[str]:
    """Say the predicted time; of a candidate without one that nothing was measured, if others have one."""
    parts, total = verdict.prediction, verdict.predicted_ms
    if parts is None or total is None:
        is_odd = verdict.backend in decision.order and is_timed(decision)
        return ["no measurement"] if is_odd else []
    said = f"{'measured' if parts.kind == 'tuned' else 'predicted'} {total:.3g} ms"
    if total > parts.device_ms:
        said = f"{said} of the host, {parts.device_ms:.3g} ms of the device"
    return [
        said + {"measured": "", "inferred": " (inferred)", "tuned": " here by attnroute tune"}[parts.kind]
    ]


def with_time(verdict: Verdict) -> str:
    """Say a backend with the time that is predicted for it, where one is: "fa3 1.69 ms"."""
    if verdict.prediction is None or verdict.predicted_ms is None:
        return verdict.backend
    inferred = " (inferred)" if is_inferred(verdict) else ""
    return f"{verdict.backend} {verdict.predicted_ms:.3g} ms{inferred}"


def is_timed(decision: Decision) -> bool:
    """Return whether predicted times made a part of the order."""
    timed = [v for v in decision.verdicts if v.measured_ms is not None and v.backend in decision.order]
    return len(timed) > 1


def is_inferred(verdict: Verdict) -> bool:
    """Return whether a verdict's time is computed from another architecture's, and so decides nothing."""
    return verdict.prediction is not None and verdict.prediction.kind == "inferred"


def missing(need: str, host: Host) -> str:
    """Say what a backend needs and the host has not."""
    names = alternatives(need)
    if len(names) == 1:
        return f"needs {needed(need)}, which {_why_not(need, host)}"
    if not host.broken.keys() & set(names):
        return f"needs {needed(need)}, none of which is installed"
    return f"needs {needed(need)}: {listed([f'{needed(n)} {_why_not(n, host)}' for n in names])}"


def _why_not(name: str, host: Host) -> str:
    if name in host.broken:
        return f"cannot be used ({host.broken[name]})"
    return f"is not {'there' if name in _NOT_DISTRIBUTIONS else 'installed'}"


def needed(need: str) -> str:
    """Say what a backend needs: a distribution has its name, anything else is described."""
    return listed([_NOT_DISTRIBUTIONS.get(name, name) for name in alternatives(need)], "or")


def exclusion(excluded: Exclusion) -> str:
    """Say why a backend is excluded, and which setting does it."""
    needed, free = size(excluded.needed_bytes), size(excluded.free_bytes)
    return _EXCLUSIONS[excluded.reason].format(origin=excluded.origin, needed=needed, free=free)


def barrier(excluded: Exclusion) -> str:
    """Name the setting that keeps a backend out, to stand behind "without"."""
    return _BARRIERS[excluded.reason].format(origin=excluded.origin)


def why_none(decision: Decision) -> str:
    """Say that nothing may run the call, or who required what may not."""
    required = decision.policy.require
    if required is None:
        return "no backend may run this call"
    return f"{required} is required by {decision.policy.origin_of('require')} and may not run this call"


def why_selected(decision: Decision) -> str:
    """Say what put the selected backend first."""
    selected, policy = decision.selected, decision.policy
    if policy.require is not None and policy.require == selected:
        return f"required by {policy.origin_of('require')}"
    if len(decision.order) == 1:
        return "the only one that may run this call"
    if selected in policy.prefer:
        return f"preferred by {policy.origin_of('prefer')}"
    if policy.allow is not None:
        return f"first of those that {policy.origin_of('allow')} allows"
    if is_timed(decision) and decision.verdict(selected or "").measured_ms is not None:
        prediction = decision.verdict(selected or "").prediction
        is_tuned = prediction is not None and prediction.kind == "tuned"
        kind = "measured" if is_tuned else "predicted"
        return f"first of {len(decision.order)} that may run, by {kind} time"
    rows, reason = preferences(decision)
    if not reason:
        return "first by name, because no preference applies"
    return f"first of those that may run, because {reason} [{rows[0]}]"


def order_by(decision: Decision) -> str:
    """Say what made the order: predicted times and where they come from, preferences, or names."""
    rows, _ = preferences(decision)
    by = f"by {listed([f'[{row}]' for row in rows]) or 'name'}"
    if not is_timed(decision):
        return f"{by}; their times are unmeasured"
    times, rest, _ = decision.why_this_order.partition(REST)
    return f"by {times}{f'; the others {by}' if rest else ''}"


def preferences(decision: Decision) -> tuple[list[str], str]:
    """Return the rows that placed what has no predicted time, and the reason of the first.

    Both are empty where none applies.
    """
    why = decision.why_this_order
    rows, _, reason = (why.partition(REST)[2] if is_timed(decision) else why).partition(": ")
    return (rows.split(", "), reason) if reason else ([], "")


def host_line(host: Host) -> str:
    """Say a machine in one line: what is known, then what was assumed and why."""
    stated = [n for n in host.versions if n not in host.assumed]
    names = [n for n in _FIRST_VERSIONS if n in stated]
    names += sorted(set(stated) - set(names))
    parts = [host.arch, *([host.device_name] if host.device_name else [])]
    free = [] if host.free_memory is None else [f"{size(host.free_memory)} free"]
    known = ", ".join([*parts, *(f"{name} {host.versions[name]}" for name in names), *free])
    return "; ".join([known, *assumptions(host)])


def assumptions(host: Host) -> list[str]:
    """Say what nobody stated, by the reason for which it was assumed, and what is not known."""
    names_of: dict[str, list[str]] = {}
    for name, why in host.assumed.items():
        names_of.setdefault(why, []).append(name)
    assumed, open_ones = [], []
    for why, names in names_of.items():
        if versions := ", ".join(f"{name} {host.versions[name]}" for name in names if name in host.versions):
            assumed.append(f"assumed {versions} ({why})")
        else:
            open_ones.append(f"nothing about {listed(names)}, {why}")
    return [*assumed, *open_ones]


def settings(policy: Policy) -> list[str]:
    """Return each setting that somebody stated, with who did."""
    stated = {
        "require": policy.require,
        "prefer": listed(policy.prefer),
        "allow": None if policy.allow is None else listed(policy.allow) or "nothing",
        "ban": listed(policy.ban),
        "strict": "on" if policy.strict else "",
        "allow_unknown": "on" if policy.allow_unknown else "",
        "recognize": "" if policy.recognize else "off",
        "expected_calls": f"{policy.expected_calls:,}" if "expected_calls" in policy.origin else "",
        "tables": str(policy.tables or ""),
        "tuning": "off" if policy.tuning is False else "" if policy.tuning is True else str(policy.tuning),
        "context_parallel": policy.context_parallel,
        "transform": policy.transform,
    }
    return [f"{words(name)} {value} ({policy.origin_of(name)})" for name, value in stated.items() if value]


def tuned(policy: Policy) -> list[str]:
    """Say what `attnroute tune` measured of such calls, or why its file is not used."""
    measured = policy.measured
    if measured is None:
        return []
    if measured.differences:
        clause = f"{measured.file} is not used, as it was measured with {listed(measured.differences)}"
        return [f"{clause}; `attnroute tune` measures again"]
    names = listed([name for name, *_ in measured.times])
    stays = f"{measured.stays} stays unless another one is faster by {100 * measured.margin:g} %"
    return [f"{names} measured on {measured.day}; {stays} ({measured.file})"]


def recognized(call: Call) -> list[str]:
    """Say what was seen in each dense mask that somebody looked into."""
    return [
        f"the bool tensor {'x'.join(map(str, node.shape))} was recognised as {_nodes_clause(node.recognized)}"
        for node in call.mask
        if isinstance(node, DenseNode) and node.recognized is not None
    ]


def _nodes_clause(nodes: tuple[RecognizedNode, ...]) -> str:
    return listed([_node_clause(node) for node in nodes]) or "no mask at all"


def _node_clause(node: RecognizedNode) -> str:
    if isinstance(node, CausalNode):
        return f"causal ({words(node.alignment)})"
    if isinstance(node, WindowNode):
        left, right = ("open" if side is None else side for side in (node.left, node.right))
        return f"window (left {left}, right {right}, {words(node.alignment)})"
    if isinstance(node, DocumentsNode):
        return "documents" if node.lengths is None else f"{len(node.lengths)} documents"
    if isinstance(node, KeyPaddingNode):
        if node.lengths and not any(node.lengths):
            return "no key at all"
        return "key padding" if node.side == "any" else f"key padding on the {node.side}"
    return f"causal behind a prefix ({words(node.alignment)})"


def stock(predicted: Stock, decision: Decision) -> str:
    """Say what stock scaled_dot_product_attention would run."""
    if predicted.inexpressible:
        return f"cannot say {listed([words(part) for part in predicted.inexpressible], 'or')}"
    if predicted.backend == "none":
        return "would raise, because none of its kernels takes this call"
    if predicted.backend == "unknown":
        return f"not known for torch {decision.host.versions.get('torch', 'that is not installed')}"
    if predicted.backend == decision.selected:
        kernel = "would run the same kernel"
    else:
        kernel = f"would run {predicted.backend}"
    scores = f", {size(predicted.score_bytes)} of scores" if predicted.score_bytes else ""
    return f"{kernel}{scores}{_MASK_FORMS[predicted.mask_form]}{_faults(predicted.backend, decision)}"


def _faults(backend: str, decision: Decision) -> str:
    """Name the known faults of a kernel that stock attention would run without looking."""
    verdicts = [v for v in decision.verdicts if v.backend == backend]
    faults = [f for v in verdicts for f in v.findings if f.kind in ("wrong_result", "crash", "hang")]
    named = [f"{words(f.kind)} [{f.rule}]" for f in faults if f.outcome == "fail"]
    return f", in spite of a known {listed(named)}" if named else ""


def hint(found: Hint, selected: str | None = None) -> str:
    """Say one change that opens a faster route, with both predicted times where there are two."""
    verb = "keep" if found.selects == selected else "select"
    would = f"would make {found.allows} eligible" if found.allows else f"would {verb} {found.selects}"
    if found.now_ms is not None and found.then_ms is not None:
        would = f"{would}, predicted {found.then_ms:.3g} ms in place of {found.now_ms:.3g} ms"
    packages = ((found.change, found.version, found.below), *found.also)
    if found.kind == "mask_object":
        name = "".join(part.capitalize() for part in found.change.split("_"))
        return f"if the mask tensor is {words(found.change)}, masks.{name}() in its place {would}"
    if found.kind in _VERBS:
        return f"{_VERBS[found.kind]} {listed([_release(*package) for package in packages])} {would}"
    if found.also:
        added = listed([_release(*package) for package in found.also])
        return f"{found.change}, and installing {added}, {would}"
    return f"{found.change} {would}"


def _release(name: str, version: str | None, below: str | None) -> str:
    """Say a distribution with the versions that would do."""
    bounds = [f">= {version}"] if version else []
    bounds += [f"< {below}"] if below else []
    return " ".join([needed(name), *([", ".join(bounds)] if bounds else [])])


def arranged(decision: Decision) -> list[Verdict]:
    """Return every verdict: the candidates in their order, then the rest, the slow tier last."""
    places = {backend: place for place, backend in enumerate(decision.order)}
    ranks = {"eligible": 0, "unavailable": 1, "unknown": 2, "rejected": 3}

    def place(verdict: Verdict) -> tuple[int, int, bool, str]:
        backend = verdict.backend
        return (places.get(backend, len(places)), ranks[verdict.status], verdict.score_bytes > 0, backend)

    return sorted(decision.verdicts, key=place)
