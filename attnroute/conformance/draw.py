"""Draws calls of all kinds: the same seed draws the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, Final

from attnroute.conformance.points import is_padded
from attnroute.conformance.pool import Job
from attnroute.conformance.trials import Trial, Values
from attnroute.engine.evaluate import Form, Prepared, prepared
from attnroute.engine.select import Judgement
from attnroute.errors import ArgumentError
from attnroute.question import fits
from attnroute.question.call import Call, Context, Strides
from attnroute.question.host import Host, device_of
from attnroute.question.line import render
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables

STRUCTURES: Final = {"free": 30, "compiled": 12, "planned": 300}
"""Kinds of calls where attnroute chooses, for each backend that compiles, and for each that makes plans."""
_SHARES: Final = {"compiled": 0.2, "free": 0.2, "planned": 0.15}
"""Of calls that name such a backend, and of those where attnroute chooses; the others name another one."""
_PLANNER: Final = "cudnn"
"""The distribution whose kernels are planned anew for each shape, which takes half a second."""
_TRIES: Final = 60
_STRUCTURES_TRIED: Final = 200
_CHUNK: Final = 50
"""Calls that a process is given at a time."""
_AT_ONCE: Final = 1000
"""Calls that are drawn before the first of them run; drawing takes a millisecond each."""
_COMPILING: Final = 20.0
"""Seconds that the calls of a structure take beside others, about."""
_LENGTHS: Final = (1, 2, 3, 7, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 130, 200, 255, 256, 257, 300, 512)
_WIDTHS: Final = (8, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 192, 256)
_MOST: Final = {"cpu": 2**16, "cuda": 2**22}
"""Scores of a call."""


def jobs(tables: Tables, host: Host, backends: tuple[str, ...], count: int, seed: int) -> Iterator[Job]:
    """Give jobs with so many calls in all, those of one structure in one job where a backend compiles it.

    Args:
        tables: The tables.
        host: The machine.
        backends: Who is named; of those that cannot run here none is.
        count: How many calls.
        seed: Other seeds draw other calls.
    """
    artist = _Artist(prepared(tables, host), backends, device_of(host.arch), seed)
    ends = [0, *accumulate(int(count * share) for share in _SHARES.values())]
    parts = [*zip(_SHARES, ends, ends[1:], strict=False)]
    parts += [("quick", at, min(at + _AT_ONCE, count)) for at in range(ends[-1], count, _AT_ONCE)]
    for kind, first, last in parts:
        # What shares compiled code comes first and whole, so that as few processes as can be compile it.
        groups: dict[str, list[Trial]] = {}
        for number in range(first, last):
            found = artist.draw(number, kind)
            if found is not None:
                groups.setdefault(found[0], []).append(found[1])
        for group, trials in groups.items():
            for at in range(0, len(trials), _CHUNK):
                part = tuple(trials[at : at + _CHUNK])
                seconds = 1.0 if kind == "quick" else _COMPILING
                yield Job(f"{group} {first + at}", group, "drawn", part, seconds=seconds)


class _Artist:
    """Draws calls for one machine."""

    def __init__(self, rows: dict[str, Prepared], backends: tuple[str, ...], device: str, seed: int) -> None:
        self._rows, self._device, self._seed = rows, device, seed
        here = [b for b in backends if not (rows[b].missing or rows[b].never_runs or rows[b].outside)]
        compiled = [b for b in here if rows[b].info.first_call_seconds is not None]
        planned = [b for b in here if _PLANNER in rows[b].info.needs]
        quick = [b for b in here if b not in (*compiled, *planned)]
        anyone: list[str | None] = [None]
        self._named = {
            "free": anyone,
            "compiled": [*compiled] or [*here] or anyone,
            "planned": [*planned] or [*here] or anyone,
            "quick": [*quick] or [*here] or anyone,
        }
        self._shared = {*compiled, *planned, None}
        self._compiled = {*compiled, None}
        self._structures: dict[tuple[str | None, int], str] = {}

    def draw(self, number: int, kind: str) -> tuple[str, Trial] | None:
        """Return a call that its backend takes, and who shares compiled kernels with it.

        Args:
            number: The same number draws the same call.
            kind: "free" lets attnroute choose; "compiled", "planned" and "quick" name such a backend.
        """
        rng = Random(f"{self._seed} {number}")  # noqa: S311 - no secret
        backend = rng.choice(self._named[kind])
        if backend not in self._shared:
            found = self._taken(backend, lambda: rng, rng, rng)
            return None if found is None else (str(backend), found)
        is_planned = backend not in self._compiled
        kind = "planned" if is_planned else "free" if backend is None else "compiled"
        number = rng.randrange(STRUCTURES[kind])
        structure = self._structure(backend, number)
        # A plan is for one shape, compiled code for all.
        sizes = Random(structure) if is_planned else rng  # noqa: S311
        found = self._taken(backend, partial(Random, structure), sizes, rng)
        return None if found is None else (f"{backend} {number}", found)

    def _structure(self, backend: str | None, number: int) -> str:
        """Return the seed of a structure that a backend takes."""
        if (backend, number) not in self._structures:
            name = ""
            for attempt in range(_STRUCTURES_TRIED):
                name = f"{self._seed} {backend} {number} {attempt}"
                sizes = Random(name)  # noqa: S311
                if self._taken(backend, partial(Random, name), sizes, sizes, most=3) is not None:
                    break
            self._structures[backend, number] = name
        return self._structures[backend, number]

    def _taken(
        self,
        backend: str | None,
        shape: Callable[[], Random],
        sizes: Random,
        values: Random,
        most: int = _TRIES,
    ) -> Trial | None:
        """Return a drawn call that a backend takes.

        Args:
            backend: The backend, None for any.
            shape: Returns what draws the structure.
            sizes: Draws sizes.
            values: Draws what tensors hold.
            most: How many calls are tried.
        """
        for _ in range(most):
            kind = shape()
            call = _call(kind, sizes, self._device, may_compile=backend not in self._shared)
            if call is not None and _is_taken(call, backend, self._rows):
                return Trial(
                    line=render(call),
                    device=self._device,
                    backend=backend,
                    memory=_memory(call, kind),
                    values=_values(call, values),
                )
        return None


def _is_taken(call: Call, backend: str | None, rows: dict[str, Prepared]) -> bool:
    form = Form(normalize(call))
    names = rows if backend is None else [backend]
    return any(Judgement(rows[name], form, Policy()).status == "eligible" for name in names)


def _memory(call: Call, rng: Random) -> tuple[str, ...]:
    if call.layout == "thd" or call.strides.kv_heads_expanded:
        return ()
    return ("bshd" if call.strides.tokens_contiguous and (call.mask or rng.random() < 0.5) else "bhsd",) * 3


def _values(call: Call, rng: Random) -> Values:
    if is_padded(call) and rng.random() < 0.5:
        return "garbage"
    others: tuple[Values, ...] = ("sharp", "low", "equal", "zeros")
    return rng.choice(others) if rng.random() < 0.35 else "usual"


def _call(kind: Random, rng: Random, device: str, *, may_compile: bool) -> Call | None:
    """Draw a call; None where its parts do not fit.

    Args:
        kind: Draws the structure.
        rng: Draws sizes.
        device: "cpu" or "cuda".
        may_compile: It may stand below torch.compile.
    """
    fields: dict[str, Any] = _structure(kind)
    lengths = [n for n in _LENGTHS if n <= (130 if device == "cpu" else 512)]
    seqlen_q = rng.choice(lengths)
    same = kind.random() < 0.55
    seqlen_kv = seqlen_q if same else rng.choice(lengths)
    fields |= {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "batch": rng.randint(1, 3)}
    if fields["layout"] == "thd":
        fields["batch"] = 1
    scores = fields["batch"] * fields["num_heads_q"] * seqlen_q * seqlen_kv
    if scores > _MOST[device]:
        return None
    if may_compile and rng.random() < 0.02:
        fields["context"] = Context(compiled=True)
    try:
        fields["mask"] = _mask(kind, rng, fields)
        fields |= _scores(kind, fields)
        call = Call(**fields)
        apart = bool(call.mask) and call.layout == "bhsd" and kind.random() < 0.5
        call = call.changed(strides=_strides(kind, call).changed(tokens_contiguous=not apart))
        fits.check(call)
    except ArgumentError:
        return None
    return call


def _structure(kind: Random) -> dict[str, Any]:
    heads = kind.choice((1, 2, 2, 3, 4))
    group = kind.choice((1, 1, 1, 2, 3, 4, 8))
    width = kind.choice(_WIDTHS)
    trains = kind.random() < 0.6
    return {
        "dtype": kind.choices(("bfloat16", "float16", "float32", "float64"), (45, 25, 25, 5))[0],
        "num_heads_q": heads * group,
        "num_heads_kv": heads,
        "head_dim_qk": width,
        "head_dim_v": width if kind.random() < 0.8 else kind.choice(_WIDTHS),
        "layout": kind.choices(("bhsd", "bshd", "thd"), (50, 25, 25))[0],
        "phase": "training" if trains else "inference",
        "qkv_requires_grad": True if trains else None,
        "scale": kind.choices(("positive", "negative", "zero"), (96, 2, 2))[0],
        "softcap": kind.choice((20.0, 50.0)) if kind.random() < 0.07 else 0.0,
        "sink": kind.random() < 0.1,
        "return_lse": kind.random() < 0.15,
        "deterministic": kind.random() < 0.05,
    }


def _corner(kind: Random) -> Any:
    return kind.choice(("top_left", "bottom_right"))


def _mask(kind: Random, rng: Random, fields: dict[str, Any]) -> tuple[MaskNode, ...]:
    if fields["layout"] == "thd":
        cross = fields["seqlen_q"] != fields["seqlen_kv"]
        documents = DocumentsNode(cross=cross)
        band = kind.choice(("none", "causal", "window"))
        return (documents, *([] if band == "none" else [_band(kind, band, "bottom_right")]))
    number = kind.choices((0, 1, 2), (25, 60, 15))[0]
    names = kind.sample(_NODES, number)
    return tuple(_node(name, kind, rng, fields) for name in names)


_NODES: Final = [
    *["causal"] * 6,
    *["window"] * 3,
    *["documents"] * 2,
    *["padding"] * 3,
    *["dense"] * 2,
    *("prefix", "function", "any", "not"),
]


def _band(kind: Random, name: str, corner: Any) -> MaskNode:
    if name == "causal":
        return CausalNode(alignment=corner)
    left, right = kind.choice(((5, 0), (40, 0), (30, 9), (None, 12), (17, None)))
    return WindowNode(left=left, right=right, alignment=corner)


def _node(name: str, kind: Random, rng: Random, fields: dict[str, Any]) -> MaskNode:
    batch, seqlen_q, seqlen_kv = fields["batch"], fields["seqlen_q"], fields["seqlen_kv"]
    if name in ("causal", "window"):
        return _band(kind, name, _corner(kind))
    if name == "documents":
        first = seqlen_kv // 3
        return DocumentsNode(lengths=(first, seqlen_kv - first))
    if name == "padding":
        side: Any = kind.choice(("right", "right", "left", "any"))
        lengths = tuple(rng.randint(0 if kind.random() < 0.1 else 1, seqlen_kv) for _ in range(batch))
        return KeyPaddingNode(
            lengths=lengths if side != "any" and kind.random() < 0.6 else None,
            side=side,
            finite=kind.random() < 0.4,
        )
    if name == "prefix":
        return PrefixNode(
            lengths=tuple(rng.randint(0, seqlen_kv) for _ in range(batch)), alignment=_corner(kind)
        )
    if name == "dense":
        heads = fields["num_heads_q"] if kind.random() < 0.4 else 1
        rows = kind.choice((batch, 1))
        shape = (rows, heads, seqlen_q, seqlen_kv) if kind.random() < 0.7 else (seqlen_q, seqlen_kv)
        return DenseNode(shape=shape, last_dim_contiguous=kind.random() < 0.9)
    if name == "function":
        return FunctionNode(per_batch=kind.random() < 0.5, per_head=kind.random() < 0.5)
    parts = tuple(
        (_node(kind.choice(("causal", "window", "prefix", "padding")), kind, rng, fields),) for _ in "ab"
    )
    return AnyNode(parts=parts) if name == "any" else NotNode(part=parts[0])


def _scores(kind: Random, fields: dict[str, Any]) -> dict[str, Any]:
    name = kind.choices(("none", "dense", "alibi", "function"), (78, 12, 7, 3))[0]
    trains = fields["phase"] == "training" and kind.random() < 0.5
    if name == "none" or (fields["layout"] == "thd" and name == "dense"):
        return {}
    if name == "alibi":
        return {"bias": AlibiBias(requires_grad=trains and kind.random() < 0.3)}
    if name == "function":
        return {"bias": FunctionBias(requires_grad=trains)}
    heads = fields["num_heads_q"] if kind.random() < 0.6 else 1
    shape = (kind.choice((1, fields["batch"])), heads, fields["seqlen_q"], fields["seqlen_kv"])
    dtype: Any = fields["dtype"] if kind.random() < 0.8 else "float32"
    return {
        "bias": DenseBias(
            dtype=dtype, shape=shape, requires_grad=trains, aligned=fields["seqlen_kv"] % 8 == 0
        )
    }


def _strides(kind: Random, call: Call) -> Strides:
    at = kind.random()
    if at < 0.15:
        return Strides(packed=False)
    if at < 0.2 and call.num_heads_kv > 1:
        return Strides(kv_heads_expanded=True)
    if at < 0.25:
        return Strides(aligned_16=False)
    return Strides(last_dim_contiguous=False) if at < 0.3 else Strides()
