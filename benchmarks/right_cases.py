"""The calls that `right_on_gpu.py` holds against float64: what can vary, and how a varied set is drawn.

Every case is one line of JSON, and that line alone makes the same tensors again.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple


class Case(NamedTuple):
    """One call.

    Attributes:
        backend: Who must run it; "auto" lets the tables choose.
        api: The layout that `attention()` is told: bhsd, bshd or thd.
        dtype: bf16, f16 or f32.
        query: How the query lies in memory, a name of `right_inputs.STORAGE`.
        key: The same of the keys.
        value: The same of the values.
        grad: The same of the output's gradient, or a form with strides of 0.
        mask: A name of `MASKS`.
        extra: What is done to the scores besides.
        heads: Query heads and key heads.
        dims: head_dim_qk and head_dim_v.
        lengths: Batch, seqlen_q and seqlen_kv.
        phase: train or infer; lse also asks for the log-sum-exp.
        values: normal, or a form of hard numbers.
        garbage: What stands in keys and values that the mask leaves out for a whole row.
        seed: Of every number.
    """

    backend: str
    api: str = "bhsd"
    dtype: str = "bf16"
    query: str = "plain"
    key: str = "plain"
    value: str = "plain"
    grad: str = "plain"
    mask: str = "none"
    extra: str = "none"
    heads: tuple[int, int] = (4, 4)
    dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int, int] = (2, 192, 192)
    phase: str = "train"
    values: str = "normal"
    garbage: str = "none"
    seed: int = 0

    @property
    def line(self) -> str:
        """The case as JSON without what is at its default."""
        changed = {n: v for n, v in self._asdict().items() if v != self._field_defaults.get(n)}
        return json.dumps(changed, separators=(",", ":"))

    @property
    def is_square(self) -> bool:
        """As many queries as keys."""
        return self.lengths[1] == self.lengths[2]


def read(line: str) -> Case:
    """Undo `Case.line`."""
    found = json.loads(line)
    return Case(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})


BAND_MASKS = (
    "none",
    "causal_tl",
    "causal_br",
    "window_tl",
    "window_br",
    "sides_tl",
    "sides_br",
    "future_br",
)
TOKEN_MASKS = (
    "documents",
    "documents_causal",
    "documents_window",
    "pad_right",
    "pad_right_causal",
    "pad_left",
    "pad_left_causal",
)
MASKS = (*BAND_MASKS, *TOKEN_MASKS, "dense", "dense_heads")
PADDED_MASKS = ("pad_right", "pad_right_causal", "pad_left", "pad_left_causal")
_STORAGES = ("plain", "plain", "tokens_outer", "tokens_outer", "sbhd", "qkv", "qkv_8b", "qkv_odd", "row_gap")
FACTORS: dict[str, tuple[object, ...]] = {
    "api": ("bhsd", "bhsd", "bshd", "thd"),
    "dtype": ("bf16", "bf16", "bf16", "f16", "f32"),
    "query": (*_STORAGES, "shifted", "dim_strided"),
    "key": (*_STORAGES, "shifted", "dim_strided", "one_head", "one_batch"),
    "value": (*_STORAGES, "shifted", "dim_strided", "one_head", "one_batch"),
    "grad": (
        "plain",
        "tokens_outer",
        "sbhd",
        "qkv",
        "qkv_odd",
        "shifted",
        "dim_strided",
        "scalar",
        "last_0",
        "heads_0",
        "tokens_0",
    ),
    "mask": (*MASKS, "none", "causal_br", "documents_causal", "pad_right_causal"),
    "extra": ("none", "none", "none", "none", "scale", "sink", "softcap", "alibi", "bias", "bias_train"),
    "heads": ((4, 4), (8, 2), (4, 1), (6, 3)),
    "dims": (
        (64, 64),
        (128, 128),
        (64, 64),
        (128, 128),
        (32, 32),
        (72, 72),
        (80, 80),
        (96, 96),
        (20, 20),
        (192, 128),
        (192, 192),
        (256, 256),
        (512, 512),
        (64, 128),
        (128, 64),
        (64, 256),
        (64, 512),
    ),
    "lengths": (
        (2, 128, 128),
        (2, 129, 129),
        (3, 192, 192),
        (2, 704, 704),
        (1, 1000, 1000),
        (1, 2048, 2048),
        (2, 100, 300),
        (2, 300, 100),
        (2, 8, 1024),
        (3, 1, 257),
        (2, 257, 1),
        (2, 17, 17),
        (1, 512, 512),
    ),
    "phase": ("train", "train", "train_lse", "infer", "infer_lse"),
    "values": ("normal", "normal", "normal", "normal", "near_-120", "sharp", "large"),
}
"""What varies and between which values; a value that stands there twice is drawn twice as often."""
STRUCTURE = ("dtype", "mask", "extra", "dims", "phase", "heads")
"""What compiled kernels are compiled for: cases that share it come one after the other."""
SMALL = {
    "dtype": ("f32", "f32", "bf16"),
    "lengths": ((2, 33, 33), (1, 129, 129), (2, 20, 50), (2, 50, 20), (2, 1, 40)),
}
"""What varies instead without a GPU."""


def is_meant(case: Case) -> bool:
    """Return whether the words of a case go together."""
    documents = case.mask.startswith("documents")
    if case.api == "thd":
        return case.mask in BAND_MASKS and not case.extra.startswith("bias") and "alibi" not in case.extra
    return case.is_square or not documents


class Coverage:
    """Which pairs of values were drawn, so that the next case brings pairs that are new."""

    def __init__(self, seed: int, factors: dict[str, tuple[object, ...]]) -> None:
        """Begin with nothing drawn."""
        self._random = random.Random(seed)
        self._factors = factors
        self._tried: Counter[tuple[object, ...]] = Counter()

    def draw(self, backend: str, fixed: dict[str, object], *, of: int = 12) -> Case:
        """Return the one of several random cases whose pairs were tried least.

        Args:
            backend: Who must run it.
            fixed: Fields that must have these values.
            of: How many are looked at.
        """
        found = [case for _ in range(of) if is_meant(case := self._one(backend, fixed))]
        while not found:
            found = [case for _ in range(of) if is_meant(case := self._one(backend, fixed))]
        return max(found, key=lambda case: sum(1 / (1 + self._tried[p]) for p in self._pairs(case)))

    def count(self, case: Case, times: int) -> None:
        """Count the pairs of a case as tried so many times."""
        for pair in self._pairs(case):
            self._tried[pair] += times

    def _one(self, backend: str, fixed: dict[str, object]) -> Case:
        choose = self._random.choice
        found = {name: choose(values) for name, values in self._factors.items()} | fixed
        if self._random.random() < 0.4 and "key" not in fixed:
            found["key"] = found["value"] = found["query"]
        return Case(backend, **found, seed=self._random.randrange(10**6))  # type: ignore[arg-type]

    def _pairs(self, case: Case) -> Iterator[tuple[object, ...]]:
        values = [(name, getattr(case, name)) for name in self._factors]
        return combinations(values, 2)


def fixed_cases(backend: str, *, small: bool = False) -> Iterator[Case]:
    """Yield what is looked at whatever is drawn: storage, garbage in keys left out, hard numbers."""
    lengths = (2, 33, 33) if small else (2, 192, 192)
    base = Case(backend, lengths=lengths, dtype="f32" if small else "bf16")
    yield from _storage_cases(base)
    yield from _garbage_cases(base)
    for values in ("near_-120", "sharp", "large"):
        for mask in ("none", "causal_br", "pad_right", "documents_causal"):
            for dims in ((64, 64), (128, 128)):
                yield base._replace(values=values, mask=mask, dims=dims)


def _storage_cases(base: Case) -> Iterator[Case]:
    stored = ("plain", "tokens_outer", "sbhd", "qkv")
    for mask in ("causal_br", "documents", "pad_right", "none"):
        for name in stored:
            for grad in ("plain", "tokens_outer", "scalar"):
                for heads in ((4, 4), (8, 2)):
                    yield base._replace(mask=mask, query=name, key=name, value=name, grad=grad, heads=heads)
    for name in stored:
        for grad in ("plain", "tokens_outer", "scalar"):
            yield base._replace(api="thd", mask="causal_br", query=name, key=name, value=name, grad=grad)


def _garbage_cases(base: Case) -> Iterator[Case]:
    for mask in PADDED_MASKS:
        for garbage in ("nan", "inf", "huge"):
            for phase in ("infer_lse", "train"):
                for dims in ((64, 64), (128, 128)):
                    yield base._replace(mask=mask, garbage=garbage, phase=phase, dims=dims)
            batch, _, seqlen_kv = base.lengths
            if not mask.endswith("causal"):
                decode = (batch, 1, 2 * seqlen_kv + 1)
                yield base._replace(mask=mask, garbage=garbage, phase="infer", lengths=decode, heads=(8, 2))
