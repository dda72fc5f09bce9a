"""The calls that `sweep.py` measures: what varies, and how a set is drawn that covers the space in pairs.

A structure is what kernels are compiled for (dtype, memory, mask, scores, head dims, heads, direction); each
comes with several sizes (batch and lengths), which share the compiled code. Structures and sizes are drawn so
that pairs of values that were together least come first: the first part of the set covers the space as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Literal, NamedTuple


class SweepCall(NamedTuple):
    """One call.

    Attributes:
        dtype: bf16 or f16.
        memory: contiguous in the order of the layout, or tokens: (batch, seqlen, heads, head_dim) in memory,
            seen as (batch, heads, seqlen, head_dim), as models have them. Layout thd is always contiguous.
        mask: A name of `MASKS`.
        extra: What is done to the scores besides, a name of `EXTRAS`.
        dims: head_dim_qk and head_dim_v.
        heads: Query heads and key heads.
        phase: inference or training.
        batch: Batch rows; of thd masks the sequences that `seqlen_q` tokens are cut into.
        seqlen_q: Queries, of thd masks all tokens.
        seqlen_kv: Keys, of thd masks all tokens.
    """

    dtype: str = "bf16"
    memory: str = "contiguous"
    mask: str = "none"
    extra: str = "none"
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (32, 8)
    phase: str = "inference"
    batch: int = 1
    seqlen_q: int = 1024
    seqlen_kv: int = 1024

    @property
    def key(self) -> str:
        """The call as JSON; `read` gives the equal call back."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @property
    def part(self) -> Literal["fit", "unseen"]:
        """Two thirds of the calls may be fitted, a third may not be seen by a fit: by a hash of the call."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return "unseen" if digest[0] % 3 == 0 else "fit"

    @property
    def is_thd(self) -> bool:
        """Whether the call is in layout thd."""
        return self.mask.startswith("thd")

    @property
    def flops(self) -> float:
        """Floating point operations over all pairs of query and key, without what a mask leaves out."""
        rows = 1 if self.is_thd else self.batch
        forward = 2.0 * rows * self.heads[0] * self.seqlen_q * self.seqlen_kv * sum(self.dims)
        return forward * (3.5 if self.phase == "training" else 1.0)

    @property
    def score_count(self) -> int:
        """Entries of a matrix of all scores."""
        rows = 1 if self.is_thd else self.batch
        return rows * self.heads[0] * self.seqlen_q * self.seqlen_kv

    @property
    def bytes(self) -> int:
        """Bytes of query, key, value and output."""
        rows = 1 if self.is_thd else self.batch
        tokens = self.heads[0] * self.seqlen_q + self.heads[1] * self.seqlen_kv
        return 2 * rows * tokens * sum(self.dims)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a mask with an entry for every query and key, and of such a bias."""
        pairs = self.seqlen_q * self.seqlen_kv
        masks = {"bool_batch": self.batch, "bool_causal": 1, "bool_random": 1}.get(self.mask, 0)
        return pairs * (masks + (2 * self.heads[0] if self.extra in DENSE_EXTRAS else 0))


def read(key: str) -> SweepCall:
    """Undo `SweepCall.key`."""
    found = json.loads(key)
    return SweepCall(**{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()})


