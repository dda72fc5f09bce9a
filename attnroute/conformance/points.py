"""Finds calls just inside and just outside of a row, which its backend takes but for that row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

from attnroute.conformance.changes import changed, neighbours, smaller, variants
from attnroute.conformance.trials import Trial, Values
from attnroute.engine.evaluate import Form, Prepared, outcomes_of, prepared
from attnroute.engine.examples import read_example
from attnroute.engine.select import Judgement
from attnroute.errors import AttnRouteError
from attnroute.question.call import Call, Strides
from attnroute.question.facts import Facts
from attnroute.question.facts.sizes import mask_tensor_elements
from attnroute.question.host import Host, device_of
from attnroute.question.line import parse, render
from attnroute.question.nodes import DocumentsNode, KeyPaddingNode
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.report.sentences import listed
from attnroute.tables.conditions import Spec
from attnroute.tables.folders import Tables
from attnroute.tables.points import options_of
from attnroute.tables.rows import FeatureRow, RuleRow
from attnroute.tables.schema import boxes_of
from attnroute.vocabulary import DTYPE_BYTES, Outcome

_INSIDE: Final = 2
"""Calls that a row lets pass: one near its own example, one at the edge of its condition."""
_OUTSIDE: Final = 4
"""Calls that it rejects, those of which all must be right before it counts as too strict."""
_ARGUED: Final = 3
"""The same, where the row says why it refuses them although they are right."""
_LOOKED_AT: Final = 400
"""Calls of which a row is asked about, and of those the backend, for each side."""
_MOST_WORK: Final = {"cpu": 2**31, "cuda": 2**44}
"""Multiplications of a call that is run: a second, about, with its reference."""
_MOST_BYTES: Final = {"cpu": 2**28, "cuda": 18 * 2**30}
"""Bytes of query, key, value, output and mask."""
_LARGE: Final = 2**29
"""Bytes of a call beyond which it is not run beside too many others."""
_RISKY: Final = frozenset({"crash", "hang", "wrong_result"})
_MOST_LIFTED: Final = 4
"""Rows past which a kernel is given a call that several of them reject."""
_UNMADE: Final = ("transform", "distributed")
"""What surrounds a call that is not made here."""
_ORDERS: Final = (("bhsd",) * 3, ("bshd",) * 3)
_FURTHEST: Final = ("sbhd",) * 3
"""What lies between two tokens is then the whole batch: as far as facts such as `key_reach` take it to be."""


class Side(NamedTuple):
    """The trials on one side of a row; without any, why."""

    trials: tuple[Trial, ...] = ()
    reason: str = ""


class Points(NamedTuple):
    """The trials of one row for one backend.

    Attributes:
        row: The row.
        backend: The backend.
        inside: Calls that the row takes: they must be right.
        outside: Calls that it rejects: they must not be.
        reason: Why nothing can be tried, where nothing can.
        compiles: The backend compiles each kind of call for seconds.
        is_here: The machine has what the backend needs, in versions that are known.
    """

    row: RuleRow
    backend: str
    inside: Side
    outside: Side
    reason: str = ""
    compiles: bool = False
    is_here: bool = True

    @property
    def has_inside(self) -> bool:
        """Whether the row lets any call pass to which it applies, or that it is about."""
        return (
            self.row.rule.requires != "never" or self.row.rule.when != {} or self.row.rule.phase is not None
        )


def points_of(tables: Tables, host: Host, backend: str) -> Iterator[Points]:
    """Give the points of each row of a backend that applies to a machine."""
    rows = prepared(tables, host)[backend]
    if rows.never_runs or rows.rows is None:
        return
    for active in rows.active:
        yield _Finder(rows, active.row).points(active.is_certain)


def stock_rows(tables: Tables, host: Host) -> Iterator[Points]:
    """Give the rows that bind torch's own selector alone, which nothing here asks."""
    for backend in tables.backends:
        for row in tables.rules(host.arch, backend) or ():
            if row.rule.scope == "stock":
                yield Points(
                    row,
                    backend,
                    Side(),
                    Side(),
                    "it binds torch's own selector alone, which attnroute does not ask",
                )


