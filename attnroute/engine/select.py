"""Choose a backend for one call: the only place where that happens.

A `Selection` holds what was chosen and what every row answered. It makes no sentences, which most calls never
need: `attnroute.engine.decide` describes it as a `Decision` where somebody reads the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from attnroute.engine.costs import Cost
from attnroute.engine.decision import Exclusion
from attnroute.engine.evaluate import Evaluation, Form, Prepared, prepared
from attnroute.engine.measured import concerning, lead, measured_cost
from attnroute.engine.options import Options, options_for
from attnroute.engine.quadratic import holds_quadratic, may_grow, score_bytes, tensor_bytes
from attnroute.engine.rank import Standing, preferred, ranked, time_ms
from attnroute.engine.repairs import ORDER
from attnroute.question import fits
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables
from attnroute.tables.rows import PreferenceRow
from attnroute.vocabulary import BUILD_MASKS, Repair, Status


@dataclass(frozen=True, slots=True)
class Stages:
    """The rows of one backend held against a call as given, and again after each repair.

    Attributes:
        evaluations: In this order; the last one is what would run.
        repairs: What was repaired, in order.
        sizes: What each of them allocates, in bytes.
        quadratic_bytes: How many of these are a mask that makes memory quadratic.
    """

    evaluations: tuple[Evaluation, ...]
    repairs: tuple[Repair, ...]
    sizes: tuple[int, ...]
    quadratic_bytes: int

    @property
    def extra_bytes(self) -> int:
        """What the repairs allocate together."""
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Judgement:
    """What the rows say about one backend.

    Attributes:
        rows: The rows of the backend on this host.
        form: The call as given.
        policy: The settings in force.
        free_memory: Bytes of the device that are free; None where nobody asked.
    """

    rows: Prepared
    form: Form
    policy: Policy
    free_memory: int | None = None

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.rows.backend

    @cached_property
    def stages(self) -> Stages:
        """Every row's answer, before and after each repair."""
        return _repaired(self.rows, self.form)

    @cached_property
    def status(self) -> Status:
        """Rejected > unknown > unavailable > eligible: the worst that applies."""
        if self.rows.never_runs:
            return "rejected"
        outcomes = [outcome for _, _, outcome, _ in self.final.blocking]
        if "fail" in outcomes:
            return "rejected"
        if outcomes:
            return "unknown"
        return "unavailable" if self.rows.missing else "eligible"

    @property
    def is_able(self) -> bool:
        """Whether no row rejects the backend."""
        return self.status != "rejected"

    @cached_property
    def final(self) -> Evaluation:
        """Every row's answer about the call as the kernel gets it."""
        return self.stages.evaluations[-1]

    @property
    def is_slow(self) -> bool:
        """Whether a row says that the backend is slow for this call."""
        return bool(self.final.slow)

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What must be done to the call first, in order."""
        return self.stages.repairs if self.is_able else ()

    @property
    def quadratic_bytes(self) -> int:
        """The bytes of a mask with an entry for every query and key that the repairs build."""
        return self.stages.quadratic_bytes if self.is_able else 0

    @cached_property
    def cost(self) -> Cost | None:
        """What the call is predicted to take, None where nothing was measured that speaks about it."""
        if (tuned := self._tuned) is not None:
            return tuned
        final, sizes = self.final.form.call, self.stages.sizes
        return self.rows.cost(self.form.call, final, self.repairs, sizes) if self._is_measured else None

    @property
    def _tuned(self) -> Cost | None:
        """What was measured of such calls on this machine."""
        return measured_cost(self.backend, self.policy.measured) if self.is_able else None

    @property
    def _is_measured(self) -> bool:
        """Whether times of the kernel hold: not of these versions where a row says that they are slow."""
        return self.is_able and not any(row.rule.versions for row in self.final.slow)

    @cached_property
    def standing(self) -> Standing:
        """What the place of the backend depends on; lengths count rounded."""
        cost, mask_bytes = self._rounded_cost()
        cost = None if cost is None or cost.kind == "inferred" else cost
        compiling, rounded = self.rows.info.first_call_seconds, self.form.rounded.call
        shared = 0.0 if compiling is None else max(compiling) * 1000 / self.policy.expected_calls
        stays = lead(self.backend, self.policy.measured)
        return Standing(
            is_certain=self.status == "eligible",
            time_ms=None if cost is None else time_ms(cost, rounded) * stays + shared + self.plan_share_ms,
            builds=self.quadratic_bytes > 0 and (cost is None or mask_bytes > tensor_bytes(rounded)),
            is_slow=self.is_slow,
        )

    @property
    def plan_ms(self) -> float:
        """What a plan takes that is made for each new shape, in milliseconds; 0 where none is."""
        is_composed = "backward_from_chunked" in self.repairs
        return self.rows.plan_ms("inference" if is_composed else self.form.call.phase)

    @property
    def plan_share_ms(self) -> float:
        """What of that falls to one of the calls that share the plan."""
        policy, varies = self.policy, self.form.call.context.shapes_vary
        calls = min(policy.calls_per_step, policy.expected_calls) if varies else policy.expected_calls
        return self.plan_ms / calls

    def _rounded_cost(self) -> tuple[Cost | None, int]:
        """Predict the time at rounded lengths; return it with the bytes of masks that are built."""
        if (tuned := self._tuned) is not None:
            return tuned, self.quadratic_bytes
        if not self._is_measured:
            return None, 0
        form, mask_bytes = self.form.rounded, 0
        sizes: list[int] = []
        for repair in self.repairs:
            # One that the rounded lengths do not need changes nothing.
            form, size = form.repaired(repair) or (form, 0)
            sizes.append(size)
            mask_bytes += size if repair in BUILD_MASKS else 0
        return self.rows.cost(self.form.rounded.call, form.call, self.repairs, tuple(sizes)), mask_bytes

    @cached_property
    def options(self) -> Options:
        """Tile options that rows state for the kernel on this call."""
        if not self.is_able:
            return Options()
        return options_for(self.final.form, self.rows)

    @property
    def score_bytes(self) -> int:
        """What a quadratic backend allocates for its scores, in bytes; 0 for the others."""
        return score_bytes(self.form.call) if self.rows.info.memory == "quadratic" else 0

    @cached_property
    def excluded(self) -> Exclusion | None:
        """Why policy or the free memory keeps the backend out, whatever its verdict."""
        return _exclusion(self.rows, self.status, self.policy) or self._without_room()

    @property
    def needed_bytes(self) -> int:
        """What the backend allocates besides the output: for its repairs, and for scores."""
        return (self.stages.extra_bytes if self.is_able else 0) + self.score_bytes

    def _without_room(self) -> Exclusion | None:
        """A backend that is required runs, and the device says what it lacks."""
        free, needed = self.free_memory, self.needed_bytes
        if free is None or needed <= free or self.policy.require is not None:
            return None
        return Exclusion(reason="memory", origin="the device", needed_bytes=needed, free_bytes=free)


@dataclass(frozen=True, eq=False)
class Selection:
    """What was chosen for one call, and what every row answered.

    Attributes:
        call: The call, as given.
        host: The machine.
        policy: The settings in force.
        tables: The capability tables.
        judgements: One for each backend of the tables.
        preferences: Those that apply to the call, the one that counts most first.
        order: The candidates in the order in which they would run.
    """

    call: Call
    host: Host
    policy: Policy
    tables: Tables = field(repr=False)
    judgements: dict[str, Judgement] = field(repr=False)
    preferences: tuple[PreferenceRow, ...]
    order: tuple[str, ...]

    @property
    def selected(self) -> str | None:
        """The first of `order`, None when nothing may run."""
        return self.order[0] if self.order else None


def select(call: Call, host: Host, tables: Tables, policy: Policy) -> Selection:
    """Choose a backend for one call on one machine.

    Raises:
        ArgumentError: The parts of the call do not fit together, as `attention()` would say of its tensors.
        TableError: The tables are malformed or do not describe the host's architecture.
    """
    fits.check(call)
    if policy.transform is not None and call.context.transform is None:
        call = call.changed(context=call.context.changed(transform=policy.transform))
    policy = concerning(call, policy)
    form = Form(normalize(call))
    rows, free = prepared(tables, host.lasting), host.free_memory
    judgements = {name: Judgement(found, form, policy, free) for name, found in rows.items()}
    preferences = preferred(form.facts, host, tables)
    order = ranked(judgements, preferences, policy, tables.slow_tier)
    return Selection(call, host, policy, tables, judgements, preferences, order)


def repaid_after(selection: Selection) -> int | None:
    """Return after how many calls of its shape a plan would have paid that was not made, as shapes vary.

    Until then these calls lost as much as the plan takes, so that making it can at most double their loss,
    however seldom the shape comes back afterwards.

    Returns:
        None where no plan would have been made for a shape that stays.
    """
    call, selected = selection.call, selection.selected
    if selected is None or not call.context.shapes_vary:
        return None
    lasting = call.changed(context=call.context.changed(shapes_vary=False))
    found = select(lasting, selection.host, selection.tables, selection.policy)
    planned = found.judgements[found.selected or selected]
    own_ms, its_ms = selection.judgements[selected].standing.time_ms, planned.standing.time_ms
    if planned.backend == selected or own_ms is None or its_ms is None or its_ms >= own_ms:
        return None
    return ceil(planned.plan_ms / (own_ms - its_ms))


def _repaired(rows: Prepared, form: Form) -> Stages:
    """Take recognised masks as what they say, unless that would only have to become a tensor again."""
    recognized = form.repaired("recognize_mask")
    if recognized is None:
        return _repair(rows, form, [], [])
    given = Evaluation(rows, form)
    by_nodes = _repair(rows, recognized[0], [given], ["recognize_mask"])
    if _may_run(by_nodes) and "materialize_mask" not in by_nodes.repairs:
        return by_nodes
    as_given = _repair(rows, form, [], [])
    return by_nodes if _may_run(by_nodes) and not _may_run(as_given) else as_given


def _may_run(stages: Stages) -> bool:
    return not stages.evaluations[-1].blocking


def _repair(rows: Prepared, form: Form, before: list[Evaluation], made: list[Repair]) -> Stages:
    """Apply the repairs that rows name, one at a time, until nothing that is left can be lifted."""
    given, quadratic, sizes = form, 0, [0] * len(made)
    while True:
        evaluation = Evaluation(rows, form)
        before.append(evaluation)
        change = _next_repair(evaluation, made)
        if change is None:
            return Stages(tuple(before), tuple(made), tuple(sizes), quadratic)
        repair, form, size = change
        made.append(repair)
        sizes.append(size)
        if repair in BUILD_MASKS and holds_quadratic(form.facts) and may_grow(given.facts):
            quadratic += size


def _next_repair(evaluation: Evaluation, made: list[Repair]) -> tuple[Repair, Form, int] | None:
    """Return the first repair in order that a blocking row names and that can be made."""
    wanted = {repair for _, _, _, repair in evaluation.blocking}.difference(made)
    for repair in ORDER if wanted else ():
        if repair in wanted and (change := evaluation.form.repaired(repair)) is not None:
            return repair, *change
    return None


def _exclusion(rows: Prepared, status: Status, policy: Policy) -> Exclusion | None:
    backend = rows.backend
    if backend in policy.ban:
        return Exclusion(reason="banned", origin=policy.origin_of("ban"))
    if policy.require is not None and backend != policy.require:
        return Exclusion(reason="not_required", origin=policy.origin_of("require"))
    if policy.require is None and policy.allow is not None and backend not in policy.allow:
        return Exclusion(reason="not_allowed", origin=policy.origin_of("allow"))
    if policy.strict and rows.info.memory == "quadratic":
        return Exclusion(reason="strict", origin=policy.origin_of("strict"))
    if policy.failed and (message := dict(policy.failed).get(backend)) is not None:
        return Exclusion(reason="failed", origin=message)
    if policy.measured is not None and (error := dict(policy.measured.wrong).get(backend)) is not None:
        return Exclusion(reason="wrong", origin=error)
    if status == "unknown" and (policy.strict or not policy.allow_unknown):
        setting = "strict" if policy.strict else "allow_unknown"
        return Exclusion(reason="unknown", origin=policy.origin_of(setting))
    return None