SQUARE_MASKS = (
    "causal",
    "documents_few",
    "documents_many",
    "documents_full",
    "prefix",
    "bool_causal",
    "thd_causal",
    "thd_full",
    "thd_window",
)
"""Masks whose queries and keys are the same tokens."""
OTHER_MASKS = (
    "none",
    "causal_br",
    "window_small",
    "window_large",
    "window_sides",
    "pad_right",
    "pad_right_causal",
    "pad_left_causal",
    "bool_random",
    "bool_batch",
    "function",
)
MASKS = (*SQUARE_MASKS, *OTHER_MASKS)
DENSE_EXTRAS = ("bias", "bias_grad")
EXTRAS = ("none", "sink", "softcap", "alibi", *DENSE_EXTRAS)
SQUARES = (1, 17, 64, 128, 197, 257, 512, 577, 1000, 1024, 1370, 2048, 3001, 4096, 4608, 8192, 10007, 16384)
LONG = (20000, 32768, 65536)
DECODED = (1024, 2048, 4097, 8192, 16384, 30011, 65536)
_UNEQUAL = ((100, 300), (512, 2048), (1000, 3001), (2048, 16384), (4096, 1024), (128, 8192), (1, 1))
_CROSSED = ((256, 77), (1024, 77), (4096, 77), (9216, 77))
FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "bf16", "bf16", "bf16", "f16"),
    "memory": ("contiguous", "tokens"),
    "mask": (*MASKS, "none", "none", "causal", "causal", "causal_br", "pad_right"),
    "extra": (*EXTRAS, *["none"] * 7),
    "dims": (
        *[(64, 64)] * 3,
        *[(128, 128)] * 4,
        (32, 32),
        (40, 40),
        (72, 72),
        (80, 80),
        (96, 96),
        (192, 128),
        (256, 256),
        (320, 320),
        (512, 512),
        (576, 512),
    ),
    "heads": (
        (8, 8),
        (12, 12),
        (16, 16),
        (32, 32),
        (8, 2),
        (32, 8),
        (64, 16),
        (32, 4),
        (64, 8),
        (8, 1),
        (16, 1),
        (64, 1),
    ),
    "phase": ("inference", "training"),
}
"""What a structure varies; a value that stands there twice is drawn more often."""
REGIMES = ("square", "square", "long", "decode", "unequal", "cross")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
STRUCTURES = 150
SIZES = 3
MOST_FLOPS = 2.0e12
"""About 5 ms at 400 TFLOP/s."""
MOST_FLOPS_LONG = 7.0e12
"""The same for sequences of 20000 and more: about 18 ms."""
MOST_BYTES = 3 * 2**30
MOST_DENSE_BYTES = 2**30


def is_meant(call: SweepCall) -> bool:
    """Return whether the values of a call go together."""
    if call.mask in SQUARE_MASKS and call.seqlen_q != call.seqlen_kv:
        return False
    if call.is_thd:
        return call.extra not in (*DENSE_EXTRAS, "alibi") and call.memory == "contiguous"
    return call.extra != "alibi" or call.mask in ("none", "causal", "causal_br", "window_small", "pad_right")


def limit(call: SweepCall) -> float:
    """Return the most floating point operations that a call may take."""
    return MOST_FLOPS_LONG if max(call.seqlen_q, call.seqlen_kv) >= LONG[0] else MOST_FLOPS


def is_bounded(call: SweepCall) -> bool:
    """Return whether work and memory of a call are within the limits."""
    small = call.bytes <= MOST_BYTES and call.dense_bytes <= MOST_DENSE_BYTES
    return small and call.flops <= limit(call)