class _Found(NamedTuple):
    """A call, and the rows that do not count for it."""

    call: Call
    past: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Finder:
    """Finds the points of one row of a backend on one host."""

    rows: Prepared
    row: RuleRow

    def points(self, is_certain: bool) -> Points:
        """Return the trials on both sides, or why there are none."""
        reason = self._reason(is_certain)
        if reason:
            is_here = not (self.rows.missing or self.rows.outside)
            return Points(self.row, self.rows.backend, Side(), Side(), reason, is_here=is_here)
        outside = self._found(self._seeds, self._outside_of, _OUTSIDE)
        inside = self._found([*self._seeds, *(found.call for found in outside)], self._inside_of, _INSIDE)
        if inside and not outside:
            outside = self._found([found.call for found in inside], self._outside_of, _OUTSIDE)
        outside = outside or self._found(self._seeds, self._beside_others, _OUTSIDE)
        if not (inside or outside):
            return Points(
                self.row, self.rows.backend, Side(), Side(), "attention() makes no call that it is about"
            )
        return Points(
            self.row,
            self.rows.backend,
            self._inside(inside),
            self._outside(outside),
            compiles=self._compiles,
        )

    def _reason(self, is_certain: bool) -> str:
        rule = self.row.rule
        if self.rows.missing:
            return f"it needs {listed(self.rows.missing)}, which is not here"
        if self.rows.outside:
            return (
                f"the tables say nothing about {listed([f'{n} {v}' for n, v in self.rows.outside.items()])}"
            )
        if rule.kind == "slow":
            return "a row of kind slow says nothing about results; `attnroute tune` measures it"
        if not is_certain:
            return "the machine does not state a version that the row is about"
        unmade = [name for name in _UNMADE if any(name == field for field, _ in self._conditions)]
        return f"no call with a {unmade[0]} is made here" if unmade else ""

    @property
    def _compiles(self) -> bool:
        return self.rows.info.first_call_seconds is not None

    @cached_property
    def _device(self) -> str:
        return device_of(self.rows.host.arch)

    @cached_property
    def _alone(self) -> Prepared:
        """The backend with this row alone."""
        return replace(self.rows, rows=(self.row,))

    @cached_property
    def _conditions(self) -> list[tuple[str, Spec]]:
        """What the row asks about, what it requires first."""
        rule = self.row.rule
        boxes = [*boxes_of(rule.requires), *boxes_of(rule.when)]
        found: list[tuple[str, Spec]] = [item for box in boxes for item in box.items()]
        return [*found, ("phase", ["training", "inference"])] if rule.phase else found

    @cached_property
    def _seeds(self) -> list[Call]:
        """The row's own examples, whatever they say of versions: this machine has its own."""
        found = []
        for text in (*options_of(self.row.rule.refuses or []), *options_of(self.row.rule.takes or [])):
            with suppress(AttnRouteError):  # The lint says so.
                found.append(_with_documents(read_example(text).call))
        return found

    def _found(self, seeds: list[Call], accept: Callable[[Call], _Found | None], most: int) -> list[_Found]:
        """Return some calls of one side: the first near an example, the others nearest to the edge.

        Calls that train stand behind others of the same kind, as their kernels are others.
        """
        found: list[_Found] = []
        seen: set[str] = set()
        for call in islice(self._around(seeds, most > _INSIDE), _LOOKED_AT):
            simple = normalize(call)
            line = render(simple)
            if line in seen or not self._fits(simple):
                continue
            seen.add(line)
            if (one := accept(simple)) is not None:
                found.append(one)
            if len(found) == most:
                break
        return found

    def _around(self, seeds: list[Call], both_phases: bool) -> Iterator[Call]:
        """Give the seeds, what one change makes of them, and what two do."""
        small = [call for seed in seeds for call in smaller(seed)]
        near = (*seeds, *(seed for seed in small if not any(map(self._fits, seeds))))
        for call in near:
            yield call
            if both_phases:
                yield from changed(call, "phase", "training")
        once = [call for seed in seeds for call in neighbours(seed, self._conditions)]
        yield from once
        for call in (*seeds, *once[:20]):
            yield from variants(call)
        for call in (*small, *once[:60]):
            yield from neighbours(call, self._conditions)

    def _fits(self, call: Call) -> bool:
        is_packed = call.layout == "thd"
        # Lengths of their own for queries and keys of documents only a packed batch states.
        if (is_packed and call.batch != 1) or (not is_packed and Facts(call)["documents_cross"]):
            return False
        work = call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
        work *= call.head_dim_qk + call.head_dim_v
        return work <= _MOST_WORK[self._device] and bytes_of(call) <= _MOST_BYTES[self._device]

    def _says(self, call: Call) -> Outcome:
        (outcome,) = outcomes_of(self._alone, Form(call))
        return outcome

    def _inside_of(self, call: Call) -> _Found | None:
        """Accept a call that the row lets pass and the backend runs."""
        says = self._says(call)
        # A row that rejects all to which it applies has its inside beside it.
        beside = self.row.rule.requires == "never" and says == "not_applicable"
        judgement = Judgement(self.rows, Form(call), Policy())
        return _Found(call) if (says == "pass" or beside) and judgement.status == "eligible" else None

    def _outside_of(self, call: Call) -> _Found | None:
        """Accept a call that the row rejects, and that the backend would run but for it."""
        return self._lifted(call, most=1)

    def _beside_others(self, call: Call) -> _Found | None:
        """Accept a call that some other rows reject too: what the row says of it can be seen all the same."""
        return self._lifted(call, most=_MOST_LIFTED)

    def _lifted(self, call: Call, most: int) -> _Found | None:
        """Return the call with the rows past which the kernel gets it as the row rejects it."""
        if self._says(call) != "fail":
            return None
        past: tuple[str, ...] = (self.row.id,)
        while len(past) <= most:
            judgement = Judgement(self._without(past), Form(call), Policy())
            if judgement.status == "eligible" and self._is_seen(judgement.final.form.call):
                return _Found(call, past)
            evaluations = judgement.stages.evaluations
            blocking = evaluations[0 if judgement.status == "eligible" else -1].blocking
            others = tuple(dict.fromkeys(row for row, _, outcome, _ in blocking if outcome == "fail"))
            if not others or set(others) & set(past):
                return None
            past = (*past, *others)
        return None

    def _is_seen(self, call: Call) -> bool:
        """Whether the kernel gets what the row rejects; what padding leaves out stays NaN in any mask."""
        return self._says(call) == "fail" or "left_out_finite" in dict(self._conditions)

    def _without(self, past: tuple[str, ...]) -> Prepared:
        """Return the backend without some rows, answers about features among them."""
        rows = tuple(row for row in self.rows.rows or () if row.id not in past)
        features = {name: _yes(row) if row.id in past else row for name, row in self.rows.features.items()}
        return replace(self.rows, rows=rows, features=features)

    def _inside(self, calls: list[_Found]) -> Side:
        if not calls:
            return Side(reason="no call was found that the row lets pass and the backend takes")
        # Where each layout compiles for seconds, one call is tried in all of them.
        laid = calls[:1] if self._compiles else calls
        trials = [self._trial(call) for call, _ in calls]
        trials += [
            self._trial(form, memory=memory) for call, _ in laid for form, memory in self._layouts(call)
        ]
        trials += [self._trial(call, values=values) for call, _ in calls for values in values_of(call)]
        return Side(tuple(dict.fromkeys(trials)))

    def _outside(self, calls: list[_Found]) -> Side:
        if not calls:
            return Side(reason="no call was found that the row rejects and the kernel can be given")
        kinds: tuple[Values, ...] = ("usual", "low")
        if self.row.rule.kind in _RISKY:
            kinds = (*kinds, "sharp", "equal", "zeros")
        # What is known to be right is not tried at length.
        calls = calls[:_ARGUED] if self.row.rule.argued else calls
        trials = []
        for call, past in calls:
            named = ("garbage", *kinds) if is_padded(call) else kinds
            trials += [self._trial(call, values=values, past=past) for values in named]
        # Rows about offsets and strides mean what lies apart: what is right with heads outermost need not be
        # with tokens outermost.
        apart = [c for c in calls if c.call.layout == "bhsd" and not c.call.strides.kv_heads_expanded]
        for values in ("usual", "low"):
            for call, past in apart:
                order = _ORDERS[1] if call.strides.packed or call.batch == 1 else _FURTHEST
                trials.append(self._trial(call, memory=order, values=values, past=past))
        return Side(tuple(dict.fromkeys(trials)))

    def _layouts(self, call: Call) -> Iterator[tuple[Call, tuple[str, ...]]]:
        """Give the memory layouts of a call that the row and the backend admit."""
        yield call, ()
        plain = call.strides.changed(tokens_contiguous=not call.mask)
        forms: list[tuple[tuple[str, ...], Strides]] = [(_ORDERS[0], plain)]
        forms.append((_ORDERS[1], plain.changed(tokens_contiguous=True)))
        forms.append((_ORDERS[1], plain.changed(packed=False)))
        if call.num_heads_kv > 1:
            forms.append(((), plain.changed(kv_heads_expanded=True)))
        for memory, strides in forms:
            form = call.changed(strides=strides)
            is_admitted = Judgement(self.rows, Form(form), Policy()).status == "eligible"
            if is_admitted and self._says(form) != "fail":
                yield form, () if call.layout == "thd" else memory

    def _trial(
        self,
        call: Call,
        *,
        memory: tuple[str, ...] = (),
        values: Values = "usual",
        past: tuple[str, ...] = (),
    ) -> Trial:
        return Trial.unchecked(
            line=render(call),
            device=self._device,
            backend=self.rows.backend,
            memory=memory,
            values=values,
            past=past,
        )


