"""Draws calls of all kinds: the same seed draws the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from attnroute.conformance.points import is_padded
from attnroute.conformance.pool import Job
from attnroute.conformance.trials import Trial, Values
from attnroute.engine.evaluate import Form, prepared
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

STRUCTURES: Final = 40
"""Kinds of calls for backends that compile, which take seconds for each."""
_SHARES: Final = {"free": 0.2, "compiled": 0.2}
"""Of calls for which attnroute chooses, and of those that name a backend that compiles."""
_TRIES: Final = 60
_CHUNK: Final = 50
"""Calls that a process is given at a time."""
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
    groups: dict[str, list[Trial]] = {}
    for number in range(count):
        found = _drawn(tables, host, backends, Random(f"{seed} {number}"), seed)  # noqa: S311 - no secret
        if found is not None:
            groups.setdefault(found[0], []).append(found[1])
    for group, trials in groups.items():
        for at in range(0, len(trials), _CHUNK):
            part = tuple(trials[at : at + _CHUNK])
            yield Job(f"{group} {at}", group, "drawn", part)


def _drawn(
    tables: Tables, host: Host, backends: tuple[str, ...], rng: Random, seed: int
) -> tuple[str, Trial] | None:
    """Return a call that its backend takes, and who shares compiled kernels with it."""
    rows = prepared(tables, host)
    here = [b for b in backends if not (rows[b].missing or rows[b].never_runs or rows[b].outside)]
    compiled = [b for b in here if rows[b].info.first_call_seconds is not None or b == "fa4"]
    quick = [b for b in here if b not in compiled]
    at = rng.random()
    if at < _SHARES["free"] or not here:
        names: list[str | None] = [None]
    else:
        names = [*(compiled if (at < sum(_SHARES.values()) and compiled) or not quick else quick)]
    backend = rng.choice(names)
    is_quick = backend in quick
    for _ in range(_TRIES):
        structure = rng.randrange(STRUCTURES)
        kind = rng if is_quick else Random(f"{seed} structure {structure}")  # noqa: S311
        call = _call(kind, rng, device_of(host.arch), may_compile=is_quick)
        if call is None or not _is_taken(call, backend, rows):
            continue
        trial = Trial(
            line=render(call),
            device=device_of(host.arch),
            backend=backend,
            memory=_memory(call, rng),
            values=_values(call, rng),
        )
        return str(backend) if is_quick else f"{backend} {structure}", trial
    return None


def _is_taken(call: Call, backend: str | None, rows: dict[str, Any]) -> bool:
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