class Coverage:
    """Draws calls, those first whose pairs of values were drawn least."""

    def __init__(self, seed: int) -> None:
        """Begin with nothing drawn."""
        self._random = random.Random(seed)
        self._drawn: Counter[tuple[object, ...]] = Counter()

    def structure(self, taken: set[SweepCall], *, of: int = 24) -> SweepCall:
        """Return a structure that was not taken, at the default size."""
        found: list[SweepCall] = []
        while len(found) < of:
            values = {name: self._random.choice(options) for name, options in FACTORS.items()}
            call = SweepCall(**values)  # type: ignore[arg-type]
            if is_meant(call) and call not in taken:
                found.append(call)
        return max(found, key=lambda call: self._worth(_pairs(call)))

    def size(self, structure: SweepCall, *, of: int = 12) -> SweepCall:
        """Return the structure at a batch and lengths whose work is bounded."""
        found: list[SweepCall] = []
        while len(found) < of:
            call = self._bounded(self._sized(structure))
            if call is not None and is_meant(call):
                found.append(call)
        best = max(found, key=lambda call: self._worth(_size_pairs(call)))
        self._drawn.update(_size_pairs(best))
        return best

    def count(self, structure: SweepCall) -> None:
        """Count the pairs of a structure as drawn."""
        self._drawn.update(_pairs(structure))

    def _worth(self, pairs: Iterator[tuple[object, ...]]) -> float:
        return sum(_share(pair) / (1 + self._drawn[pair]) for pair in pairs)

    def _sized(self, structure: SweepCall) -> SweepCall:
        choose = self._random.choice
        regime = choose(REGIMES)
        if structure.mask in SQUARE_MASKS or regime in ("square", "long"):
            length = choose(LONG if regime == "long" else SQUARES)
            lengths = length, length
        elif regime == "decode":
            lengths = choose((1, 1, 2, 4, 8, 16)), choose(DECODED)
        else:
            lengths = choose(_CROSSED if regime == "cross" else _UNEQUAL)
        return structure._replace(batch=choose(BATCHES), seqlen_q=lengths[0], seqlen_kv=lengths[1])

    def _bounded(self, call: SweepCall) -> SweepCall | None:
        """Return the call with as many batch rows as its bounds leave, None where one row is too much."""
        while not is_bounded(call):
            if call.batch == 1 or call.is_thd:
                return None
            call = call._replace(batch=call.batch // 2)
        return call


def length_class(length: int) -> str:
    """Return the class of a length: what a cost depends on."""
    for most, name in ((16, "few"), (128, "short"), (1024, "middle"), (8192, "usual")):
        if length <= most:
            return name
    return "long"


def _share(pair: tuple[object, ...]) -> float:
    """Say how much a pair counts: by the square root, so that rare values come oftener than by chance."""
    counts = [
        FACTORS[part[0]].count(part[1]) for part in pair if isinstance(part, tuple) and part[0] in FACTORS
    ]
    return math.sqrt(math.prod(counts))


def _pairs(call: SweepCall) -> Iterator[tuple[object, ...]]:
    return combinations([(name, getattr(call, name)) for name in FACTORS], 2)


def _size_pairs(call: SweepCall) -> Iterator[tuple[object, ...]]:
    """Yield pairs of a size's values, and of one of these with one of the structure."""
    sizes = [
        ("batch", call.batch),
        ("seqlen_q", call.seqlen_q),
        ("seqlen_kv", call.seqlen_kv),
        ("classes", length_class(call.seqlen_q), length_class(call.seqlen_kv)),
    ]
    yield from combinations(sizes, 2)
    for size in sizes:
        for name in ("mask", "dims", "heads", "phase", "memory", "extra"):
            yield size, (name, getattr(call, name))


def units(seed: int = 0, structures: int = STRUCTURES, sizes: int = SIZES) -> list[list[SweepCall]]:
    """Return the calls by structure: one process compiles and measures those of one after the other."""
    coverage = Coverage(seed)
    taken: set[SweepCall] = set()
    found = []
    for _ in range(structures):
        structure = coverage.structure(taken)
        taken.add(structure)
        coverage.count(structure)
        # A set: a structure with few sizes within its bounds may be drawn at one of them twice.
        found.append(list(dict.fromkeys(coverage.size(structure) for _ in range(sizes))))
    return found


def shrunk(call: SweepCall) -> SweepCall:
    """Return the call with few short rows and few heads, for a machine without a GPU."""
    group = call.heads[0] // call.heads[1]
    heads_kv = min(call.heads[1], 2)
    return call._replace(
        batch=min(call.batch, 2),
        heads=(heads_kv * group, heads_kv),
        seqlen_q=min(call.seqlen_q, 24),
        seqlen_kv=min(call.seqlen_kv, 24 if call.seqlen_q == call.seqlen_kv else 40),
    )