def _yes(row: FeatureRow) -> FeatureRow:
    """Return an answer about a feature as if the kernel had it."""
    return FeatureRow(row.id, row.answer.model_copy(update={"value": True, "repair": None}))


def _with_documents(call: Call) -> Call:
    """Return a call whose mask says that a packed batch is one of sequences, which examples leave out."""
    if call.layout != "thd" or any(isinstance(node, DocumentsNode) for node in call.mask):
        return call
    return call.changed(mask=(DocumentsNode(cross=call.seqlen_q != call.seqlen_kv), *call.mask))


def values_of(call: Call) -> tuple[Values, ...]:
    """Return the adversarial values that a call is tried with."""
    usual: tuple[Values, ...] = ("sharp", "low", "equal", "zeros")
    return (*usual, "garbage") if is_padded(call) else usual


def is_padded(call: Call) -> bool:
    """Return whether a call leaves out keys that may hold NaN."""
    return any(isinstance(node, KeyPaddingNode) and not node.finite for node in call.mask)


def bytes_of(call: Call) -> int:
    """Return what query, key, value, output and a mask or bias take."""
    width = call.head_dim_qk + call.head_dim_v
    tokens = call.num_heads_q * call.seqlen_q + call.num_heads_kv * call.seqlen_kv
    elements = call.batch * tokens * width + mask_tensor_elements(call)
    return elements * DTYPE_BYTES[call.dtype]


def size_of(trials: Iterable[Trial]) -> int:
    """Return the bytes of the largest call where those are many, else 0."""
    size = max((bytes_of(parse(trial.line)) for trial in trials), default=0)
    return size if size > _LARGE else 0
